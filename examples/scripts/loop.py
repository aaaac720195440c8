"""The training loop of the scripts beside it, with nothing but the clients: copy and change it.

One step: prompts → responses of senior and junior → rewards → one update of the senior → its new
weights to the rollout server. The task is sums of two digits.
"""

from __future__ import annotations

import argparse
import random
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem import PolicySample, Prompt, RolloutClient, TextCodec, TrainerClient, prompt_seed

PROMPTS = 8
SAMPLES = 8
SAMPLING = {"max_tokens": 12, "temperature": 0.7}
WORDS_IN_TURN = {"selection_strategy": "word", "prob_senior": 0.5}


def right_sum(response: str, answer: int) -> float:
    """Returns 1 for an answer that ends with the right number, 0.1 for one with a single number."""
    numbers = re.findall(r"\d+", response)
    return 1.0 if numbers[-1:] == [str(answer)] else 0.1 * (len(numbers) == 1)


def train(
    name: str,
    objective: Mapping[str, Any],
    *,
    show: Sequence[str],
    reward: Callable[[str, int], float] = right_sum,
    tandem: Mapping[str, Any] = WORDS_IN_TURN,
) -> None:
    """Trains from the base model and saves a checkpoint in runs/NAME.

    `show` names the metrics of a step to print.
    """
    options = arguments()
    run_id = f"{name}-{uuid.uuid4().hex[:8]}"
    with RolloutClient(options.rollout) as rollout, TrainerClient(options.trainer) as trainer:
        codec = TextCodec(Path(rollout.info().server.model.path))
        # Gives up what these servers learnt before.
        weights = trainer.load_base_model()
        trainer.publish([rollout], allow_rollback=True)
        for step in range(1, options.steps + 1):
            draw = random.Random(step).randrange
            sums = [(draw(10), draw(10)) for _ in range(PROMPTS)]
            prompts = [
                Prompt(
                    codec.chat([{"role": "user", "content": f"What is {a} + {b}? One number."}]),
                    seed=prompt_seed(0, step, index),
                    num_samples=SAMPLES,
                    sampling=SAMPLING,
                    tandem=tandem,
                )
                for index, (a, b) in enumerate(sums)
            ]
            # Responses with the same group id are compared with each other.
            samples = [
                PolicySample(
                    response,
                    group_id=f"{step}/{index}",
                    reward=reward(codec.decode(response.response_token_ids), sum(sums[index])),
                )
                for index, responses in enumerate(rollout.generate(prompts))
                for response in responses
            ]
            # The request id makes a repeat of the call harmless: a step is applied once.
            report = trainer.train_step(
                samples,
                run_id=run_id,
                step=step,
                expected_version=weights.version,
                objective=objective,
                request_id=f"{run_id}/{step}",
            ).report
            weights = report.weights
            trainer.publish([rollout])
            print(f"step {step}", *(f"{key} {report.metrics[key]:.4f}" for key in show), sep="  ")
        print(trainer.save_checkpoint(f"runs/{name}", f"step_{options.steps:06d}", keep=1))


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    return command_line().parse_args()


def command_line() -> argparse.ArgumentParser:
    """Returns the parser of the options that all loops have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollout", default="127.0.0.1:7701", metavar="HOST:PORT")
    parser.add_argument("--trainer", default="127.0.0.1:7702", metavar="HOST:PORT")
    parser.add_argument("--steps", type=int, default=20)
    return parser
