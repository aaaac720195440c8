"""Calls as files: `tandem record` and `tandem replay`."""
