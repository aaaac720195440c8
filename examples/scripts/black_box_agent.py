"""Trains on the episodes of an agent that only knows OpenAI's API, on the servers of cluster.yaml.

`python examples/scripts/black_box_agent.py`. The agent here tries a sum twice; put any other in
its place that can be told a base URL and a header, whatever it is written in.
"""

import json
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor

import openai
from loop import WORDS_IN_TURN, arguments, right_sum
from tandem import RolloutClient, SessionsClient, TrainerClient, policy_samples

TASKS, EPISODES = 4, 8
OBJECTIVE = {"advantage_estimator": "group_relative", "junior_token_loss_weight": 0.0}


def agent(served: dict[str, str], session_id: str, seed: int) -> float:
    """Solves a task, and returns how well: the black box."""
    a, b = seed % 10, seed // 10 % 10
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
                seed=int(session_id.replace("-", "")),
                extra_body={"tandem": WORDS_IN_TURN},
            )
            message = answer.choices[0].message
            reward = right_sum(message.content or "", a + b)
            if reward == 1.0:
                break
            messages += [message, {"role": "user", "content": "Wrong. Again."}]
    return reward


def main() -> None:
    """Serves the rollout server's model to the agent, and learns from its episodes."""
    options = arguments()
    run_id = f"black_box_agent-{uuid.uuid4().hex[:8]}"
    command = [sys.executable, "-m", "tandem", "serve-openai", "--port", "0", "--json"]
    with (
        RolloutClient(options.rollout) as rollout,
        TrainerClient(options.trainer) as trainer,
        ThreadPoolExecutor(16) as threads,
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

                def episode(index: int, step: int = step) -> None:
                    # Episodes of one task are compared with each other.
                    name, task = f"{step}-{index}", index // EPISODES
                    reward = agent(served, name, seed=37 * step + 11 * task)
                    sessions.reward(name, reward, group_id=f"{step}/{task}")

                list(threads.map(episode, range(TASKS * EPISODES)))
                episodes = sessions.finished(cursor, count=TASKS * EPISODES, wait_seconds=600)
                cursor = episodes[-1].cursor
                report = trainer.train_step(
                    policy_samples(sorted(episodes, key=lambda one: one.id)),
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
                trainer.save_checkpoint("runs/black_box_agent", f"step_{options.steps:06d}", keep=1)
            )
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
