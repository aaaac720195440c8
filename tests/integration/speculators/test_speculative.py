"""Speculative decoding: drafts change the speed of a response, and not one bit of it.

By rejection sampling they change its bits, but not its distribution.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
import subprocess
from collections import Counter
from typing import Any

import harness
import numpy as np
import pytest
import torch
from drafts import ACCEPTED, CUT, DRAFTS, GREEDY, HEADS, batch, total, write_speculator
from harness import assert_same_bits, flat, prompts
from lanes import LANES, LONG, RANKED, section, short_cache
from safetensors.torch import load_file, save_file
from tandem.cluster.local import find_binary
from tandem.errors import RpcError
from tandem.rpc import requests
from tandem.rpc.client import RolloutClient
from tandem.rpc.requests import Prompt

METHODS: list[dict[str, Any]] = [
    {"method": "ngram", "prompt_lookup_min": 1},
    {"method": "ngram", "num_speculative_tokens": 15, "acceptance_rule": "exact"},
    {"method": "junior"},
]


def by_position(running: Any, name: str, method: str) -> list[float]:
    """The values of a counter of drafts, from the first position on."""
    pattern = rf'^{name}\{{method="{method}",position="(\d+)"\}} (\S+)$'
    found = re.findall(pattern, harness.metrics_text(running.rollouts[0]), re.MULTILINE)
    values = {int(position): float(value) for position, value in found}
    assert sorted(values) == list(range(1, len(values) + 1))
    return [values[position] for position in sorted(values)]


@pytest.mark.parametrize("lanes", LANES | RANKED)
def test_responses_are_those_without_drafts(models, tmp_path, lanes):
    with (
        harness.cluster(tmp_path, models, rollout=section(lanes)) as running,
        harness.rollout_client(running) as client,
    ):
        plain = flat(client.generate(batch()))
        for speculative in METHODS:
            # One after the other, since drafts are cut where many sequences run.
            drafted = [
                client.generate([dataclasses.replace(prompt, speculative=speculative)])[0][0]
                for prompt in batch()
            ]
            assert_same_bits(drafted, plain)
        assert 0 < total(running, ACCEPTED, "ngram") < total(running, DRAFTS, "ngram")
        drafted = by_position(running, DRAFTS, "ngram")
        accepted = by_position(running, ACCEPTED, "ngram")
        assert 5 < len(drafted) == len(accepted) <= 15
        # A draft is accepted after those before it alone.
        for values in (drafted, accepted):
            assert values == sorted(values, reverse=True)
        assert all(one <= other for one, other in zip(accepted, drafted, strict=True))
        assert total(running, DRAFTS, "junior") > 0


@pytest.mark.parametrize("lanes", ["float32", "bfloat16-int8"])
def test_responses_are_those_without_drafts_where_many_run_and_are_preempted(
    models, tmp_path, lanes
):
    config = section(lanes, kv_cache_bytes=short_cache(models, lanes))
    config |= {"max_batched_tokens": 16}
    with (
        harness.cluster(tmp_path, models, rollout=config) as running,
        harness.rollout_client(running) as client,
    ):
        plain = flat(client.generate(batch()))
        mixed = [
            dataclasses.replace(prompt, speculative=METHODS[index % 3])
            for index, prompt in enumerate(batch())
        ]
        before = harness.gauge(running.rollouts[0], "tandem_preemptions_total")
        assert_same_bits(flat(client.generate(mixed)), plain)
        assert harness.gauge(running.rollouts[0], "tandem_preemptions_total") > before


def finished(client: RolloutClient, prompt: Prompt) -> Any:
    """The event of a prompt's only sample."""
    for event in client.stream(requests.submit([prompt.named(0)])):
        if event.WhichOneof("event") == "finished":
            return event.finished
    raise AssertionError("no sample came")


@pytest.mark.parametrize("lanes", LANES | RANKED)
def test_a_junior_that_is_the_senior_is_right(models, tmp_path, lanes):
    """In other numerics than the senior's it is right now and then."""
    same = dataclasses.replace(models, junior=models.senior)
    with (
        harness.cluster(tmp_path, same, rollout=section(lanes)) as running,
        harness.rollout_client(running) as client,
    ):
        for sampling in (GREEDY, LONG, CUT):
            [prompt] = prompts(1, {"enabled": False}, sampling=sampling)
            drafted = dataclasses.replace(prompt, speculative={"method": "junior"})
            event = finished(client, drafted)
            expected = client.generate([prompt])[0]
            assert_same_bits([event.trajectory], expected)
            assert event.draft_tokens > 0
            assert sum(event.trajectory.accepted_draft_mask) == event.accepted_draft_tokens
            if "bfloat16" not in lanes and "int" not in lanes:
                assert event.accepted_draft_tokens == event.draft_tokens == 90 * 5 / 6
        assert total(running, ACCEPTED, "junior") > total(running, DRAFTS, "junior") / 10


@pytest.mark.parametrize("lanes", LANES | RANKED)
def test_heads_change_no_response(models, tmp_path, lanes):
    """Heads that are wrong, and heads that know which token followed which one."""
    with (
        harness.cluster(tmp_path / "plain", models, rollout=section(lanes)) as running,
        harness.rollout_client(running) as client,
    ):
        plain = flat(client.generate(batch()))
    follows = {}
    for response in map(harness.tokens, plain):
        follows |= dict(itertools.pairwise(response))
    for name, table in {"random": None, "table": follows}.items():
        speculator = write_speculator(tmp_path / f"{name}-heads", models.senior, table)
        config = section(lanes, senior_speculator=str(speculator))
        with (
            harness.cluster(tmp_path / name, models, rollout=config) as running,
            harness.rollout_client(running) as client,
        ):
            assert client.info().speculator_heads == 3
            drafted = [
                client.generate([dataclasses.replace(prompt, speculative=HEADS)])[0][0]
                for prompt in batch()
            ]
            assert_same_bits(drafted, plain)
            together = [dataclasses.replace(prompt, speculative=HEADS) for prompt in batch()]
            together = flat(client.generate(together))
            assert_same_bits(together, plain)
            assert total(running, DRAFTS, "heads") > total(running, ACCEPTED, "heads")
            if table is not None:
                assert total(running, ACCEPTED, "heads") > 50


def rejecting(method: str) -> dict[str, Any]:
    return {"method": method, "acceptance_rule": "rejection_sampling"}


@pytest.fixture(scope="module")
def with_like_junior(models, tmp_path_factory):
    """The models, with a junior that is the senior with some noise."""
    directory = tmp_path_factory.mktemp("like") / "junior"
    shutil.copytree(models.senior, directory)
    weights = load_file(directory / "model.safetensors")
    torch.manual_seed(3)
    weights = {
        name: value + 0.03 * value.std() * torch.randn_like(value) if value.dim() > 1 else value
        for name, value in weights.items()
    }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return dataclasses.replace(models, junior=directory)


def chi_square_sigmas(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square in standard deviations above its mean, by Wilson and Hilferty."""
    expected = counts.sum() * probabilities
    assert expected.min() > 5
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    return (np.cbrt(statistic / freedom) - (1 - spread)) / np.sqrt(spread)


def test_rejection_sampling_keeps_the_distribution_of_two_tokens(with_like_junior, tmp_path):
    """The joint distribution of the first two tokens, which transformers enumerate."""
    from transformers import AutoModelForCausalLM

    top_k, temperature, samples = 4, 1.5, 3000
    senior = AutoModelForCausalLM.from_pretrained(with_like_junior.senior, dtype=torch.float32)

    def top(ids: list[int]) -> tuple[list[int], list[float]]:
        with torch.no_grad():
            logits = senior(torch.tensor([ids])).logits[0, -1].double() / temperature
        values, tokens = logits.topk(top_k)
        return tokens.tolist(), values.softmax(-1).tolist()

    prompt = [7, 8] * 3  # the first pass has room for drafts
    expected = {
        (first, second): p * q
        for first, p in zip(*top(prompt), strict=True)
        for second, q in zip(*top([*prompt, first]), strict=True)
    }
    sampling = {"max_tokens": 3, "temperature": temperature, "top_k": top_k, "ignore_eos": True}
    # Drafts are cut where many sequences run.
    config = section("float32", max_num_seqs=1)
    with (
        harness.cluster(tmp_path, with_like_junior, rollout=config) as running,
        harness.rollout_client(running) as client,
    ):
        for seed, method in enumerate(["junior", "ngram"]):
            drawn = client.generate(
                [
                    Prompt(
                        prompt,
                        seed=seed,
                        num_samples=samples,
                        sampling=sampling,
                        tandem={"enabled": False},
                        speculative=rejecting(method) | {"prompt_lookup_min": 1},
                    )
                ]
            )
            counts = Counter(tuple(harness.tokens(one)[:2]) for one in flat(drawn))
            assert counts.keys() <= expected.keys()
            observed = np.array([counts[pair] for pair in expected])
            assert chi_square_sigmas(observed, np.array([*expected.values()])) < 4
            assert total(running, DRAFTS, method) > 1.5 * samples
        accepted = total(running, ACCEPTED, "junior") / total(running, DRAFTS, "junior")
        assert 0.3 < accepted < 0.97


def test_rejection_sampling_keeps_the_bits_of_greedy_responses_and_a_repetition(
    with_like_junior, tmp_path
):
    with (
        harness.cluster(tmp_path, with_like_junior, rollout=section("float32")) as running,
        harness.rollout_client(running) as client,
    ):
        for method in ("junior", "ngram"):
            for prompt in batch():
                drafted = dataclasses.replace(prompt, speculative=rejecting(method))
                [[one]] = client.generate([drafted])
                greedy = prompt.sampling["temperature"] == 0
                same = prompt if greedy else drafted
                assert_same_bits([one], client.generate([same])[0])
                assert len(harness.mask(one)) == len(harness.tokens(one)) == 90


def test_more_drafts_of_a_junior_are_accepted_by_rejection_sampling(with_like_junior, tmp_path):
    shares = []
    for rule in ("exact", "rejection_sampling"):
        with (
            harness.cluster(
                tmp_path / rule, with_like_junior, rollout=section("float32", max_num_seqs=1)
            ) as running,
            harness.rollout_client(running) as client,
        ):
            speculative = {"method": "junior", "acceptance_rule": rule}
            [prompt] = prompts(1, {"enabled": False}, sampling=LONG)
            client.generate([dataclasses.replace(prompt, speculative=speculative, num_samples=12)])
            shares.append(total(running, ACCEPTED, "junior") / total(running, DRAFTS, "junior"))
    assert shares[1] > shares[0]


def test_a_speculator_of_another_model_is_refused(models, tmp_path):
    for name, changes, says in [
        ("width", {"emb_dim": 47}, "senior_speculator.config.json: "),
        ("ids", {"vocab_size": 299}, "senior_speculator.num_token_ids: "),
        ("kind", {"architectures": ["Eagle"]}, "senior_speculator.config.json.architectures: "),
        ("tensors", {"inner_dim": 31}, "senior_speculator: "),
    ]:
        speculator = write_speculator(tmp_path / name, models.senior, **changes)
        command = [
            find_binary("tandem-rollout-server"),
            f"senior_model={models.senior}",
            f"senior_speculator={speculator}",
            "server.grpc_port=0",
            "server.metrics_port=0",
        ]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert refused.returncode in (1, 2)
        assert says in refused.stderr, refused.stderr


def test_the_plan_of_the_memory_has_the_speculator(models, tmp_path):
    speculator = write_speculator(tmp_path / "heads", models.senior)
    command = [
        find_binary("tandem-rollout-server"),
        "--check-config",
        f"senior_model={models.senior}",
        f"senior_speculator={speculator}",
    ]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "speculator_weights" in checked.stdout


def test_what_is_not_there_is_refused_by_name(models, tmp_path):
    with (
        harness.cluster(tmp_path, models, rollout=section("float32")) as running,
        harness.rollout_client(running) as client,
    ):
        with pytest.raises(RpcError) as refused:
            client.generate([Prompt([5], speculative=HEADS)])
        assert refused.value.field == "speculative.method"
        assert refused.value.reason == "NO_SPECULATOR"
        with pytest.raises(RpcError) as refused:
            client.generate([Prompt([5], speculative={"method": "ngram", "prompt_lookup_max": 17})])
        assert refused.value.field == "speculative.prompt_lookup_max"
