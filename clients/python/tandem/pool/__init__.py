"""Several rollout servers as one: who gets which prompt, and what happens when one is lost."""
