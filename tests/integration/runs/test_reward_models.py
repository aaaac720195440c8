"""Reward models: trained on pairs beside an oracle in float64, exported, and used as a reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import torch
import yaml
from commands import records, tandem
from gradients import adapter_gradients, gradients_of, norm_of
from layouts import ranked
from tandem.models.tokenizer import TextCodec
from tandem.rpc.client import CriticClient
from tandem.rpc.requests import SupervisedSample
from tandem.settings import loading
from tandem.settings.run import RunSettings
from tandem.training.reward_models import scores_of, step_of_scores
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
    pipeline,
)
from transformers.models.llama import LlamaForSequenceClassification

LAYOUTS: dict[str, dict[str, Any]] = {
    "one-rank": {},
    **{name: ranked(name) for name in ("zero", "tensor", "pipeline")},
}
SECTION = {
    "batch": {"micro_batch_tokens": 16},
    "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.0},
    "untie_embeddings": False,
}
PAIRS = [
    SupervisedSample([2 + pair, 40, 41 + pair], [(7 * pair + 11 * side + t) % 200 + 5
                                                 for t in range(1 + 3 * side + pair)])
    for pair in range(4)
    for side in range(2)
]  # fmt: skip
MARGINS = np.array([0.0, 0.5, 0.0, 1.5])


@pytest.fixture(scope="module")
def classifier(models, tmp_path_factory):
    """A tiny sequence classifier of one label, with the tokenizer of the models."""
    folder = tmp_path_factory.mktemp("classifier")
    config = LlamaConfig.from_pretrained(models.senior)
    config.num_labels = 1
    torch.manual_seed(5)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((Path(models.tokenizer) / name).read_bytes())
    return folder


def scores_by_transformers(folder: Path, dtype: torch.dtype = torch.float64):
    """The model, and the score of every sequence by its own forward pass."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype)
    rows = [torch.tensor([[*one.prompt_token_ids, *one.response_token_ids]]) for one in PAIRS]
    return model, torch.cat([model(ids).logits[:, 0] for ids in rows])


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_scores_is_that_of_float64(models, classifier, tmp_path, layout, adapters):
    section = LAYOUTS[layout] | SECTION | {"model": str(classifier)}
    if adapters:
        section["lora"] = {"rank": 4, "alpha": 8}
    with (
        harness.cluster(tmp_path, models, critic=section) as running,
        harness.critic_client(running) as critic,
    ):
        model, scores = scores_by_transformers(classifier)
        np.testing.assert_allclose(scores_of(critic, PAIRS), scores.detach(), rtol=2e-5, atol=1e-5)
        saved = critic.save_checkpoint(str(tmp_path / "saved"), "base")
        loss, reply = step_of_scores(
            critic, PAIRS, MARGINS, 0.1, run_id="run", step=1, expected_version=0
        )
        chosen, rejected = scores[::2], scores[1::2]
        expected = -logsigmoid(chosen - rejected - torch.tensor(MARGINS)).mean()
        expected = expected + 0.1 * ((chosen + rejected) ** 2).mean()
        expected.backward()
        assert loss.value == pytest.approx(expected.item(), rel=1e-5)
        assert not reply.skipped
        assert reply.weights.version == 1
        # The head trains beside the adapters.
        gradients = adapter_gradients(model, saved) if adapters else gradients_of(model)
        assert ("score.weight" in gradients, len(gradients)) == (True, 29 if adapters else 21)
        norm = norm_of(gradients.values())
        assert reply.metrics["critic/grad_norm"] == pytest.approx(norm, rel=1e-4)
        after = scores_of(critic, PAIRS)
        assert np.abs(after - scores.detach().numpy()).max() > 1e-4


def write_run(models, directory: Path, section: dict[str, Any]) -> Path:
    """A run whose chosen responses hold more of the letter e, with a cluster of its own."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    rows = [
        {"prompt": f"the {w} and", "chosen": f" {w} three seven", "rejected": f" {w} two a"}
        for w in words
    ]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    critic = harness.sections(models, critic=section)["critic"]
    config = {
        "run_dir": str(directory / "run"),
        "steps": 8,
        "data": {"jsonl": str(directory / "pairs.jsonl")},
        "reward_model": {"batch_size": 8},
        "cluster": {"directory": str(directory / "cluster"), "critic": critic},
        "tokenizer": str(models.tokenizer),
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(config))
    return directory / "run.yaml"


@pytest.fixture(scope="module")
def trained(models, tmp_path_factory):
    """The export of a reward model that a run trained, from a language model."""
    directory = tmp_path_factory.mktemp("trained")
    file = write_run(models, directory, {})
    tandem("reward-model", file)
    tandem("export", directory / "run", directory / "export")
    return directory


def test_a_run_learns_which_responses_are_preferred(trained):
    lines = harness.json_lines(trained / "run" / "metrics.jsonl")
    assert [line["version/senior"] for line in lines] == list(range(1, 9))
    assert lines[-1]["rewards/accuracies"] == 1
    assert lines[-1]["rewards/margins"] > lines[0]["rewards/margins"]
    assert lines[-1]["loss/total"] < 0.7 * lines[0]["loss/total"]
    assert all(line["critic/loss"] == line["loss/total"] for line in lines)
    recorded = json.loads((trained / "run" / "run.json").read_text())
    assert recorded["kind"] == "reward-model"
    assert recorded["servers"]["models"].keys() == {"critic"}
    logs = (trained / "cluster" / "logs" / "attempt_1").glob("*.log")
    assert [path.stem for path in logs] == ["critic"]


def test_a_run_with_adapters_is_served_with_its_base_model(models, tmp_path):
    file = write_run(models, tmp_path, {"lora": {"rank": 4, "alpha": 8}})
    tandem("reward-model", file, "cluster.critic.optimizer.learning_rate=0.01")
    last = harness.json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["rewards/accuracies"] == 1
    [checkpoint] = (tmp_path / "run" / "checkpoints").glob("step_*")
    section = {"lora": {"path": str(checkpoint)}}
    codec = TextCodec(models.tokenizer)
    pairs = [
        SupervisedSample(codec.encode("the two and"), [*codec.encode(text), 0])
        for text in (" two three seven", " two two a")
    ]
    with (
        harness.cluster(tmp_path / "served", models, critic=section) as running,
        harness.critic_client(running) as critic,
    ):
        chosen, rejected = scores_of(critic, pairs)
        assert chosen - rejected > 1
        critic.export_model(str(tmp_path / "merged"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    ids = [torch.tensor([[*one.prompt_token_ids, *one.response_token_ids]]) for one in pairs]
    theirs = [model(one).logits.item() for one in ids]
    np.testing.assert_allclose([chosen, rejected], theirs, rtol=1e-5, atol=1e-5)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(models, trained, tmp_path):
    file = write_run(models, tmp_path, {})
    tandem("reward-model", file, "steps=3")
    tandem("reward-model", file, "--resume")
    whole, parted = (harness.metrics_without_clock(one / "run") for one in (trained, tmp_path))
    assert parted == whole


def test_a_running_critic_may_go_on_learning(models, trained, tmp_path):
    file = write_run(models, tmp_path, {})
    section = {"model": str(trained / "export"), "untie_embeddings": False}
    with harness.cluster(tmp_path / "critic", models, critic=section) as running:
        # Rollout servers get nothing, although they are named.
        overrides = [
            "cluster=null",
            f"servers.critic={running.critic.address}",
            f"servers.rollout=[{running.rollouts[0].address}]",
            "steps=2",
        ]
        tandem("reward-model", file, *overrides)
        told = tandem("reward-model", file, *overrides, "eval.every=1", "--clean", check=2).stderr
        assert "eval: does not apply to `tandem reward-model`" in told
    [first, _] = harness.json_lines(tmp_path / "run" / "metrics.jsonl")
    assert first["rewards/accuracies"] == 1  # as the run before left it


def test_transformers_opens_the_export_with_the_same_scores(models, trained, tmp_path):
    export = trained / "export"
    with (
        harness.cluster(
            tmp_path, models, critic={"model": str(export), "untie_embeddings": False}
        ) as running,
        harness.critic_client(running) as critic,
    ):
        ours = scores_of(critic, PAIRS)
        texts = [f"the {word} and {word} three" for word in ("one", "two", "seven")]
        codec = TextCodec(export)
        ids = [codec.encode(text, special=False) for text in texts]
        of_texts = scores_of(critic, [SupervisedSample(one[:1], one[1:]) for one in ids])
    _, theirs = scores_by_transformers(export, torch.float32)
    np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-5, atol=1e-5)
    judge = pipeline(
        "text-classification",
        model=AutoModelForSequenceClassification.from_pretrained(export),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_file=str(export / "tokenizer.json"), eos_token="<eos>", pad_token="<pad>"
        ),
        function_to_apply="none",
    )
    piped = [one["score"] for one in judge(texts)]
    np.testing.assert_allclose(of_texts, piped, rtol=1e-5, atol=1e-5)


def policy_run(models, directory: Path, address: str, **reward: Any) -> RunSettings:
    """A short GRPO run whose only reward is the reward model's score."""
    trainer = harness.sections(models, trainer={})
    return harness.run_settings(
        directory,
        models,
        None,
        cluster={"directory": str(directory / "cluster"), **trainer},
        reward={"server": address, **reward},
        tandem={"enabled": False},
        eval={"at_start": True},
    )


def test_its_scores_are_the_rewards_of_a_policy(models, trained, tmp_path):
    with harness.cluster(
        tmp_path / "judge",
        models,
        critic={"model": str(trained / "export"), "untie_embeddings": False},
    ) as judge:
        address = judge.critic.address
        config = policy_run(models, tmp_path / "policy", address)
        file = tmp_path / "policy" / "run.yaml"
        file.write_text(loading.dump(config))
        tandem("train", file)
        run = tmp_path / "policy" / "run"
        recorded = json.loads((run / "run.json").read_text())["servers"]
        with CriticClient(address) as critic:
            held = critic.info().server.weights
            assert recorded["reward_models"]["reward_model"]["weights"] == {
                "version": held.version,
                "digest": held.digest,
            }
            for step in (1, 3):
                drawn = records(run, step)
                scores = scores_of(
                    critic,
                    [
                        SupervisedSample(one["prompt_token_ids"], one["response_token_ids"])
                        for one in drawn
                    ],
                )
                assert [one["reward"] for one in drawn] == scores.tolist()
                assert len(set(scores)) > 1
            # Whoever trains it, or puts another model there, ends the run.
            step_of_scores(
                critic, PAIRS, MARGINS, run_id="other", step=1, expected_version=held.version
            )
        told = tandem("train", file, "steps=4", "--resume", check=2).stderr
        assert "servers.reward_models" in told


def test_a_supervised_run_may_be_evaluated_with_its_scores(models, trained, tmp_path):
    section = {"model": str(trained / "export"), "untie_embeddings": False}
    with harness.cluster(tmp_path / "judge", models, critic=section) as judge:
        config = policy_run(models, tmp_path / "policy", judge.critic.address, correct_at=-100.0)
        file = write_config(tmp_path / "run.yaml", config)
        overrides = ["sft.response= three", "steps=1", "reward.name=judge"]
        tandem("sft", file, *overrides)
    [line] = harness.json_lines(tmp_path / "policy" / "run" / "evals.jsonl")
    assert line["accuracy"] == 1.0


def test_a_server_that_is_no_reward_model_is_refused_before_the_run(models, tmp_path):
    with harness.cluster(tmp_path / "judge", models, critic={}) as judge:
        config = policy_run(models, tmp_path / "policy", judge.critic.address)
        told = tandem("train", write_config(tmp_path / "run.yaml", config), check=2).stderr
        assert "reward.server: " in told
        assert "has no value head" in told
    assert not (tmp_path / "policy" / "run").exists()


def write_config(path: Path, config: RunSettings) -> Path:
    path.write_text(loading.dump(config))
    return path
