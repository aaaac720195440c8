"""Trains on a verifiers environment, that of verifiers_sums.py, on the servers of cluster.yaml.

`python examples/scripts/verifiers_agent.py`, once `pip install verifiers` is done. verifiers names
each rollout by a header of its own, which `tandem serve-openai` takes for the session.
"""

import asyncio
import itertools

import verifiers.v1 as vf
from loop import WORDS_IN_TURN
from session_loop import train_on_sessions
from tandem import SessionsClient
from verifiers_sums import SumTaskset

TASKSET = SumTaskset(vf.TasksetConfig(id="verifiers_sums"))
TASKS, EPISODES = 4, 8
SAMPLING = {"temperature": 0.7, "max_tokens": 12, "tandem": WORDS_IN_TURN}


async def episode(
    served: dict[str, str], sessions: SessionsClient, task: vf.Task, seed: int
) -> None:
    """Lets the agent work on a task, and posts the reward of its session."""
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


async def episodes(
    served: dict[str, str], sessions: SessionsClient, tasks: list[vf.Task], step: int
) -> None:
    """Draws the episodes of a step."""
    pairs = itertools.product(tasks, range(EPISODES))
    await asyncio.gather(
        *(
            episode(served, sessions, task, seed=1000 * step + index)
            for index, (task, _) in enumerate(pairs)
        )
    )


def draw(served: dict[str, str], sessions: SessionsClient, step: int) -> None:
    """Draws the episodes of a step, of the next tasks."""
    tasks = list(TASKSET.skip(TASKS * (step - 1)).take(TASKS))
    asyncio.run(episodes(served, sessions, tasks, step))


if __name__ == "__main__":
    train_on_sessions("verifiers_agent", draw, TASKS * EPISODES)
