"""Seeing a run: its trajectories by author, its numbers as curves."""
