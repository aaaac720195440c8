"""The ways to call a function that judges responses: in threads, processes, a loop, or one call."""
