"""The parts of bench_rollout.py: sides that generate, the machine's limits, and the table."""
