"""Tandem GRPO: `python examples/scripts/grpo.py`, on the servers of cluster.yaml."""

from loop import train

# A response's advantage is its reward less its group's mean, over the group's standard deviation.
# Tokens that the junior wrote have no weight.
OBJECTIVE = {"advantage_estimator": "group_relative", "junior_token_loss_weight": 0.0}

if __name__ == "__main__":
    train("grpo", OBJECTIVE, show=("reward/mean", "policy/entropy", "policy/grad_norm"))
