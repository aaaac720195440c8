"""From responses to rewards: built-in and user functions, and where they run."""
