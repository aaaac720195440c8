"""The display for people: text with authors, step lines, progress."""
