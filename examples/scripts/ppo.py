"""PPO with a critic: `python examples/scripts/ppo.py`, on the servers of cluster.yaml.

In a step the trainer, which knows the critic's address, asks it for values and trains it. The
client only says where the critic starts from, and when to save it.
"""

from loop import arguments, train
from tandem import CriticClient, TrainerClient

OBJECTIVE = {
    "advantage_estimator": "gae",
    "gae_gamma": 1.0,
    "gae_lambda": 0.95,
    "whiten_advantages": True,
    # Two passes over the responses of a step, each in four updates.
    "num_epochs": 2,
    "num_mini_batches": 4,
}

if __name__ == "__main__":
    with TrainerClient(arguments().trainer) as trainer:
        critic_address = trainer.info().critic_address
    with CriticClient(critic_address) as critic:
        critic.load_base_model()
        train("ppo", OBJECTIVE, show=("reward/mean", "critic/loss", "critic/explained_variance"))
        print(critic.save_checkpoint("runs/ppo/critic", "last"))
