"""Laws of low-rank adapters, on the real trainer and rollout server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from harness import TANDEM, assert_same_bits, logprobs, prompts
from layouts import ranked, ranked_rollout
from safetensors.numpy import load_file
from tandem.errors import InvalidArgumentError
from tandem.rpc.client import CriticClient, RolloutClient, TrainerClient
from tandem.rpc.requests import PolicySample, SupervisedSample, ValueSample
from tandem.rpc.wire import enum_name, from_tensor
from tandem.run_directory.export import export_checkpoint

LORA = {"rank": 4, "alpha": 8}
ADAPTED = {"senior": {"lora": LORA}}
ATEN = {"compute": {"kernels": "aten", "num_threads": 1}}
# The sections of the rollout server and of the trainer.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one-rank": ({}, {}),
    "rounded": (
        {"senior_dtype": "bfloat16"},
        {"compute": {"weight_dtype": "bfloat16", "num_threads": 1}},
    ),
    "bfloat16": ({"senior_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    "int8": ({"senior_quantization": "int8"}, {"quantization": "int8"}),
    "int8-pipeline": (
        {"senior_quantization": "int8"},
        ranked("pipeline") | {"quantization": "int8"},
    ),
    "rounded-inputs": (
        {"senior_dtype": "bfloat16", "senior_activation_dtype": "bfloat16"},
        {
            "compute": {
                "weight_dtype": "bfloat16",
                "activation_dtype": "bfloat16",
                "num_threads": 1,
            }
        },
    ),
    "aten": (ATEN, ATEN),
    "zero": ({}, ranked("zero")),
    "pipeline": ({}, ranked("pipeline")),
    "tensor": (ranked_rollout(), ranked("tensor")),
}


def samples_of(client: RolloutClient) -> list[PolicySample]:
    groups = client.generate(prompts(3, TANDEM["word"], num_samples=4, return_other_logprobs=True))
    return [
        PolicySample(t, f"g{g}", reward=float(i % 3) - 0.2 * g)
        for g, group in enumerate(groups)
        for i, t in enumerate(group)
    ]


def step(trainer: TrainerClient, samples: list[PolicySample], version: int, **objective: Any):
    return trainer.train_step(
        samples, run_id="r", step=version + 1, expected_version=version, objective=objective
    ).report


def adapter_bytes(checkpoint: Path) -> int:
    return sum(
        value.nbytes for value in load_file(checkpoint / "adapter_model.safetensors").values()
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_publication_brings_adapters_with_the_bits_of_the_trainer(models, tmp_path, layout):
    lanes, section = LAYOUTS[layout]
    with (
        harness.cluster(
            tmp_path, models, rollout=lanes | ADAPTED, trainer=section | {"lora": LORA}
        ) as running,
        harness.rollout_client(running) as rollout,
        harness.trainer_client(running) as trainer,
    ):
        # Drawn from one seed: equal before the first publication.
        assert rollout.info().server.weights == trainer.info().server.weights
        for version in range(3):
            samples = samples_of(rollout)
            replies = trainer.compute_log_probs(
                [
                    SupervisedSample(s.trajectory.prompt_token_ids, harness.tokens(s.trajectory))
                    for s in samples
                ]
            )
            for sample, reply in zip(samples, replies, strict=True):
                computed, drawn = from_tensor(reply.logprobs), logprobs(sample.trajectory, "senior")
                if layout in ("tensor", "aten"):  # whose products depend on the batch
                    np.testing.assert_allclose(computed, drawn, atol=1e-5)
                else:
                    np.testing.assert_array_equal(computed, drawn)
            step(trainer, samples, version)
            reply = trainer.publish_weights([rollout.address])
            [result] = reply.results
            assert result.digest == trainer.info().server.weights.digest
            assert rollout.info().server.weights == reply.weights
        saved = trainer.save_checkpoint(str(tmp_path / "saved"), "c")
        assert result.bytes == adapter_bytes(Path(saved))
        whole = sum(value.nbytes for value in harness.weights(models.senior).values())
        assert result.bytes < whole


# The formats of the base model: the trainer's, and that of the senior's lane.
STORED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": ({}, {}),
    "bfloat16": ({"dtype": "bfloat16"}, {"senior_dtype": "bfloat16"}),
    "int8": ({"quantization": "int8"}, {"senior_quantization": "int8"}),
}


@pytest.mark.parametrize("stored", STORED)
def test_the_reference_policy_is_the_model_without_its_adapters(models, tmp_path, stored):
    """The same metrics, to the bit, as with a reference model of its own."""
    base, lane = STORED[stored]
    reports: dict[str, list[dict[str, float]]] = {}
    for name, reference in {"own": {"reference_model": str(models.senior)}, "off": {}}.items():
        with (
            harness.cluster(
                tmp_path / name,
                models,
                rollout=ADAPTED | lane,
                trainer={"lora": LORA} | base | reference,
            ) as running,
            harness.rollout_client(running) as rollout,
            harness.trainer_client(running) as trainer,
        ):
            reports[name] = []
            for version in range(3):
                report = step(trainer, samples_of(rollout), version, kl_coefficient=0.1)
                reports[name].append(dict(report.metrics))
                trainer.publish_weights([rollout.address])
    assert reports["own"] == reports["off"]
    assert reports["off"][0]["loss/kl"] == 0
    assert reports["off"][0]["mismatch/max_abs_logprob_diff"] < 1e-6  # rounded to float32
    assert reports["off"][2]["loss/kl"] > 1e-8


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_a_junior_that_is_the_base_model_shares_its_weights(models, tmp_path, stored):
    """Responses have the bits that they have beside a copy of the base model."""
    base, senior = STORED[stored]
    both = senior | {key.replace("senior", "junior"): value for key, value in senior.items()}
    copy = shutil.copytree(models.senior, tmp_path / "copy")
    answers = {}
    for name, junior in {"shared": models.senior, "copy": copy}.items():
        lanes = ADAPTED | both | {"junior_model": str(junior)}
        with (
            harness.cluster(
                tmp_path / name, models, rollout=lanes, trainer={"lora": LORA} | base
            ) as running,
            harness.rollout_client(running) as rollout,
            harness.trainer_client(running) as trainer,
        ):
            info = rollout.info()
            for version in range(2):
                step(trainer, samples_of(rollout), version)
                trainer.publish_weights([rollout.address])
            answers[name] = [sample.trajectory for sample in samples_of(rollout)]
            described = info.junior.num_parameters, info.junior_version
        answers[name + " junior"] = described
    assert_same_bits(answers["shared"], answers["copy"])
    assert answers["shared junior"] == answers["copy junior"]


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_a_checkpoint_is_an_adapter_from_which_training_goes_on(models, tmp_path, stored):
    trainer_section = {"lora": LORA} | STORED[stored][0]
    layout = "zero" if stored == "float32" else "pipeline"  # stage 3 does not gather packed weights
    batch = [SupervisedSample([5, 6, 7], [8, 9, 10])] * 2
    with (
        harness.cluster(tmp_path / "first", models, trainer=trainer_section) as running,
        harness.trainer_client(running) as trainer,
    ):
        trainer.train_step(batch, run_id="r", step=1, expected_version=0)
        saved = trainer.save_checkpoint(str(tmp_path / "saved"), "c")
        digest = trainer.info().server.weights.digest
        trainer.export_model(str(tmp_path / "merged"))
        export_checkpoint(Path(saved), tmp_path / "merged from files", "fp32")
        expected = trainer.train_step(batch, run_id="r", step=2, expected_version=1).report
    directory = Path(saved)
    assert not list(directory.glob("model*.safetensors"))
    by_server, by_files = (
        load_file(tmp_path / name / "model.safetensors") for name in ("merged", "merged from files")
    )
    assert by_server.keys() == by_files.keys()
    for name, value in by_server.items():
        np.testing.assert_allclose(by_files[name], value, rtol=1e-6, atol=1e-7)
    config = json.loads((directory / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)

    with (
        harness.cluster(
            tmp_path / "second", models, trainer=ranked(layout) | trainer_section
        ) as running,
        harness.trainer_client(running) as trainer,
    ):
        held = trainer.load_checkpoint(str(directory))
        assert held.digest == digest
        report = trainer.train_step(batch, run_id="r", step=2, expected_version=1).report
        assert report.metrics["loss/total"] == pytest.approx(expected.metrics["loss/total"])
    # Another scale would be another model.
    with (
        harness.cluster(
            tmp_path / "third", models, trainer={"lora": LORA | {"alpha": 9}}
        ) as running,
        harness.trainer_client(running) as trainer,
        pytest.raises(InvalidArgumentError, match="alpha"),
    ):
        trainer.load_checkpoint(str(directory))
    # The adapter, and the merged model, serve as they were trained.
    ids = list(range(5, 35))
    scores = {}
    for name, section in {
        "adapter": {"senior": {"lora": {"path": str(directory)}}},
        "merged": {"senior_model": str(tmp_path / "merged"), "junior_model": ""},
    }.items():
        with (
            harness.cluster(tmp_path / name, models, rollout=section) as running,
            harness.rollout_client(running) as rollout,
        ):
            assert (rollout.info().server.weights.digest == digest) == (name == "adapter")
            [scored] = rollout.score([(ids, 1)]).sequences
            scores[name] = from_tensor(scored.senior_logprobs)
    np.testing.assert_allclose(scores["merged"], scores["adapter"], atol=2e-5)


@pytest.mark.parametrize("lora", [LORA | {"alpha": 9}, LORA | {"rank": 2}, {}])
def test_servers_with_other_adapters_are_refused_by_name(models, tmp_path, lora):
    rollout_section = {"senior": {"lora": lora}}
    with (
        harness.cluster(
            tmp_path, models, rollout=rollout_section, trainer={"lora": LORA}
        ) as running,
        harness.rollout_client(running) as rollout,
        harness.trainer_client(running) as trainer,
    ):
        # The scale is a part of the digest.
        assert rollout.info().server.weights.digest != trainer.info().server.weights.digest
        batch = [SupervisedSample([5, 6, 7], [8, 9, 10])] * 2
        trainer.train_step(batch, run_id="r", step=1, expected_version=0)
        [result] = trainer.publish_weights([rollout.address]).results
        assert "manifest.adapter" in result.status.message
        assert rollout.info().server.weights.version == 0


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_critic_trains_adapters_and_its_head_beside_a_packed_base(models, tmp_path, quantization):
    section = {"lora": LORA, "quantization": quantization}
    rows = [SupervisedSample([5, 6, 7], [8, 9, 10]), SupervisedSample([4, 5], [30, 31])]

    def values(critic: CriticClient) -> list[list[float]]:
        return [list(from_tensor(reply.values)) for reply in critic.compute_values(rows)]

    with (
        harness.cluster(tmp_path / "first", models, critic=section) as running,
        harness.critic_client(running) as critic,
    ):
        model = critic.info().server.model
        assert enum_name(model, "quantization") == quantization
        before = values(critic)
        samples = [
            ValueSample(row.prompt_token_ids, row.response_token_ids, weights)
            for row, weights in zip(rows, ([1.0] * 4, [0.5, -0.5, 1.0]), strict=True)
        ]
        for step_number in (1, 2):
            critic.train_step(
                samples, run_id="r", step=step_number, expected_version=step_number - 1
            )
        learnt = values(critic)
        assert learnt != before
        saved = critic.save_checkpoint(str(tmp_path / "saved"), "c")
        digest = critic.info().server.weights.digest
    with (
        harness.cluster(tmp_path / "second", models, critic=section) as running,
        harness.critic_client(running) as critic,
    ):
        assert values(critic) == before
        assert critic.load_checkpoint(str(saved)).digest == digest
        assert values(critic) == learnt
