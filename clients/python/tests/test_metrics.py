"""What the client computes of a step, by hand."""

import math

import pytest

from tandem.metrics import CRITIC_KEYS, KEYS, batch_metrics, step_line
from tandem.types.v1 import trajectory_pb2

END = 7


def trajectory(prompt, response, mask):
    return trajectory_pb2.Trajectory(
        prompt_token_ids=prompt, response_token_ids=response, authorship_mask=bytes(mask)
    )


def test_batch_metrics_of_two_responses():
    samples = [
        # Five tokens, three of the senior, two changes of author, sentences "1 7" and "2 3 4".
        trajectory([5, 6, 8], [1, END, 2, 3, 4], [1, 1, 0, 0, 1]),
        # Three tokens, one of the senior, one change, one sentence that ends with the response.
        trajectory([9], [2, 2, END], [0, 0, 1]),
    ]
    metrics = batch_metrics(samples, [1.0, 0.25], {END})
    assert metrics == {
        "reward/mean": 0.625,
        # |1 - 0.25| / sqrt(2): the deviation of two values with ddof 1.
        "reward/std": pytest.approx(0.75 / math.sqrt(2), rel=1e-15),
        "tandem/senior_token_fraction": 0.5,
        "tandem/junior_token_fraction": 0.5,
        "tandem/switches_per_seq": 1.5,
        "tandem/tokens_per_sent": 8 / 3,
        "tokens/prompt": 4,
        "tokens/response": 8,
    }


def test_one_response_has_no_deviation_and_no_change_of_author():
    metrics = batch_metrics([trajectory([1], [2], [1])], [3.0], set())
    assert metrics["reward/std"] == 0
    assert metrics["tandem/switches_per_seq"] == 0
    assert metrics["tandem/tokens_per_sent"] == 1
    assert metrics["tandem/senior_token_fraction"] == 1


def test_a_line_has_exactly_the_documented_keys():
    line = step_line({"step": 3, "loss/total": math.inf, "unheard/of": 1.0})
    assert tuple(line) == KEYS
    assert line["step"] == 3
    assert line["loss/total"] is None
    assert tuple(step_line({"critic/loss": 0.5})) == KEYS + CRITIC_KEYS
