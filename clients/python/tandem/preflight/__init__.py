"""Checks before a run begins: problems of rows, settings, memory and servers."""
