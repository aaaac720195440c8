"""The settings of run files and cluster files: their schema, and how they are read."""
