"""Tinker's HTTP API in front of a trainer server and a rollout server."""
