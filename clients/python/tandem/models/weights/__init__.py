"""Weights in files: what a directory holds, what its config asks for, and how they are written."""
