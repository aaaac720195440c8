"""Directories at URLs of object stores and other file systems, through fsspec."""
