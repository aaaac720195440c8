"""The training loop of the agents beside it, which learns from sessions of `tandem serve-openai`.

One step: episodes of an agent, whose rewards it posts → one update of the senior → its new weights
to the rollout server. Copy and change it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from loop import arguments
from tandem import RolloutClient, SessionsClient, TrainerClient, policy_samples

OBJECTIVE = {"advantage_estimator": "group_relative", "junior_token_loss_weight": 0.0}
SHOWN = ("reward/mean", "tokens/response", "policy/grad_norm")


def train_on_sessions(
    name: str, draw: Callable[[dict[str, str], SessionsClient, int], Sequence[str]]
) -> None:
    """Trains from the base model and saves a checkpoint in runs/NAME.

    `draw(served, sessions, step)` lets an agent work on the tasks of a step: `served` has the
    `base_url` and the `model` that it calls, `sessions` takes the rewards of its episodes. It
    returns the ids of the sessions, in the order in which they are learnt.
    """
    options = arguments()
    run_id = f"{name}-{uuid.uuid4().hex[:8]}"
    with (
        RolloutClient(options.rollout) as rollout,
        TrainerClient(options.trainer) as trainer,
        openai_server(options.rollout) as served,
    ):
        sessions = SessionsClient(served["base_url"])
        weights = trainer.load_base_model()
        trainer.publish([rollout], allow_rollback=True)
        cursor = None
        for step in range(1, options.steps + 1):
            order = draw(served, sessions, step)
            finished = sessions.finished(cursor, count=len(order), wait_seconds=600)
            cursor = finished[-1].cursor
            report = trainer.train_step(
                policy_samples(sorted(finished, key=lambda one: order.index(one.id))),
                run_id=run_id,
                step=step,
                expected_version=weights.version,
                objective=OBJECTIVE,
                request_id=f"{run_id}/{step}",
            ).report
            weights = report.weights
            trainer.publish([rollout])
            # Episodes that were trained on need not be kept.
            sessions.drop(cursor)
            print(f"step {step}", *(f"{key} {report.metrics[key]:.4f}" for key in SHOWN), sep="  ")
        print(trainer.save_checkpoint(f"runs/{name}", f"step_{options.steps:06d}", keep=1))


@contextmanager
def openai_server(rollout: str) -> Iterator[dict[str, str]]:
    """Runs `tandem serve-openai` on a rollout server; yields what it prints, its `base_url`."""
    command = [sys.executable, "-m", "tandem", "serve-openai", "--port", "0", "--json"]
    with subprocess.Popen(
        [*command, "--rollout", rollout], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())
        finally:
            server.terminate()
