"""Laws of training steps, on the real trainer and rollout server."""

from __future__ import annotations

import json
import shutil

import harness
import numpy as np
import pytest
from harness import (
    TANDEM,
    batch_metrics,
    flat,
    json_lines,
    logprobs,
    metrics_without_clock,
    prompts,
)
from safetensors.numpy import load_file, save_file
from tandem.errors import AlreadyExistsError, FailedPreconditionError
from tandem.rpc.requests import PolicySample, SupervisedSample
from tandem.rpc.wire import from_tensor


def policy_samples(client, tandem, count=4, group=4):
    groups = client.generate(prompts(count, tandem, num_samples=group, return_other_logprobs=True))
    return [
        PolicySample(t, f"g{g}", reward=float(i % 3) - 0.2 * g)
        for g, samples in enumerate(groups)
        for i, t in enumerate(samples)
    ]


def step(client, samples, number=1, version=0, **objective):
    return client.train_step(
        samples, run_id="r", step=number, expected_version=version, objective=objective
    ).report


def test_the_first_step_has_ratio_one_and_no_kl(numerics, models, tmp_path):
    trainer_settings = numerics.settings(reference_model=str(models.senior))
    with (
        harness.cluster(
            tmp_path, models, rollout=numerics.settings(), trainer=trainer_settings
        ) as running,
        harness.rollout_client(running) as rollout,
        harness.trainer_client(running) as trainer,
    ):
        report = step(trainer, policy_samples(rollout, TANDEM["word"]), kl_coefficient=0.1)
    metrics = report.metrics
    bfloat16 = numerics.bfloat16
    assert abs(metrics["policy/ppo_kl"]) < (5e-3 if bfloat16 else 1e-6)
    assert metrics["policy/clip_fraction"] == 0
    assert abs(metrics["loss/kl"]) < 1e-8
    assert abs(metrics["mismatch/k3"]) < (1e-3 if bfloat16 else 1e-8)
    # The step keeps float64, the rollout server's are float32.
    limit = 1e-6 if numerics.exact else 0.15 if bfloat16 else 1e-4
    assert metrics["mismatch/max_abs_logprob_diff"] < limit
    assert report.weights.version == 1


def test_the_trainer_reports_the_batch_as_documented(fresh_pair):
    with (
        harness.rollout_client(fresh_pair) as rollout,
        harness.trainer_client(fresh_pair) as trainer,
    ):
        samples = policy_samples(rollout, TANDEM["word"])
        ends = rollout.info().sentence_boundary_token_ids
        # The tiny models seldom end a sentence.
        for sample in samples[::2]:
            sample.trajectory.response_token_ids[0] = ends[0]
        reported = step(trainer, samples).metrics
    expected = batch_metrics([s.trajectory for s in samples], [s.reward for s in samples], ends)
    assert expected["tandem/tokens_per_sent"] < expected["tokens/response"] / len(samples)
    for name, value in expected.items():
        assert reported[name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize(
    ("weights", "activations"),
    [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")],
)
def test_the_trainer_computes_what_the_senior_computes(models, tmp_path, weights, activations):
    """Before and after updates, of which bfloat16 weights show only the larger ones."""
    compute = {"num_threads": 1, "weight_dtype": weights, "activation_dtype": activations}
    with (
        harness.cluster(
            tmp_path,
            models,
            rollout={"senior_dtype": weights, "senior_activation_dtype": activations},
            trainer={"compute": compute, "reference_model": str(models.senior)},
        ) as running,
        harness.rollout_client(running) as rollout,
        harness.trainer_client(running) as trainer,
    ):
        for version in range(3):
            samples = policy_samples(rollout, TANDEM["word"])
            trajectories = [sample.trajectory for sample in samples]
            replies = trainer.compute_log_probs(
                [SupervisedSample(t.prompt_token_ids, harness.tokens(t)) for t in trajectories]
            )
            for t, reply in zip(trajectories, replies, strict=True):
                np.testing.assert_array_equal(from_tensor(reply.logprobs), logprobs(t, "senior"))
            metrics = step(trainer, samples, version + 1, version, kl_coefficient=0.1).metrics
            # The step keeps float64, the rollout server's are float32.
            assert metrics["mismatch/max_abs_logprob_diff"] < 1e-6
            # The frozen reference is rounded alike.
            assert (abs(metrics["loss/kl"]) < 1e-8) == (version == 0)
            [published] = trainer.publish_weights([running.rollouts[0].address]).results
            assert published.digest == trainer.info().server.weights.digest


def test_a_bfloat16_senior_differs_from_a_trainer_with_float32_weights(models, tmp_path):
    with (
        harness.cluster(
            tmp_path, models, rollout={"senior_dtype": "bfloat16"}, trainer={}
        ) as running,
        harness.rollout_client(running) as rollout,
        harness.trainer_client(running) as trainer,
    ):
        metrics = step(trainer, policy_samples(rollout, TANDEM["word"])).metrics
        assert metrics["mismatch/max_abs_logprob_diff"] > 2e-3


def test_a_senior_that_rounds_inputs_differs_from_a_trainer_that_does_not(models, tmp_path):
    with (
        harness.cluster(
            tmp_path,
            models,
            rollout={"senior_dtype": "bfloat16", "senior_activation_dtype": "bfloat16"},
            trainer={"compute": {"num_threads": 1, "weight_dtype": "bfloat16"}},
        ) as running,
        harness.rollout_client(running) as rollout,
        harness.trainer_client(running) as trainer,
    ):
        metrics = step(trainer, policy_samples(rollout, TANDEM["word"])).metrics
        assert metrics["mismatch/max_abs_logprob_diff"] > 1e-3


def test_recomputed_old_log_probs_make_the_ratio_exactly_one(numerics, models, tmp_path):
    compute = numerics.settings()
    with (
        harness.cluster(tmp_path, models, rollout=compute, trainer=compute) as running,
        harness.rollout_client(running) as rollout,
        harness.trainer_client(running) as trainer,
    ):
        samples = policy_samples(rollout, TANDEM["word"])
        metrics = step(trainer, samples, old_logprobs="recomputed").metrics
    assert abs(metrics["policy/ppo_kl"]) < 1e-8
    assert metrics["policy/clip_fraction"] == 0


def test_only_junior_tokens_of_weight_zero_skip_the_step(fresh_pair):
    with (
        harness.rollout_client(fresh_pair) as rollout,
        harness.trainer_client(fresh_pair) as trainer,
    ):
        samples = policy_samples(rollout, TANDEM["bernoulli"] | {"prob_senior": 0.0})
        before = trainer.info()
        report = step(trainer, samples, junior_token_loss_weight=0.0)
        after = trainer.info()
        assert report.skipped
        assert report.skip_reason
        assert report.weights.version == before.server.weights.version == 0
        assert after.server.weights.digest == before.server.weights.digest
        assert after.optimizer_steps == before.optimizer_steps == 0
        # With a weight above 0 the same batch trains.
        assert not step(trainer, samples, 2, junior_token_loss_weight=0.5).skipped
        assert trainer.info().server.weights.digest != before.server.weights.digest


def test_a_model_that_overflows_skips_its_steps(models, tmp_path):
    overflowing = tmp_path / "overflowing"
    shutil.copytree(models.senior, overflowing)
    tensors = load_file(overflowing / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(1e30)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * np.float32(1e15)
    save_file(tensors, overflowing / "model.safetensors")
    with (
        harness.cluster(tmp_path / "c", models, trainer={"model": str(overflowing)}) as running,
        harness.trainer_client(running) as trainer,
    ):
        before = trainer.info()
        report = step(trainer, [SupervisedSample([5, 6], [7, 8, 9])])
        assert report.skipped
        assert "not finite" in report.skip_reason
        assert trainer.info().server.weights == report.weights == before.server.weights
        assert trainer.info().optimizer_steps == 0
        counted = 'tandem_train_steps_total{result="not_finite"} 1'
        assert counted in harness.metrics_text(running.trainer)


def test_a_certain_senior_trains_as_tandem_switched_off_bit_for_bit(models, tmp_path):
    results = []
    for name, tandem in (
        ("off", {"enabled": False}),
        ("certain", TANDEM["word"] | {"prob_senior": 1.0}),
    ):
        with harness.cluster(tmp_path / f"{name}-cluster", models, trainer={}) as running:
            config = harness.run_settings(tmp_path / name, models, running, tandem=tandem)
            run = harness.run_training(config)
            with harness.trainer_client(running) as trainer:
                trainer.export_model(str(tmp_path / f"{name}-model"))
        results.append((metrics_without_clock(run), harness.weights(tmp_path / f"{name}-model")))
    (off_metrics, off), (certain_metrics, certain) = results
    assert off.keys() == certain.keys()
    for name in off:
        np.testing.assert_array_equal(off[name], certain[name], err_msg=name)
    assert off_metrics == certain_metrics
    start = harness.weights(models.senior)
    assert any(not np.array_equal(off[name], start[name]) for name in off)


def test_the_loss_does_not_depend_on_micro_batches(numerics, models, tmp_path, rollout):
    samples = policy_samples(rollout, TANDEM["word"])
    reports = []
    for tokens in (2048, 64):
        with (
            harness.cluster(
                tmp_path / str(tokens),
                models,
                rollouts=0,
                trainer=numerics.settings(batch={"micro_batch_tokens": tokens}),
            ) as running,
            harness.trainer_client(running) as trainer,
        ):
            reports.append(step(trainer, samples, junior_token_loss_weight=0.3).metrics)
    for name in ("loss/total", "policy/grad_norm", "loss/entropy"):
        assert reports[0][name] == pytest.approx(reports[1][name], rel=1e-4, abs=1e-7)


def test_shared_prefixes_change_no_logprob_and_no_loss(numerics, models, tmp_path, rollout):
    """Groups of the rollout server, whose prompts the trainer reads once."""
    if numerics.device != "cpu":
        pytest.skip("a GPU does not support shared prefixes")
    samples = policy_samples(rollout, TANDEM["word"])
    sequences = [
        SupervisedSample(s.trajectory.prompt_token_ids, harness.tokens(s.trajectory))
        for s in samples
    ]
    reports, replies = [], []
    for shares in (False, True):
        batch = {"micro_batch_tokens": 256, "shared_prefixes": shares}
        with (
            harness.cluster(
                tmp_path / str(shares), models, rollouts=0, trainer=numerics.settings(batch=batch)
            ) as running,
            harness.trainer_client(running) as trainer,
        ):
            replies.append(trainer.compute_log_probs(sequences))
            reports.append(step(trainer, samples, junior_token_loss_weight=0.3).metrics)
    for apart, shared in zip(*replies, strict=True):
        np.testing.assert_allclose(
            from_tensor(shared.logprobs), from_tensor(apart.logprobs), rtol=0, atol=numerics.atol
        )
    assert "policy/shared_token_fraction" not in reports[0]
    assert reports[1]["policy/shared_token_fraction"] > 0.1
    tolerance = 2e-2 if numerics.bfloat16 else 1e-4
    for name in ("loss/total", "policy/grad_norm", "loss/entropy"):
        assert reports[1][name] == pytest.approx(reports[0][name], rel=tolerance, abs=1e-7)


def test_a_supervised_step_is_adamw_on_the_cross_entropy(numerics, models, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    rng = np.random.default_rng(5)
    samples = [
        SupervisedSample(rng.integers(2, 280, 4).tolist(), rng.integers(2, 280, n).tolist())
        for n in (3, 9, 6)
    ]
    learning_rate = 1e-3
    with (
        harness.cluster(tmp_path / "c", models, rollouts=0, trainer=numerics.settings()) as running,
        harness.trainer_client(running) as trainer,
    ):
        report = step(trainer, samples)
        trainer.export_model(str(tmp_path / "trained"))

    model = AutoModelForCausalLM.from_pretrained(models.senior, dtype=torch.float32)
    total, count = torch.zeros(()), 0
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_token_ids, *sample.response_token_ids]])
        start = len(sample.prompt_token_ids)
        rows = torch.log_softmax(model(ids).logits[0, start - 1 : -1], -1)
        labels = torch.tensor(sample.response_token_ids)
        total = total - rows[torch.arange(len(labels)), labels].sum()
        count += len(labels)
    loss = total / count
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0).step()

    bfloat16 = numerics.bfloat16
    assert report.metrics["loss/total"] == pytest.approx(
        loss.item(), abs=0.05 if bfloat16 else 1e-5
    )
    assert report.metrics["policy/grad_norm"] == pytest.approx(
        norm.item(), rel=0.05 if bfloat16 else 1e-4
    )
    trained = harness.weights(tmp_path / "trained")
    start = harness.weights(models.senior)
    for name, parameter in model.named_parameters():
        moved = parameter.detach().numpy() - start[name]
        ours = trained[name] - start[name]
        # The first Adam step moves every weight by the learning rate in the direction of its
        # gradient, whose sign is rounding where the gradient is almost 0.
        gradient = np.abs(parameter.grad.numpy())
        if bfloat16:
            clear = gradient > 0.05 * np.sqrt(np.mean(gradient**2))
            same = np.abs(ours[clear] - moved[clear]) < 2e-5
            assert same.mean() > 0.99, name
        else:
            clear = gradient > 1e-6
            np.testing.assert_allclose(ours[clear], moved[clear], rtol=0, atol=2e-5)


def test_a_group_with_equal_rewards_moves_nothing_but_is_a_step(fresh_pair):
    with (
        harness.rollout_client(fresh_pair) as rollout,
        harness.trainer_client(fresh_pair) as trainer,
    ):
        groups = rollout.generate(
            prompts(2, TANDEM["word"], num_samples=3, return_other_logprobs=True)
        )
        samples = [
            PolicySample(t, f"g{g}", reward=1.0) for g, group in enumerate(groups) for t in group
        ]
        report = step(trainer, samples)
    assert report.metrics["policy/grad_norm"] == pytest.approx(0, abs=1e-9)


def test_compute_log_probs_agrees_with_transformers(trainer, models):
    sequences = [SupervisedSample([5, 6, 7], [8, 9, 10, 11]), SupervisedSample([9], [3])]
    for sequence, reply in zip(
        sequences, trainer.compute_log_probs(sequences, temperature=0.7), strict=True
    ):
        expected = harness.reference_logprobs(
            models.senior, sequence.prompt_token_ids, sequence.response_token_ids, 0.7
        )
        np.testing.assert_allclose(from_tensor(reply.logprobs), expected, rtol=0, atol=2e-4)


def test_a_repeated_request_is_answered_once_and_reuse_is_refused(fresh_pair):
    samples = [SupervisedSample([5, 6], [7, 8])]
    with harness.trainer_client(fresh_pair) as trainer:
        arguments = {"run_id": "r", "step": 1, "expected_version": 0, "request_id": "once"}
        first = trainer.train_step(samples, **arguments)
        second = trainer.train_step(samples, **arguments)
        assert (first.replayed, second.replayed) == (False, True)
        assert first.report == second.report
        assert trainer.info().server.weights.version == 1
        with pytest.raises(AlreadyExistsError):
            trainer.train_step([SupervisedSample([5, 6], [7, 9])], **arguments)
        with pytest.raises(FailedPreconditionError) as caught:
            trainer.train_step(samples, **arguments | {"request_id": "again", "step": 2})
        assert caught.value.reason == "STALE_POLICY_VERSION"


def test_published_weights_are_what_the_rollout_server_then_samples_from(
    numerics, models, tmp_path
):
    compute = numerics.settings()
    with (
        harness.cluster(tmp_path / "c", models, rollout=compute, trainer=compute) as running,
        harness.rollout_client(running) as rollout,
        harness.trainer_client(running) as trainer,
    ):
        step(trainer, [SupervisedSample([5, 6], [7, 8])] * 3)
        reply = trainer.publish_weights([rollout.address])
        assert reply.results[0].digest == reply.weights.digest
        assert rollout.weights_version().version == 1
        trainer.export_model(str(tmp_path / "model"))
        [[t]] = rollout.generate(prompts(1, {"enabled": False}))
        assert [(run.weights.version, run.count) for run in t.senior_versions] == [
            (1, len(t.response_token_ids))
        ]
    expected = harness.reference_logprobs(
        tmp_path / "model", t.prompt_token_ids, t.response_token_ids
    )
    np.testing.assert_allclose(
        harness.logprobs(t, "author"), expected, rtol=0, atol=numerics.reference_atol
    )


def test_the_same_seed_gives_the_same_run_twice(models, tmp_path):
    runs = []
    for name in ("first", "second"):
        with harness.cluster(tmp_path / f"{name}-cluster", models, trainer={}) as running:
            runs.append(
                harness.run_training(harness.run_settings(tmp_path / name, models, running))
            )
    assert_same_run(*runs)


def test_a_resumed_run_equals_an_uninterrupted_one(models, tmp_path):
    with harness.cluster(tmp_path / "c1", models, trainer={}) as running:
        whole = harness.run_training(
            harness.run_settings(tmp_path / "whole", models, running, steps=4)
        )
    with harness.cluster(tmp_path / "c2", models, trainer={}) as running:
        harness.run_training(harness.run_settings(tmp_path / "parts", models, running, steps=2))
    with harness.cluster(tmp_path / "c3", models, trainer={}) as running:
        config = harness.run_settings(tmp_path / "parts", models, running, steps=4)
        parts = harness.run_training(config, resume=True)
    assert_same_run(whole, parts)


def test_every_step_of_a_ppo_run_trains_senior_and_critic(numerics, models, tmp_path):
    compute = numerics.settings()
    with harness.cluster(
        tmp_path / "c", models, rollout=compute, trainer=compute, critic=compute
    ) as running:
        config = harness.run_settings(
            tmp_path / "run",
            models,
            running,
            objective={"advantage_estimator": "gae", "gae_lambda": 0.95},
        )
        run = harness.run_training(config)
        with harness.critic_client(running) as critic:
            assert critic.info().server.weights.version == 3
            assert critic.info().optimizer_steps == 3
    metrics = json_lines(run / "metrics.jsonl")
    assert [line["version/senior"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert line["critic/loss"] > 0
        assert line["policy/grad_norm"] > 0
        assert line["critic/grad_norm"] > 0
    state = json.loads((run / "state.json").read_text())
    assert state["critic"]


def test_a_ppo_step_is_repeated_bit_for_bit_after_its_trainer_died(models, tmp_path):
    """The critic has already learnt the step, which a new trainer repeats."""
    gae = {"advantage_estimator": "gae", "gae_lambda": 0.95, "whiten_advantages": True}
    arguments = {"run_id": "r", "step": 1, "expected_version": 0, "request_id": "once"}
    with harness.cluster(tmp_path / "first", models, trainer={}, critic={}) as running:
        with harness.rollout_client(running) as rollout, harness.trainer_client(running) as trainer:
            samples = policy_samples(rollout, TANDEM["word"], count=2)
            undisturbed = trainer.train_step(samples, objective=gae, **arguments).report
        running.trainer.process.kill()
        running.trainer.process.wait()
        critic = {"critic_address": running.critic.address}
        with (
            harness.cluster(tmp_path / "second", models, rollouts=0, trainer=critic) as again,
            harness.trainer_client(again) as trainer,
        ):
            repeated = trainer.train_step(samples, objective=gae, **arguments)
    assert not repeated.replayed
    assert repeated.report == undisturbed


def test_gae_without_a_critic_is_refused(fresh_pair):
    with (
        harness.rollout_client(fresh_pair) as rollout,
        harness.trainer_client(fresh_pair) as trainer,
    ):
        samples = policy_samples(rollout, TANDEM["word"], count=1, group=2)
        with pytest.raises(FailedPreconditionError) as caught:
            step(trainer, samples, advantage_estimator="gae")
        assert caught.value.reason == "NO_CRITIC"


def test_one_trainer_publishes_the_same_weights_to_two_rollout_servers(models, tmp_path):
    with harness.cluster(tmp_path / "c", models, rollouts=2, trainer={}) as running:
        config = harness.run_settings(tmp_path / "two", models, running)
        run = harness.run_training(config)
        with harness.rollout_client(running, 0) as a, harness.rollout_client(running, 1) as b:
            assert a.weights_version() == b.weights_version()
            assert a.weights_version().version == 3
            batch = prompts(3, TANDEM["word"], num_samples=2)
            first, second = flat(a.generate(batch)), flat(b.generate(batch))
    for x, y in zip(first, second, strict=True):
        assert harness.tokens(x) == harness.tokens(y)
    records = harness.trajectories(run, 3)
    assert len(records) == 12
    assert {r["senior_versions"][0][0] for r in records} == {2}


def test_a_step_from_a_loaded_checkpoint_repeats_its_loss_and_exports_open_with_transformers(
    models, tmp_path, fresh_pair
):
    samples = [SupervisedSample([5, 6, 7], [8, 9])] * 2
    with harness.trainer_client(fresh_pair) as trainer:
        for number in (1, 2):
            step(trainer, samples, number, version=number - 1)
        path = trainer.save_checkpoint(str(tmp_path / "ckpt"), "step_000002")
        after = step(trainer, samples, 3, version=2)
        assert trainer.load_checkpoint(path).version == 2
        again = trainer.train_step(
            samples, run_id="r", step=3, expected_version=2, request_id="again"
        ).report
        assert again.metrics["loss/total"] == after.metrics["loss/total"]
        trainer.export_model(str(tmp_path / "model"), dtype="bf16")
    shutil.copy(models.tokenizer / "tokenizer.json", tmp_path / "model" / "tokenizer.json")
    assert harness.reference_logprobs(tmp_path / "model", [5, 6], [7]).shape == (1,)


def assert_same_run(a, b):
    left, right = metrics_without_clock(a), metrics_without_clock(b)
    assert left == right
    for line in left:
        name = f"trajectories/step_{line['step']}.parquet"
        assert (a / name).read_bytes() == (b / name).read_bytes()
