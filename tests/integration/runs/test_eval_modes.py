"""The modes of evaluation on real servers; expected values are recomputed from their answers."""

from __future__ import annotations

import dataclasses
import itertools
import re

import harness
import numpy as np
import pytest
from harness import flat, mask, tokens
from tandem.errors import ConfigError
from tandem.evaluation import evaluate
from tandem.rpc.author_schedule import authorship_mask
from tandem.rpc.client import RolloutClient
from tandem.rpc.wire import from_tensor
from tandem.session.opening import open_session
from tokenizers import Tokenizer

MODES = [
    "solo",
    "junior_solo",
    "tandem",
    "handoff",
    "legibility",
    "junior_takeover",
    "senior_takeover",
]


def evaluated(directory, models, running, **changes):
    options = {"modes": MODES, "samples": 6, "temperature": 1.0, "max_tokens": 100} | changes
    options.setdefault("patterns", {"e": "e"})
    config = harness.run_settings(directory, models, running, eval=options)
    with open_session(config, purpose="eval") as session:
        return evaluate(session)


def everything(results):
    """The summaries, and mode, tokens and authors of every sample."""
    samples = [
        (mode, tokens(one), mask(one)) for mode in results for one in flat(results[mode].answers)
    ]
    return [one.summary() for one in results.values()], samples


@pytest.fixture(scope="module")
def results(models, pair, tmp_path_factory):
    return evaluated(tmp_path_factory.mktemp("run"), models, pair)


@pytest.mark.parametrize("boundary", ["\n\n", "e"])
def test_the_authors_of_a_handoff_follow_from_its_tokens(results, boundary, models, pair, tmp_path):
    if boundary != "\n\n":
        results = evaluated(tmp_path, models, pair, handoff_boundary=boundary, modes=["handoff"])
    tokenizer = Tokenizer.from_file(str(models.tokenizer / "tokenizer.json"))
    ends = {i for i in tokenizer.get_vocab().values() if tokenizer.decode([i]).endswith(boundary)}
    ends -= {tokenizer.token_to_id("<eos>"), tokenizer.token_to_id("<pad>")}
    tandem = {"enabled": True, "selection_strategy": "sentence", "prob_senior": 0.5}
    samples = flat(results["handoff"].answers)
    for one in samples:
        assert mask(one) == authorship_mask(tokens(one), tandem, one.seed, one.sample_index, ends)
    masks = [mask(one) for one in samples]
    assert {author for authors in masks for author in authors} == {0, 1}
    summary = results["handoff"].summary()
    turns = [len(list(itertools.groupby(authors))) for authors in masks]
    assert np.mean(turns) > 1
    assert summary["rounds/mean"] == pytest.approx(np.mean(turns))
    assert summary["rounds/cut"] == 0
    assert summary["tandem/senior_token_fraction"] == pytest.approx(np.mean(np.concatenate(masks)))


def test_one_model_answers_alone_and_both_as_the_run_lets_them(results):
    masks = {mode: [mask(one) for one in flat(results[mode].answers)] for mode in MODES[:3]}
    authors = {mode: {one for answer in found for one in answer} for mode, found in masks.items()}
    assert authors == {"solo": {1}, "junior_solo": {0}, "tandem": {0, 1}}
    share = results["tandem"].summary()["tandem/senior_token_fraction"]
    assert share == pytest.approx(np.mean(np.concatenate(masks["tandem"])))
    # The takeover of the junior's answers begins with its solo answers.
    begun = [tokens(one) for one in flat(results["junior_solo"].answers)]
    taken = [tokens(one) for one in flat(results["senior_takeover"].answers)]
    assert all(a[: len(a) // 2] == b[: len(a) // 2] for a, b in zip(begun, taken, strict=True))


def test_every_key_of_an_evaluation_is_documented(results):
    document = (harness.REPOSITORY / "docs/reference/metrics.md").read_text()
    section = document.split("## `evals.jsonl`")[1].split("\n## ")[0]
    listed = re.findall(r"`([a-z_/A-Z]+)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.M)))
    listed[listed.index("pattern/NAME")] = "pattern/e"
    assert {"step"}.union(*(one.summary() for one in results.values())) == set(listed)


def test_a_takeover_goes_on_from_the_exact_tokens(models, pair, tmp_path):
    both = ["junior_takeover", "senior_takeover"]
    greedy = {"modes": both, "samples": 1, "temperature": 0.0, "max_tokens": 20}
    found = evaluated(tmp_path, models, pair, takeover={"after_tokens": 3}, **greedy)
    for mode, successor in (("junior_takeover", 0), ("senior_takeover", 1)):
        answers = flat(found[mode].answers)
        assert {tuple(mask(one)[:3]) for one in answers} == {(1 - successor,) * 3}
        for one in answers:
            assert set(mask(one)[3:]) <= {successor}
            assert len(tokens(one)) <= 20
            assert len(from_tensor(one.author_logprobs)) == len(tokens(one))
    one = next(one for one in flat(found["junior_takeover"].answers) if len(tokens(one)) > 5)
    ids = [*one.prompt_token_ids, *tokens(one)]
    first = len(one.prompt_token_ids)
    with RolloutClient(pair.rollouts[0].address) as client:
        [scores] = client.score([(ids, first)], junior=True).sequences
    senior, junior = from_tensor(scores.senior_logprobs), from_tensor(scores.junior_logprobs)
    by_author = np.concatenate([senior[:3], junior[3:]])
    # The bits of an uninterrupted answer: nothing was decoded and encoded again.
    assert by_author.tolist() == from_tensor(one.author_logprobs).tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_legibility_is_the_cross_entropy_that_transformers_computes(
    models, pair, tmp_path, temperature
):
    """Nats are of temperature 1, whatever temperature the answers were sampled at."""
    result = evaluated(tmp_path, models, pair, modes=["legibility"], temperature=temperature)
    samples, summary = flat(result["legibility"].answers), result["legibility"].summary()
    nats = {
        model: np.concatenate(
            [
                -harness.reference_logprobs(directory, one.prompt_token_ids, tokens(one))
                for one in samples
            ],
            dtype=np.float64,
        )
        for model, directory in (("junior", models.junior), ("senior", models.senior))
    }
    nats["gap"] = nats["junior"] - nats["senior"]
    for name, values in nats.items():
        assert summary[f"{name}/nats_per_token"] == pytest.approx(values.mean(), abs=1e-6)
    assert summary["tokens/response"] == len(nats["junior"])
    assert nats["gap"].mean() > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_equal_models_handoff_answers_as_solo_and_legibility_has_no_gap(
    models, tmp_path, temperature
):
    same = dataclasses.replace(models, junior=models.senior)
    with harness.cluster(tmp_path / "cluster", same, trainer={}) as running:
        results = evaluated(tmp_path, models, running, temperature=temperature)
    alone, turns = (flat(results[mode].answers) for mode in ("solo", "handoff"))
    assert [tokens(one) for one in turns] == [tokens(one) for one in alone]
    assert results["handoff"].grades == results["solo"].grades
    if temperature:
        assert 0 in {author for one in turns for author in mask(one)}
    summary = results["legibility"].summary()
    assert summary["junior/nats_per_token"] == summary["senior/nats_per_token"] > 0
    assert summary["gap/nats_per_token"] == 0


def test_evaluations_depend_neither_on_the_number_of_servers_nor_on_their_tandem_defaults(
    models, results, tmp_path
):
    rollout = {
        "tandem": {"selection_strategy": "word", "boundary_token_ids": [5, 6, 7], "prob_senior": 0}
    }
    with harness.cluster(
        tmp_path / "cluster", models, rollouts=2, rollout=rollout, trainer={}
    ) as running:
        # The mode tandem draws as training does, by the servers' defaults.
        modes = [mode for mode in MODES if mode != "tandem"]
        found = evaluated(tmp_path, models, running, modes=modes)
        assert everything(found) == everything({mode: results[mode] for mode in modes})


def test_a_server_without_a_junior_is_refused_before_anything_is_drawn(models, tmp_path):
    with harness.cluster(
        tmp_path / "cluster", models, rollout={"junior_model": ""}, trainer={}
    ) as running:
        with pytest.raises(
            ConfigError,
            match=r"eval\.modes: junior_solo, tandem, handoff, legibility, junior_takeover, "
            "senior_takeover: "
            r".* no junior",
        ):
            evaluated(tmp_path, models, running)
        generated = harness.metrics_text(running.rollouts[0])
        assert 'tandem_generated_tokens_total{author="senior"} 0' in generated
        assert list(evaluated(tmp_path, models, running, modes=["solo"])) == ["solo"]
