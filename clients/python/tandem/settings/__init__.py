"""What run files and cluster files may say."""
