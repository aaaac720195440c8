"""The servers of one run, connected and checked."""
