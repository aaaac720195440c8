"""Servers with a senior that has a vision tower, on text: its junior is a Llama without one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import harness
import numpy as np
import pytest
from harness import TANDEM, flat, prompts
from tandem.errors import NotImplementedByServerError
from tandem.requests import PolicySample, Prompt, SupervisedSample
from tandem.wire import from_tensor

FAMILIES = {"Qwen2VL": {"embed_dim": 32, "hidden_size": 96}, "Qwen2_5_VL": {"hidden_size": 32}}


def make_senior(directory: Path, family: str, tokenizer: Path) -> int:
    """Writes a tiny model for the tokenizer; returns the id that stands for an image."""
    import torch
    import transformers

    ids = int(json.loads((tokenizer / "config.json").read_text())["vocab_size"])
    text = {
        "vocab_size": ids,
        "hidden_size": 96,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "eos_token_id": 0,
        "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 2, "num_heads": 2, "patch_size": 4, **FAMILIES[family]}
    if family == "Qwen2_5_VL":
        vision |= {"out_hidden_size": 96, "intermediate_size": 24, "window_size": 16}
        vision["fullatt_block_indexes"] = [1]
    config = getattr(transformers, f"{family}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=ids - 2,
        video_token_id=ids - 1,
        vision_start_token_id=ids - 4,
        vision_end_token_id=ids - 3,
    )
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, directory / name)
    return ids - 2


def visual(directory: Path) -> dict[str, np.ndarray]:
    tensors = harness.weights(directory)
    return {name: tensor for name, tensor in tensors.items() if name.startswith("visual.")}


def logprobs_by_transformers(directory: Path, family: str, sequence: list[int]) -> np.ndarray:
    import torch
    import transformers

    exported = getattr(transformers, f"{family}ForConditionalGeneration")
    model, info = exported.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        logits = model.eval()(torch.tensor([sequence])).logits[0, :-1].double()
    labels = torch.tensor(sequence[1:]).unsqueeze(1)
    return torch.log_softmax(logits, -1).gather(1, labels).squeeze(1).numpy()


@pytest.fixture(scope="module", params=FAMILIES)
def running(request, models, tmp_path_factory):
    """Rollout server, trainer and critic of a senior, its family and its image token."""
    folder = tmp_path_factory.mktemp(request.param)
    image = make_senior(folder / "senior", request.param, models.senior)
    pair = dataclasses.replace(models, senior=folder / "senior")
    with harness.cluster(
        folder / "cluster", pair, trainer={"freeze": ["visual.*"]}, critic={}
    ) as cluster:
        yield cluster, request.param, pair, image


def test_a_step_on_text_keeps_the_frozen_tower_and_exports_open_with_transformers(
    running, tmp_path
):
    cluster, family, pair, _ = running
    with harness.rollout_client(cluster) as rollout, harness.trainer_client(cluster) as trainer:
        groups = rollout.generate(
            prompts(3, TANDEM["word"], num_samples=4, return_other_logprobs=True)
        )
        samples = [
            PolicySample(t, f"g{g}", reward=float(i % 2))
            for g, group in enumerate(groups)
            for i, t in enumerate(group)
        ]
        report = trainer.train_step(samples, run_id="r", step=1, expected_version=0).report
        assert report.metrics["policy/grad_norm"] > 0
        address = rollout.info().server.advertised_address
        [published] = trainer.publish_weights([address]).results
        assert published.digest == trainer.info().server.weights.digest
        assert len(flat(rollout.generate(prompts(2, TANDEM["word"])))) == 2
        trainer.export_model(str(tmp_path / "exported"))
        sequence = [5, 6, 7, 8, 9, 11, 250, 3]
        [score] = rollout.score([(sequence, 1)]).sequences
    exported = visual(tmp_path / "exported")
    before = visual(pair.senior)
    assert exported.keys() == before.keys() and exported
    for name, tensor in before.items():
        np.testing.assert_array_equal(exported[name], tensor, err_msg=name)
    norm = "model.norm.weight"
    assert (
        harness.weights(tmp_path / "exported")[norm] != harness.weights(pair.senior)[norm]
    ).any()
    expected = logprobs_by_transformers(tmp_path / "exported", family, sequence)
    np.testing.assert_allclose(from_tensor(score.senior_logprobs), expected, rtol=0, atol=2e-4)


def test_a_token_that_stands_for_an_image_is_refused_in_prompts_alone(running):
    cluster, _, _, image = running
    with (
        harness.rollout_client(cluster) as rollout,
        harness.trainer_client(cluster) as trainer,
        harness.critic_client(cluster) as critic,
    ):
        with pytest.raises(NotImplementedByServerError, match="stands for an image") as caught:
            rollout.generate([Prompt(token_ids=[5, image, 6])])
        assert caught.value.field.endswith("prompt_token_ids[1]")
        with pytest.raises(NotImplementedByServerError) as caught:
            rollout.score([([3, image, 4], 2)])
        assert caught.value.field == "sequences[0].token_ids[1]"
        for server in (trainer.compute_log_probs, critic.compute_values):
            with pytest.raises(NotImplementedByServerError) as caught:
                server([SupervisedSample([5, image], [7])])
            assert caught.value.field.endswith("prompt_token_ids[1]")
        assert len(trainer.compute_log_probs([SupervisedSample([5, 6], [image, 7])])) == 1
