"""Servers with a senior that has a vision tower, on text: its junior is a Llama without one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import harness
import numpy as np
import pytest
from family_models import VISION_FAMILIES, make_vision_model
from harness import TANDEM, flat, prompts
from tandem.errors import InvalidArgumentError
from tandem.rpc.requests import PolicySample, Prompt, SupervisedSample
from tandem.rpc.wire import from_tensor


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


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def running(request, models, tmp_path_factory):
    """Rollout server, trainer and critic of a senior, its family and its image token."""
    folder = tmp_path_factory.mktemp(request.param)
    image = make_vision_model(folder / "senior", request.param, models.senior)
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


def test_a_token_that_stands_for_an_image_needs_one_in_prompts_alone(running):
    cluster, _, _, image = running
    with (
        harness.rollout_client(cluster) as rollout,
        harness.trainer_client(cluster) as trainer,
        harness.critic_client(cluster) as critic,
    ):
        with pytest.raises(InvalidArgumentError, match="stands for an image") as caught:
            rollout.generate([Prompt(token_ids=[5, image, 6])])
        assert caught.value.field == "vision_inputs"
        with pytest.raises(InvalidArgumentError) as caught:
            rollout.score([([3, image, 4], 2)])
        assert caught.value.field == "sequences[0].vision_inputs"
        for server in (trainer.compute_log_probs, critic.compute_values):
            with pytest.raises(InvalidArgumentError) as caught:
                server([SupervisedSample([5, image], [7])])
            assert caught.value.field.endswith("vision_inputs")
        assert len(trainer.compute_log_probs([SupervisedSample([5, 6], [image, 7])])) == 1
