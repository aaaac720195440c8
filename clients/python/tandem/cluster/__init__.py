"""Servers on this machine: how they are planned, started, watched and found again."""
