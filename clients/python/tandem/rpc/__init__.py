"""The clients of the three servers: calls, retries, credentials, messages."""
