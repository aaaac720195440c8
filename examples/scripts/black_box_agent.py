"""Trains on the episodes of an agent that only knows OpenAI's API, on the servers of cluster.yaml.

`python examples/scripts/black_box_agent.py`. The agent here tries a sum twice; put any other in
its place that can be told a base URL and a header, whatever it is written in.
"""

import uuid
from concurrent.futures import ThreadPoolExecutor

import openai
from loop import WORDS_IN_TURN, right_sum
from session_loop import train_on_sessions
from tandem import SessionsClient

TASKS, EPISODES = 4, 8


def agent(served: dict[str, str], session_id: str, task: int, seed: int) -> float:
    """Solves a task, and returns how well: the black box."""
    a, b = task % 10, task // 10 % 10
    messages: list = [{"role": "user", "content": f"What is {a} + {b}? One number."}]
    headers = {"X-Session-Id": session_id}
    with openai.OpenAI(
        base_url=served["base_url"], api_key="none", default_headers=headers
    ) as client:
        for _ in range(2):
            answer = client.chat.completions.create(
                model=served["model"],
                messages=messages,
                max_completion_tokens=12,
                temperature=0.7,
                seed=seed,
                extra_body={"tandem": WORDS_IN_TURN},
            )
            message = answer.choices[0].message
            reward = right_sum(message.content or "", a + b)
            if reward == 1.0:
                break
            messages += [message, {"role": "user", "content": "Wrong. Again."}]
    return reward


def draw(served: dict[str, str], sessions: SessionsClient, step: int) -> None:
    """Lets the agent work on the tasks of a step, several times on each."""

    def episode(index: int) -> None:
        name, task = uuid.uuid4().hex, index // EPISODES
        reward = agent(served, name, task=37 * step + 11 * task, seed=1000 * step + index)
        # Episodes of one task are compared with each other.
        sessions.reward(name, reward, group_id=f"{step}/{task}")

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(episode, range(TASKS * EPISODES)))


if __name__ == "__main__":
    train_on_sessions("black_box_agent", draw, TASKS * EPISODES)
