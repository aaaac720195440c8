"""Servers of two ranks compute as servers of one."""

from __future__ import annotations

from typing import Any

import harness
import numpy as np
import pytest
from harness import run_on
from layouts import ranked, ranked_rollout
from numerics import Numerics, configurations
from tandem.rpc.wire import from_tensor

PPO = {"objective": {"advantage_estimator": "gae"}}


# Ranks add the same to every way to compute.
@pytest.fixture(scope="module", params=configurations()[:1], ids=lambda n: n.name)
def numerics(request: pytest.FixtureRequest) -> Numerics:
    """The first device, type and kernels that are tested."""
    return request.param


def assert_alike(
    numerics: Numerics, lines: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    """Asserts that two layouts' metrics are alike, in bfloat16 those of the first step.

    An update in bfloat16 moves the log-probs of the next step, and with them its tokens.
    """
    if not numerics.bfloat16:
        return harness.assert_metrics_close(lines, expected)
    for key in ("loss/total", "loss/entropy", "policy/grad_norm"):
        assert lines[0][key] == pytest.approx(expected[0][key], rel=0.05, abs=0.01), key


@pytest.mark.parametrize(
    ("changes", "trainer", "critic"),
    [({}, "tensor", None), (PPO, "pipeline", "zero"), (PPO, "zero", "tensor")],
    ids=["grpo-tensor", "ppo-pipeline-zero", "ppo-zero-tensor"],
)
def test_a_run_on_two_ranks_equals_one_on_single_rank_servers(
    numerics, models, tmp_path, changes, trainer, critic
):
    one = {"trainer": {}, "critic": {} if critic else None}
    two = {"trainer": ranked(trainer), "critic": ranked(critic) if critic else None}
    lines = {}
    for name, servers in {"one": one, "two": two}.items():
        sections = {
            server: None if section is None else numerics.settings(**section)
            for server, section in servers.items()
        }
        with harness.cluster(
            tmp_path / name, models, rollout=numerics.settings(), **sections
        ) as running:
            lines[name] = run_on(running, models, tmp_path / f"run-{name}", **changes)
    assert_alike(numerics, lines["two"], lines["one"])


@pytest.mark.parametrize("junior", [1, 2])
def test_a_rollout_server_of_two_ranks_scores_and_runs_as_one_of_a_single_rank(
    numerics, models, tmp_path, junior
):
    lines, logprobs = {}, {}
    for name, section in {"one": {}, "two": ranked_rollout(junior=junior)}.items():
        with (
            harness.cluster(
                tmp_path / name,
                models,
                rollout=numerics.settings(**section),
                trainer=numerics.settings(),
            ) as running,
            harness.rollout_client(running) as client,
        ):
            [scored] = client.score([(list(range(5, 35)), 1)], senior=True, junior=True).sequences
            logprobs[name] = [
                from_tensor(tensor) for tensor in (scored.senior_logprobs, scored.junior_logprobs)
            ]
            lines[name] = run_on(running, models, tmp_path / f"run-{name}")
    # The ranks' sums have another order.
    atol = max(numerics.atol, 5e-5)
    np.testing.assert_allclose(logprobs["two"], logprobs["one"], rtol=0, atol=atol)
    if not numerics.bfloat16:  # its tokens would differ
        harness.assert_metrics_close(lines["two"], lines["one"])
