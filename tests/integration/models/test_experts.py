"""A senior, a trainer and a critic with experts, beside a dense junior of the same tokenizer."""

from __future__ import annotations

import dataclasses
import json
import shutil

import harness
import numpy as np
import pytest
import tandem.rpc.requests
from harness import TANDEM, flat, logprobs, prompts
from safetensors.numpy import load_file
from tandem.errors import InvalidArgumentError
from tandem.rpc.requests import PolicySample, SupervisedSample
from tandem.rpc.wire import from_tensor

EXPERTS = {"num_experts_per_tok": 2, "hidden_size": 48, "initializer_range": 0.25}
FAMILIES = {
    "Mixtral": {"num_local_experts": 6, "intermediate_size": 40},
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


def experts_of_transformers(model, token_ids):
    """The experts that every token takes, [tokens, layers with experts, k], ascending."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
    chosen = torch.stack([layer.topk(model.config.num_experts_per_tok).indices for layer in logits])
    return chosen.transpose(0, 1).sort(-1).values.numpy()


def recording(count, **changes):
    return [
        dataclasses.replace(prompt, return_routed_experts=True)
        for prompt in prompts(count, TANDEM["word"], return_other_logprobs=True, **changes)
    ]


def test_a_response_brings_the_experts_of_its_tokens(experts, tmp_path):
    """Those of the senior for all tokens but the last, whatever the company and the cache."""
    import torch
    from transformers import AutoModelForCausalLM

    with (
        harness.cluster(tmp_path, experts, rollout={"max_num_seqs": 4}) as running,
        harness.rollout_client(running) as rollout,
    ):
        asked = recording(5, num_samples=3)
        together = flat(rollout.generate(asked))
        again = flat(rollout.generate(asked))
        alone = [t for prompt in asked for t in flat(rollout.generate([prompt]))]
        plain = [dataclasses.replace(prompt, return_routed_experts=False) for prompt in asked]
        without = flat(rollout.generate(plain))
    for a, b, c, d in zip(together, again, alone, without, strict=True):
        assert a.routed_experts == b.routed_experts == c.routed_experts
        assert not d.HasField("routed_experts")
        b.ClearField("routed_experts")  # `again` is not read below
        assert harness.response_bytes(b) == harness.response_bytes(d)
    assert any(t.authorship_mask[-2:] == b"\0\0" for t in together), "the junior wrote an end"
    model = AutoModelForCausalLM.from_pretrained(experts.senior, dtype=torch.float32)
    for trajectory in together:
        ids = [*trajectory.prompt_token_ids, *trajectory.response_token_ids]
        np.testing.assert_array_equal(
            from_tensor(trajectory.routed_experts), experts_of_transformers(model, ids[:-1])
        )


def test_replayed_routing_changes_no_bit_and_a_damaged_one_is_refused(experts, tmp_path):
    reports = {}
    for replays in (False, True):
        with (
            harness.cluster(
                tmp_path / str(replays),
                experts,
                trainer={"compute": {"num_threads": 1}, "router_aux_loss_coef": 0.01},
            ) as running,
            harness.rollout_client(running) as rollout,
            harness.trainer_client(running) as trainer,
        ):
            samples = [
                PolicySample(t, f"g{g}", reward=float(i % 3))
                for g, group in enumerate(rollout.generate(recording(3, num_samples=4)))
                for i, t in enumerate(group)
            ]
            objective = {"routing_replay": replays}
            if replays:
                for damage, field in (
                    (lambda t: t.ClearField("routed_experts"), "routed_experts"),
                    (lambda t: t.routed_experts.shape.__setitem__(2, 3), "routed_experts.data"),
                    (
                        lambda t: setattr(
                            t.routed_experts, "data", b"\xff" * len(t.routed_experts.data)
                        ),
                        "routed_experts[0]",
                    ),
                ):
                    damaged = type(samples[1].trajectory).FromString(
                        samples[1].trajectory.SerializeToString()
                    )
                    damage(damaged)
                    bad = [samples[0], dataclasses.replace(samples[1], trajectory=damaged)]
                    with pytest.raises(InvalidArgumentError) as caught:
                        trainer.train_step(
                            bad, run_id="r", step=1, expected_version=0, objective=objective
                        )
                    assert caught.value.field == f"samples[1].trajectory.{field}"
            report = trainer.train_step(
                samples, run_id="r", step=1, expected_version=0, objective=objective
            ).report
            reports[replays] = (report.weights.digest, dict(report.metrics))
    assert reports[True] == reports[False]
    metrics = reports[True][1]
    assert metrics["router/aux_loss"] > 1.5  # near 2, the experts of a token
    assert metrics["router/z_loss"] > 0
    assert 1 <= metrics["router/max_load_ratio"] <= 3


def test_a_record_of_routing_in_parts_is_the_record_in_one_message(experts, tmp_path, monkeypatch):
    """As those of long responses travel, which are larger than a message."""
    reports = []
    for part_bytes in (1 << 20, 7):
        monkeypatch.setattr(tandem.rpc.requests, "_ROUTING_PART_BYTES", part_bytes)
        with (
            harness.cluster(tmp_path / str(part_bytes), experts, trainer={}) as running,
            harness.rollout_client(running) as rollout,
            harness.trainer_client(running) as trainer,
        ):
            step = {"run_id": "r", "step": 1, "expected_version": 0}
            step["objective"] = {"routing_replay": True}
            samples = [
                PolicySample(t, f"g{g}", reward=float(i % 3))
                for g, group in enumerate(rollout.generate(recording(2, num_samples=3)))
                for i, t in enumerate(group)
            ]
            messages = samples[1].messages()
            if part_bytes == 7:
                assert len(messages) > 3
                header = tandem.rpc.requests.train_step(samples, **step)[0]
                first = samples[0].messages()
                with pytest.raises(InvalidArgumentError) as caught:  # a part is missing
                    trainer.send_train_step([header, *first, *messages[1:]])
                assert caught.value.field == "samples[1].trajectory.routed_experts.data"
                with pytest.raises(InvalidArgumentError) as caught:  # the sample is missing
                    trainer.send_train_step([header, *first, *messages[:-1]])
                assert caught.value.field == "header.num_samples"
            reports.append(trainer.train_step(samples, **step).report)
    assert reports[0] == reports[1]


def test_a_run_replays_routing_and_reports_its_routers(experts, tmp_path):
    losses = {"router_aux_loss_coef": 0.01, "router_z_loss_coef": 0.001}
    with harness.cluster(tmp_path / "cluster", experts, trainer=losses, critic=losses) as running:
        lines = harness.run_on(
            running,
            experts,
            tmp_path / "run",
            objective={"advantage_estimator": "gae", "routing_replay": True},
        )
    for line in lines:
        for of in ("router/", "critic/router_"):
            assert line[of + "aux_loss"] > 0
            assert line[of + "z_loss"] > 0
            assert line[of + "max_load_ratio"] >= 1


def test_a_run_on_ranks_that_hold_different_experts_equals_one_on_single_ranks(experts, tmp_path):
    rollout = {"ranks": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    trainer = {"ranks": 2, "strategy": {"name": "megatron", "expert_model_parallel_size": 2}}
    lines = {}
    for name, servers in {"one": ({}, {}), "two": (rollout, trainer)}.items():
        with (
            harness.cluster(
                tmp_path / name, experts, rollout=servers[0], trainer=servers[1]
            ) as running,
            harness.trainer_client(running) as client,
        ):
            lines[name] = harness.run_on(running, experts, tmp_path / f"run-{name}")
            client.export_model(str(tmp_path / f"exported-{name}"))
    harness.assert_metrics_close(lines["two"], lines["one"])
    one, two = (
        {
            tensor: values
            for file in (tmp_path / f"exported-{name}").glob("*.safetensors")
            for tensor, values in load_file(file).items()
        }
        for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    for name, values in one.items():
        np.testing.assert_allclose(two[name], values, rtol=1e-3, atol=2e-4, err_msg=name)


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
