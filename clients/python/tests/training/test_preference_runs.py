"""Runs of `tandem dpo` against fake servers, through the command line."""

import json

import fakes
import numpy as np
import pytest
import yaml
from commands import lines, tandem

from tandem.metrics import CLOCK_KEYS, KEYS, PAIR_KEYS
from tandem.rpc.client import TrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.rpc.wire import from_tensor
from tandem.settings.run import DpoSettings
from tandem.training.preferences import step_of_pairs


@pytest.fixture
def sent(world, monkeypatch):
    """The samples that the trainer gets."""
    samples = []
    monkeypatch.setattr(world, "on_samples", samples.extend)
    # The chosen words become likelier than under the reference, and the others less likely.
    world.logprob["senior"] = lambda token: -0.5 if token < 30 else -2.0
    return samples


@pytest.fixture
def dpo_file(run_file, tmp_path):
    """The file of a run on pairs, of 1 and 2 words."""
    rows = [
        {"prompt": f"w{i}", "chosen": f"w{i + 1}", "rejected": f"w{i + 30} w{i + 31}",
         "ref_chosen_logps": -3.0, "ref_rejected_logps": -1.0}
        for i in range(2, 22)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = yaml.safe_load(run_file.read_text()) | {"dpo": {"batch_size": 3, "beta": 0.5}}
    del config["eval"]
    path = tmp_path / "dpo.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_step_sends_both_responses_with_the_derivatives_of_the_loss(
    world, sent, dpo_file, tmp_path
):
    tandem("dpo", dpo_file, "steps=1")
    [header] = world.headers
    assert header.num_samples == 6
    assert header.supervised.aggregation == 2  # TOKEN_SUM
    # Ratios: 0.5 - 1.5 for the chosen word with the end, -2 * 0.5 - 1.5 ... for the rejected ones.
    chosen = (-0.5 - 0.5) - 2 * -1.5
    rejected = (-2.0 - 2.0 - 0.5) - 3 * -1.5
    margin = 0.5 * (chosen - rejected)
    slope = 0.5 / (1 + np.exp(margin)) / 3
    for pair in range(3):
        first, second = sent[2 * pair : 2 * pair + 2]
        assert first.prompt_token_ids == second.prompt_token_ids
        assert list(first.response_token_ids) == [first.prompt_token_ids[0] + 1, fakes.EOS]
        assert second.response_token_ids[0] == first.response_token_ids[0] + 29
        np.testing.assert_allclose(from_tensor(first.weights), [slope] * 2, rtol=1e-6)
        np.testing.assert_allclose(from_tensor(second.weights), [-slope] * 3, rtol=1e-6)
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert tuple(line) == KEYS + PAIR_KEYS
    assert line["loss/total"] == pytest.approx(np.log1p(np.exp(-margin)))
    assert line["rewards/chosen"] == pytest.approx(0.5 * chosen)
    assert line["rewards/margins"] == pytest.approx(margin)
    assert line["rewards/accuracies"] == 1
    assert line["loss/chosen_nll"] is None
    kind = json.loads((tmp_path / "run" / "run.json").read_text())["kind"]
    assert kind == "dpo"


@pytest.mark.parametrize(
    ("source", "chosen", "rejected"), [("rows", -1.0 + 3, -4.5 + 1), ("none", -1.0, -4.5)]
)
def test_the_reference_may_come_with_the_rows_or_be_none(
    world, sent, dpo_file, tmp_path, source, chosen, rejected
):
    world.logprob["reference"] = None  # is not asked for
    tandem("dpo", dpo_file, "steps=1", f"dpo.reference_logprobs={source}")
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["rewards/chosen"] == pytest.approx(0.5 * chosen)
    assert line["rewards/rejected"] == pytest.approx(0.5 * rejected)


def test_the_reference_may_be_a_server_whose_weights_the_run_records(
    world, sent, dpo_file, tmp_path
):
    other = fakes.FakeWorld()
    other.logprob["senior"] = lambda token: -1.5
    world.logprob["reference"] = None
    with fakes.serve(other, str(tmp_path / "model")) as address:
        tandem("dpo", dpo_file, "steps=2", f"reference={address}")
        recorded = json.loads((tmp_path / "run" / "run.json").read_text())["servers"]
        assert recorded["reference_weights"]["digest"] == "d"
    line = lines(tmp_path / "run" / "metrics.jsonl")[0]
    assert line["rewards/chosen"] == pytest.approx(0.5 * (-1.0 + 3.0))


def test_a_resumed_run_equals_an_uninterrupted_one(world, sent, dpo_file, tmp_path):
    tandem("dpo", dpo_file, f"run_dir={tmp_path / 'whole'}")
    whole = list(sent)
    world.version = world.published = 0
    sent.clear()
    parted = f"run_dir={tmp_path / 'parted'}"
    tandem("dpo", dpo_file, parted, "steps=2")
    done = tandem("dpo", dpo_file, parted, "dpo.beta=0.4", "--resume", check=2)
    assert "dpo.beta" in done.stderr
    tandem("dpo", dpo_file, parted, "--resume")
    assert sent == whole
    a, b = (
        [{k: v for k, v in line.items() if k not in CLOCK_KEYS} for line in lines(path)]
        for path in (tmp_path / "whole" / "metrics.jsonl", tmp_path / "parted" / "metrics.jsonl")
    )
    assert a == b


def test_epochs_count_pairs(world, sent, dpo_file):
    tandem("dpo", dpo_file, "steps=null", "epochs=1", "dpo.batch_size=8")
    assert [header.num_samples for header in world.headers] == [16, 16, 16]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["reference=junior"], "reference: junior does not apply to `tandem dpo`"),
        (["reference=h:1", "dpo.reference_logprobs=rows"], "reference: only applies to dpo.refer"),
        (["async.max_staleness=1"], "async.max_staleness: only applies to `tandem train`"),
        (["dpo.batch_size=1000"], "dpo.batch_size: a step has 2,000 samples"),
        (["dpo.loss_type=kto"], "dpo.loss_type"),
    ],
)
def test_settings_that_it_does_not_have_are_refused_before_anything_is_written(
    world, dpo_file, tmp_path, overrides, told
):
    world.max_samples = 100
    assert told in tandem("dpo", dpo_file, *overrides, check=2).stderr
    assert not (tmp_path / "run").exists()


def test_a_trainer_that_trains_a_speculator_alone_is_refused(world, dpo_file, tmp_path):
    world.has_speculator = True
    told = tandem("dpo", dpo_file, "--dry-run", check=2).stderr
    assert "trains only a speculator, which does not learn pairs" in told
    cluster = f"cluster={{model: {tmp_path / 'model'}, trainer: {{freeze_base_model: true}}}}"
    told = tandem("dpo", dpo_file, cluster, check=2).stderr
    assert "cluster.trainer.freeze_base_model: a speculator does not learn pairs" in told


def test_half_a_pair_is_no_step(address):
    with TrainerClient(address) as trainer, pytest.raises(ValueError, match="1 responses"):
        step_of_pairs(
            trainer,
            [SupervisedSample([1], [2])],
            np.zeros(1),
            DpoSettings(),
            run_id="run",
            step=1,
            expected_version=0,
        )
