"""Pulls a senior towards its junior: `python examples/scripts/distill_to_junior.py`.

The junior writes every response, and the senior learns the junior's distribution over the whole
vocabulary at each token: the loss is the mean of KL(junior || senior). The two must differ to begin
with: start the servers of cluster.yaml with a trained or a larger model as the senior,
`tandem up examples/scripts/cluster.yaml model=models/mine`.
"""

from loop import train

OBJECTIVE = {
    # Rewards that do not differ give advantages of 0: the KL alone is learnt.
    "advantage_estimator": "group_relative",
    "junior_kl_coefficient": 1.0,
    "junior_kl_kind": "forward",
}
JUNIOR_ALONE = {"selection_strategy": "bernoulli", "prob_senior": 0.0}

if __name__ == "__main__":
    train(
        "distill_to_junior",
        OBJECTIVE,
        show=("policy/junior_kl",),
        reward=lambda response, answer: 0.0,
        tandem=JUNIOR_ALONE,
    )
