"""The training loop: groups of responses, steps, start and end of a run."""
