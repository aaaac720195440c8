"""`tandem speculator` against real servers of tiny models."""

from __future__ import annotations

import json

import harness
import pytest
import yaml
from commands import tandem
from tandem.rpc.requests import Prompt
from tandem.settings import loading

SPECULATOR = {"adapter": "mlp", "n_predict": 2, "optimizer": {"learning_rate": 0.02}}


@pytest.fixture(scope="module")
def run_file(models, tmp_path_factory):
    """A run that starts its own cluster, whose trainer trains a speculator."""
    directory = tmp_path_factory.mktemp("speculator")
    sections = harness.sections(models, trainer={"speculator": SPECULATOR})
    config = harness.run_settings(
        directory,
        models,
        None,
        cluster={"directory": str(directory / "cluster"), **sections},
        steps=6,
        sft={"batch_size": 4},
        # The senior hardly moves, and repeats itself: there is something to learn in six steps.
        sampling={"max_tokens": 32, "temperature": 0.0},
    )
    path = directory / "run.yaml"
    path.write_text(loading.dump(config))
    return path


@pytest.fixture(scope="module")
def trained(run_file):
    """The directory of a run that trained a speculator."""
    tandem("speculator", "train", run_file, "cluster.trainer.optimizer.learning_rate=1e-6")
    return run_file.parent / "run"


def test_a_speculator_learns_what_the_senior_writes(trained):
    losses = [line["speculator/loss"] for line in harness.json_lines(trained / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    recorded = yaml.safe_load((trained / "config.yaml").read_text())
    assert recorded["sft"]["responses"] == "senior"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_exported_speculator_drafts_in_a_rollout_server(trained, models, tmp_path, dtype):
    heads = tmp_path / "heads"
    tandem("speculator", "export", trained, heads, "--dtype", dtype)
    with (
        harness.cluster(
            tmp_path / "cluster", models, rollout={"senior_speculator": str(heads)}
        ) as running,
        harness.rollout_client(running) as client,
    ):
        assert client.info().speculator_heads == 2
        sampling = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        plain = Prompt([5, 6, 7], sampling=sampling, tandem={"enabled": False})
        drafted = Prompt(
            [5, 6, 7], sampling=sampling, tandem={"enabled": False}, speculative={"method": "heads"}
        )
        events = []
        [[one]] = client.generate([drafted], on_event=events.append)
        [[other]] = client.generate([plain])
        assert one.response_token_ids == other.response_token_ids
        assert sum(event.finished.draft_tokens for event in events) > 0


@pytest.mark.slow
def test_an_exported_speculator_is_where_another_trainer_goes_on(trained, run_file, tmp_path):
    heads = tmp_path / "heads"
    tandem("speculator", "export", trained, heads)
    section = json.dumps({**SPECULATOR, "n_predict": 0, "path": str(heads)})
    first = trained.parent / "first"
    tandem("speculator", "train", run_file, f"run_dir={first}", "steps=1", "seed=7")
    further = trained.parent / "further"
    tandem(
        "speculator", "train", run_file, f"run_dir={further}", "steps=1", "seed=7",
        f"cluster.trainer.speculator={section}",
    )  # fmt: skip
    losses = [
        harness.json_lines(run / "metrics.jsonl")[0]["speculator/loss"] for run in (first, further)
    ]
    assert losses[1] < losses[0]


@pytest.mark.slow
def test_eval_measures_the_drafts_of_a_trained_speculator(trained, run_file, tmp_path):
    untrained = tmp_path / "untrained"
    # A speculator that learnt nothing: one step with a rate of nearly nothing.
    section = json.dumps(SPECULATOR | {"optimizer": {"learning_rate": 1e-12}})
    tandem(
        "speculator", "train", run_file, f"run_dir={untrained}", "steps=1",
        f"cluster.trainer.speculator={section}",
    )  # fmt: skip
    accepted = {}
    for run in (untrained, trained):
        heads = tmp_path / f"{run.name}-heads"
        tandem("speculator", "export", run, heads)
        shown = tandem(
            "speculator", "eval", run_file, f"cluster.rollout.0.senior_speculator={heads}",
            "sampling.temperature=1", "--json",
        ).stdout  # fmt: skip
        results = json.loads(shown)["results"]
        assert [one["responses_that_differ"] for one in results] == [0, 0]
        assert [one["temperature"] for one in results] == [0, 1]
        assert all(one["draft_tokens"] > 0 and one["tokens_per_second"] > 0 for one in results)
        accepted[run] = results[0]["acceptance_rate"]
    assert accepted[trained] > accepted[untrained]
