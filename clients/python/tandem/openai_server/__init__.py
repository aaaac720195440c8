"""An HTTP server with OpenAI's API over a rollout server, for tools that speak that API."""
