"""Models with one tokenizer whose embeddings have different numbers of padding rows.

Qwen2.5 has 151,936 rows up to 3B and 152,064 from 7B on, all for one tokenizer.json.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import harness
import numpy as np
import pytest
from harness import TANDEM, flat, prompts, tokens
from tandem.cluster.local import LocalCluster
from tandem.errors import InvalidArgumentError
from tandem.rpc.requests import PolicySample, Prompt, SupervisedSample
from tandem.rpc.wire import from_tensor

OBJECTIVE = {
    "old_logprobs": "recomputed",
    "kl_coefficient": 0.1,
    "entropy_coefficient": 0.01,
    "junior_kl_coefficient": 0.5,
}


def pad(source: Path, directory: Path, rows: int) -> Path:
    """Copies a model, padded to `rows` rows that would win every draw if they took part."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    original = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = LlamaConfig.from_pretrained(source)
    config.vocab_size = rows
    padded = LlamaForCausalLM(config)
    weights = original.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        values = weights[name]
        padding = torch.full((rows - len(values), values.shape[1]), 3.0)
        weights[name] = torch.cat([values, padding])
    padded.load_state_dict(weights)
    padded.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory / name)
    return directory


def token_ids(models: harness.Models) -> int:
    """Number of token ids of the tokenizer, which is the number of rows before padding."""
    return int(json.loads((models.senior / "config.json").read_text())["vocab_size"])


@pytest.fixture(scope="module")
def padded_models(models: harness.Models, tmp_path_factory: pytest.TempPathFactory):
    """The senior and the junior, with different numbers of padding rows."""
    folder = tmp_path_factory.mktemp("padded")
    ids = token_ids(models)
    return harness.Models(
        senior=pad(models.senior, folder / "senior", ids + 20),
        junior=pad(models.junior, folder / "junior", ids + 4),
        other_vocabulary=models.other_vocabulary,
    )


def start(models: harness.Models, directory: Path):
    """Starts a rollout server, a critic, and a trainer with a reference model and the junior."""
    frozen = {"reference_model": str(models.senior), "junior_model": str(models.junior)}
    return harness.cluster(directory, models, trainer=frozen, critic={})


@pytest.fixture(scope="module")
def padded(
    padded_models: harness.Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """Servers of the padded models, shared by tests that leave versions alone."""
    with start(padded_models, tmp_path_factory.mktemp("cluster")) as running:
        yield running


def reference(directory: Path, sequence: list[int], first: int, ids: int) -> np.ndarray:
    """Log-probs by `transformers` in float64, normalized over the first `ids` rows."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    with torch.no_grad():
        logits = model(torch.tensor([sequence])).logits[0, first - 1 : -1, :ids]
    labels = torch.tensor(sequence[first:]).unsqueeze(1)
    return torch.log_softmax(logits, -1).gather(1, labels).squeeze(1).numpy()


def test_padding_rows_have_no_probability(padded, padded_models, models):
    ids = token_ids(models)
    sequence = [5, 6, 7, ids - 1, 9, 10, 250, 11]
    expected = {
        model: reference(getattr(padded_models, model), sequence, 3, ids)
        for model in ("senior", "junior")
    }
    with harness.rollout_client(padded) as rollout, harness.trainer_client(padded) as trainer:
        [score] = rollout.score([(sequence, 3)], junior=True).sequences
        [reply] = trainer.compute_log_probs([SupervisedSample(sequence[:3], sequence[3:])])
    for model, logprobs in expected.items():
        scored = from_tensor(getattr(score, f"{model}_logprobs"))
        np.testing.assert_allclose(scored, logprobs, rtol=0, atol=2e-4)
    np.testing.assert_allclose(from_tensor(reply.logprobs), expected["senior"], rtol=0, atol=2e-4)


def test_every_server_info_has_the_number_of_rows_and_of_token_ids(padded, models):
    ids = token_ids(models)
    with (
        harness.rollout_client(padded) as rollout,
        harness.trainer_client(padded) as trainer,
        harness.critic_client(padded) as critic,
    ):
        info = rollout.info()
        for model in (info.server.model, trainer.info().server.model, critic.info().server.model):
            assert (model.vocab_size, model.num_token_ids) == (ids + 20, ids)
        assert (info.junior.vocab_size, info.junior.num_token_ids) == (ids + 4, ids)


def test_an_id_of_a_padding_row_is_refused(padded, models):
    ids = token_ids(models)
    with harness.rollout_client(padded) as rollout, harness.trainer_client(padded) as trainer:
        with pytest.raises(InvalidArgumentError) as caught:
            rollout.generate([Prompt(token_ids=[5, ids], tandem=TANDEM["word"])])
        assert caught.value.field.endswith("prompt_token_ids[1]")
        with pytest.raises(InvalidArgumentError) as caught:
            rollout.score([([3, 4, ids], 1)])
        assert caught.value.field == "sequences[0].token_ids[2]"
        with pytest.raises(InvalidArgumentError) as caught:
            trainer.compute_log_probs([SupervisedSample([5, 6], [7, ids])])
        assert caught.value.field.endswith("response_token_ids[1]")


def test_padding_changes_neither_tokens_nor_steps(padded_models, models, tmp_path):
    """The test generates, makes a step with every KL, publishes and generates again."""
    results = []
    for name, pair in {"plain": models, "padded": padded_models}.items():
        with (
            start(pair, tmp_path / name) as running,
            harness.rollout_client(running) as rollout,
            harness.trainer_client(running) as trainer,
        ):
            groups = rollout.generate(
                prompts(3, TANDEM["word"], num_samples=4, return_other_logprobs=True)
            )
            samples = [
                PolicySample(t, f"g{g}", reward=float(i % 2))
                for g, group in enumerate(groups)
                for i, t in enumerate(group)
            ]
            report = trainer.train_step(
                samples, run_id="r", step=1, expected_version=0, objective=OBJECTIVE
            ).report
            address = rollout.info().server.advertised_address
            [published] = trainer.publish_weights([address]).results
            assert published.digest == trainer.info().server.weights.digest
            after = flat(rollout.generate(prompts(3, TANDEM["word"])))
            saved = trainer.save_checkpoint(str(tmp_path / name / "checkpoints"), "step_1")
            results.append((groups, dict(report.metrics), after, Path(saved)))
    (groups, metrics, after, _), (padded_groups, padded_metrics, padded_after, saved) = results
    for ours, theirs in zip(flat(padded_groups), flat(groups), strict=True):
        assert tokens(ours) == tokens(theirs)
        assert ours.author_logprobs == theirs.author_logprobs
        assert ours.other_logprobs == theirs.other_logprobs
    # The norm of the gradient is summed in memory order, which padding changes.
    assert padded_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)
    assert [tokens(t) for t in padded_after] == [tokens(t) for t in after]
    # A server that loads the checkpoint counts the same token ids.
    assert (saved / "tokenizer.json").read_bytes() == (
        models.senior / "tokenizer.json"
    ).read_bytes()


def with_more_ids(source: Path, directory: Path) -> Path:
    """Copies a model, and adds tokens to its tokenizer that have no row of the embedding."""
    from tokenizers import Tokenizer

    shutil.copytree(source, directory)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image_soft_token>"])
    tokenizer.add_tokens(["<another>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def test_ids_without_an_embedding_are_refused_and_change_nothing_else(models, tmp_path):
    """As of Gemma 3's text models, whose tokenizer has <image_soft_token> = vocab_size."""
    rows = token_ids(models)
    more = harness.Models(
        senior=with_more_ids(models.senior, tmp_path / "senior"),
        junior=with_more_ids(models.junior, tmp_path / "junior"),
        other_vocabulary=models.other_vocabulary,
    )
    drawn = []
    for name, pair in {"plain": models, "more": more}.items():
        with (
            start(pair, tmp_path / f"{name}-cluster") as running,
            harness.rollout_client(running) as rollout,
            harness.trainer_client(running) as trainer,
        ):
            drawn.append(flat(rollout.generate(prompts(3, TANDEM["word"], num_samples=4))))
            model = trainer.info().server.model
            assert (model.vocab_size, model.num_token_ids) == (rows, rows)
            with pytest.raises(InvalidArgumentError) as caught:
                rollout.generate([Prompt(token_ids=[5, rows], tandem=TANDEM["word"])])
            assert caught.value.field.endswith("prompt_token_ids[1]")
            with pytest.raises(InvalidArgumentError) as caught:
                trainer.compute_log_probs([SupervisedSample([5, 6], [7, rows + 1])])
            assert caught.value.field.endswith("response_token_ids[1]")
            samples = [
                PolicySample(t, "g", reward=float(i % 2)) for i, t in enumerate(drawn[-1][:4])
            ]
            trainer.train_step(samples, run_id="r", step=1, expected_version=0)
            [published] = trainer.publish_weights(
                [rollout.info().server.advertised_address]
            ).results
            assert published.digest == trainer.info().server.weights.digest
    plain, more_ids = drawn
    assert [tokens(t) for t in plain] == [tokens(t) for t in more_ids]
