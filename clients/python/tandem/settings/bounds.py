"""Bounds of the contract that settings and rewards share."""

# The contract's counts and token ids are int32.
INT32_MAX = 2**31 - 1

# The trainer's bound of a reward's absolute value (kMaxReward).
MAX_REWARD = 1e9
