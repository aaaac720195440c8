"""What a person sees: text with authors, step lines, progress."""
