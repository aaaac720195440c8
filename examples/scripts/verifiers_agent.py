"""Trains on a verifiers environment, that of verifiers_sums.py, on the servers of cluster.yaml.

`python examples/scripts/verifiers_agent.py`, once `pip install verifiers` is done. verifiers names
each rollout by a header of its own, which `tandem serve-openai` takes for the session.
"""

import asyncio
import itertools
import json
import subprocess
import sys
import uuid

import verifiers.v1 as vf
from loop import WORDS_IN_TURN, arguments
from tandem import RolloutClient, SessionsClient, TrainerClient, policy_samples
from verifiers_sums import SumTaskset

TASKS, EPISODES = 4, 8
OBJECTIVE = {"advantage_estimator": "group_relative", "junior_token_loss_weight": 0.0}
SAMPLING = {"temperature": 0.7, "max_tokens": 12, "tandem": WORDS_IN_TURN}


async def episode(
    served: dict[str, str], sessions: SessionsClient, task: vf.Task, seed: int
) -> str:
    """Lets the agent work on a task; returns the id of its session, whose reward is posted."""
    config = vf.AgentConfig(
        harness=vf.HarnessConfig(id="verifiers_sums"),
        runtime=vf.SubprocessConfig(),
        model=served["model"],
        client=vf.EvalClientConfig(base_url=served["base_url"], api_key_var="TANDEM_KEY"),
        sampling=vf.SamplingConfig(**SAMPLING, seed=seed),
    )
    async with vf.make_agent(config) as agent:
        trace = await agent.run(task)
    if not trace.ok:
        raise RuntimeError(f"an episode failed: {trace.last_error}")
    # Episodes of one task are compared with each other.
    await asyncio.to_thread(sessions.reward, trace.id, trace.reward, group_id=task.key)
    return trace.id


async def episodes(
    served: dict[str, str], sessions: SessionsClient, tasks: list[vf.Task], step: int
) -> list[str]:
    """Draws the episodes of a step; returns the ids of their sessions."""
    pairs = itertools.product(tasks, range(EPISODES))
    return await asyncio.gather(
        *(
            episode(served, sessions, task, seed=1000 * step + index)
            for index, (task, _) in enumerate(pairs)
        )
    )


def main() -> None:
    """Serves the rollout server's model to the agent, and learns from its episodes."""
    options = arguments()
    run_id = f"verifiers_agent-{uuid.uuid4().hex[:8]}"
    command = [sys.executable, "-m", "tandem", "serve-openai", "--port", "0", "--json"]
    taskset = SumTaskset(vf.TasksetConfig(id="verifiers_sums"))
    with (
        RolloutClient(options.rollout) as rollout,
        TrainerClient(options.trainer) as trainer,
        subprocess.Popen(
            [*command, "--rollout", options.rollout], stdout=subprocess.PIPE, text=True
        ) as server,
    ):
        try:
            assert server.stdout is not None
            served = json.loads(server.stdout.readline())
            sessions = SessionsClient(served["base_url"])
            weights = trainer.load_base_model()
            trainer.publish([rollout], allow_rollback=True)
            cursor = None
            for step in range(1, options.steps + 1):
                tasks = list(taskset.skip(TASKS * (step - 1)).take(TASKS))
                order = asyncio.run(episodes(served, sessions, tasks, step))
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
                show = ("reward/mean", "tokens/response", "policy/grad_norm")
                print(
                    f"step {step}", *(f"{key} {report.metrics[key]:.4f}" for key in show), sep="  "
                )
            print(
                trainer.save_checkpoint("runs/verifiers_agent", f"step_{options.steps:06d}", keep=1)
            )
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
