"""A senior, a trainer and a critic with experts, beside a dense junior of the same tokenizer."""

from __future__ import annotations

import dataclasses
import json
import shutil

import harness
import numpy as np
import pytest
from harness import TANDEM, flat, logprobs, prompts
from tandem.requests import PolicySample, SupervisedSample
from tandem.wire import from_tensor

EXPERTS = {"num_experts_per_tok": 2, "hidden_size": 48, "initializer_range": 0.25}
FAMILIES = {
    "Mixtral": {"num_local_experts": 5, "intermediate_size": 40},
    "Qwen2Moe": {
        "num_experts": 6,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
    },
    "Qwen3Moe": {"num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True},
}


@pytest.fixture(scope="module", params=FAMILIES)
def experts(request, models, tmp_path_factory):
    """The models of a run whose senior has experts."""
    import torch
    import transformers

    junior = json.loads((models.junior / "config.json").read_text())
    config = getattr(transformers, f"{request.param}Config")(
        vocab_size=junior["vocab_size"],
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=1,
        **EXPERTS,
        **FAMILIES[request.param],
    )
    config._experts_implementation = "eager"  # the other takes no odd widths
    torch.manual_seed(7)
    senior = tmp_path_factory.mktemp(request.param) / "senior"
    model = getattr(transformers, f"{request.param}ForCausalLM")(config)
    # transformers begins with routers of zeros, which choose no expert above another.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
                parameter.normal_(0, 0.5)
    model.save_pretrained(senior)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.junior / name, senior / name)
    return dataclasses.replace(models, senior=senior)


def samples_of(rollout, count=4, group=4):
    groups = rollout.generate(
        prompts(count, TANDEM["word"], num_samples=group, return_other_logprobs=True)
    )
    return [
        PolicySample(t, f"g{g}", reward=float(i % 3) - 0.2 * g)
        for g, trajectories in enumerate(groups)
        for i, t in enumerate(trajectories)
    ]


def test_a_sample_is_that_of_its_models_and_does_not_depend_on_its_company(experts, tmp_path):
    with (
        harness.cluster(tmp_path, experts) as running,
        harness.rollout_client(running) as rollout,
    ):
        asked = prompts(6, TANDEM["word"], num_samples=2, return_other_logprobs=True)
        together = flat(rollout.generate(asked))
        alone = [t for prompt in asked for t in flat(rollout.generate([prompt]))]
        for a, b in zip(together, alone, strict=True):
            assert harness.response_bytes(a) == harness.response_bytes(b)
    for trajectory in together[::3]:
        for model in ("senior", "junior"):
            expected = harness.reference_logprobs(
                getattr(experts, model),
                trajectory.prompt_token_ids,
                trajectory.response_token_ids,
            )
            np.testing.assert_allclose(logprobs(trajectory, model), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_the_trainer_computes_what_the_senior_computed(experts, tmp_path, weights):
    """To the bit, before and after updates that are published."""
    compute = {"num_threads": 1, "weight_dtype": weights}
    with (
        harness.cluster(
            tmp_path, experts, rollout={"senior_dtype": weights}, trainer={"compute": compute}
        ) as running,
        harness.rollout_client(running) as rollout,
        harness.trainer_client(running) as trainer,
    ):
        for version in range(3):
            samples = samples_of(rollout)
            trajectories = [sample.trajectory for sample in samples]
            replies = trainer.compute_log_probs(
                [SupervisedSample(t.prompt_token_ids, harness.tokens(t)) for t in trajectories]
            )
            for t, reply in zip(trajectories, replies, strict=True):
                np.testing.assert_array_equal(from_tensor(reply.logprobs), logprobs(t, "senior"))
            metrics = trainer.train_step(
                samples, run_id="r", step=version + 1, expected_version=version
            ).report.metrics
            assert metrics["mismatch/max_abs_logprob_diff"] < 1e-6
            [published] = trainer.publish_weights([running.rollouts[0].address]).results
            assert published.digest == trainer.info().server.weights.digest


def test_a_ppo_run_trains_senior_and_critic_and_exports_for_transformers(experts, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    with (
        harness.cluster(tmp_path / "cluster", experts, trainer={}, critic={}) as running,
        harness.trainer_client(running) as trainer,
    ):
        lines = harness.run_on(
            running, experts, tmp_path / "run", objective={"advantage_estimator": "gae"}
        )
        assert [line["version/senior"] for line in lines] == [1, 2, 3]
        for line in lines:
            assert line["policy/grad_norm"] > 0
            assert line["critic/grad_norm"] > 0
        exported = tmp_path / "exported"
        trainer.export_model(str(exported))
    _, info = AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_senior_with_experts_writes(experts, tmp_path, quantization):
    with (
        harness.cluster(
            tmp_path, experts, rollout={"senior_quantization": quantization}
        ) as running,
        harness.rollout_client(running) as rollout,
    ):
        asked = prompts(4, TANDEM["word"])
        together = flat(rollout.generate(asked))
        alone = [t for prompt in asked for t in flat(rollout.generate([prompt]))]
        for a, b in zip(together, alone, strict=True):
            assert harness.response_bytes(a) == harness.response_bytes(b)
