"""Small helpers without a room of their own: files, words, numbers, progress, tracing."""
