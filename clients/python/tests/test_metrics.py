"""Lines of metrics.jsonl."""

import json
import math

import pytest

from tandem._proto.types.v1.trajectory_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Trajectory,
)
from tandem.metrics import (
    ASYNC_CRITIC_KEYS,
    ASYNC_KEYS,
    CRITIC_KEYS,
    KEYS,
    IdleShares,
    length_metrics,
    response_metrics,
    staleness_metrics,
    step_line,
)


def response(length, finish_reason=FINISH_REASON_STOP):
    return Trajectory(response_token_ids=range(length), finish_reason=finish_reason)


def test_a_line_has_exactly_the_documented_keys():
    line = step_line({"step": 3, "loss/total": math.inf, "unheard/of": 1.0})
    assert tuple(line) == KEYS
    assert line["step"] == 3
    assert line["loss/total"] is None
    assert tuple(step_line({"critic/loss": 0.5})) == KEYS + CRITIC_KEYS
    assert tuple(step_line({"speculator/loss": 0.5})) == (*KEYS, "speculator/loss")


def test_keys_have_one_order_whatever_order_a_report_has():
    report = {"speculator/loss": 1.0, "router/z": 0.1, "speculator/head_0_accuracy": 0.5}
    reversed_report = dict(reversed(report.items()))
    assert list(reversed_report) != list(report)
    assert tuple(step_line(report)) == tuple(step_line(reversed_report))


def test_staleness_is_of_tokens_and_idle_shares_of_the_time_since_the_last_line():
    young, old = response(3), response(1)
    for one, version, count in ((young, 6, 2), (young, 7, 1), (old, 4, 1)):
        one.senior_versions.add(count=count).weights.version = version
    assert staleness_metrics([young, old], 7) == {"staleness/mean": 5 / 4, "staleness/max": 3}
    assert staleness_metrics([], 7) == {}
    now = [10.0]
    idle = IdleShares(2.0, lambda: now[0])
    now[0] += 4
    shares = idle.metrics(drawing=3.0, training=4.0, evaluating=1.0)
    assert shares == {"idle/rollout": 0.5, "idle/trainer": 0.0}
    now[0] += 2
    shares = idle.metrics(drawing=3.5, training=0.5, evaluating=0.0)
    assert shares == {"idle/rollout": 0.75, "idle/trainer": 0.75}
    line = step_line({"staleness/mean": 1.0})
    assert tuple(line) == KEYS + ASYNC_KEYS


def test_the_trainer_is_idle_while_the_critic_works():
    now = [10.0]
    idle = IdleShares(0.0, lambda: now[0])
    now[0] += 8
    shares = idle.metrics(drawing=2.0, training=4.0, evaluating=0.0, valuing=1.0)
    assert shares == {"idle/rollout": 0.75, "idle/trainer": 0.625, "idle/critic": 0.875}
    now[0] += 4
    shares = idle.metrics(drawing=2.0, training=0.0, evaluating=0.0, valuing=0.0)
    assert shares == {"idle/rollout": 1.0, "idle/trainer": 1.0, "idle/critic": 1.0}
    line = step_line({"critic/loss": 0.5} | shares)
    assert tuple(line) == KEYS + CRITIC_KEYS + ASYNC_KEYS + ASYNC_CRITIC_KEYS


def test_tokens_are_whole_numbers():
    line = step_line({"tokens/prompt": 12.0, "reward/mean": 1.0})
    assert json.dumps([line["tokens/prompt"], line["reward/mean"]]) == "[12, 1.0]"


def test_what_an_environment_said_counts_for_no_length():
    episode = response(6)
    episode.authorship_mask = bytes([1, 0, 2, 2, 2, 1])
    numbers = length_metrics([episode, response(1)])
    assert (numbers["response/length_mean"], numbers["response/length_max"]) == (2.0, 3)


def test_metrics_of_responses_and_rewards_are_as_documented():
    groups = [[response(2), response(5, FINISH_REASON_LENGTH)], [response(1), response(4)]]
    assert response_metrics(groups, [[0.5, 0.5], [-1.0, 2.0]]) == {
        "reward/min": -1.0,
        "reward/max": 2.0,
        "reward/frac_zero_std": 0.5,
        "reward/failed": 0,
        "response/length_mean": 3.0,
        "response/length_max": 5,
        "response/truncated_fraction": 0.25,
    }


def test_rewards_that_failed_are_counted_and_are_no_rewards():
    groups = [[response(1), response(1)], [response(1)], [response(1), response(1)]]
    found = response_metrics(groups, [[None, 1.0], [None], [1.0, 3.0]])
    assert (found["reward/min"], found["reward/max"], found["reward/failed"]) == (1.0, 3.0, 2)
    # A single reward has no variance; a group without a reward does not count.
    assert found["reward/frac_zero_std"] == pytest.approx(0.5)


def test_the_order_of_a_line_s_keys_is_that_of_no_map():
    names = [f"{kind}{name}" for kind in ("speculator/", "router/", "reward/") for name in "bca"]
    orders = {tuple(step_line(dict.fromkeys(given, 1.0))) for given in (names, names[::-1])}
    assert len(orders) == 1
