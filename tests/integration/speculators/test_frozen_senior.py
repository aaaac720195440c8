"""A speculator that trains alone, on the real servers."""

from __future__ import annotations

import harness
import pytest
from harness import TANDEM, prompts
from tandem.errors import FailedPreconditionError
from tandem.rpc.requests import PolicySample, SupervisedSample

SPECULATOR = {
    "adapter": "mlp",
    "n_predict": 2,
    "inner_dim": 16,
    "freeze_base_model": True,
    "optimizer": {"learning_rate": 1e-2},
}
# The learner needs sequences of n_predict + 2 tokens.
SEQUENCES = [SupervisedSample([5, 6, 7], [8, 9, 10, 11]), SupervisedSample([9, 3], [30, 31, 32])]


def test_the_senior_stays_and_the_speculator_learns(models, tmp_path):
    with (
        harness.cluster(tmp_path / "c", models, trainer={"speculator": SPECULATOR}) as running,
        harness.rollout_client(running) as rollout,
        harness.trainer_client(running) as trainer,
    ):
        digest = trainer.info().server.weights.digest
        losses = []
        for number in range(1, 11):
            report = trainer.train_step(
                SEQUENCES, run_id="r", step=number, expected_version=number - 1
            ).report
            assert (report.weights.version, report.weights.digest) == (number, digest)
            assert "loss/total" not in report.metrics
            losses.append(report.metrics["speculator/loss"])
        assert losses[-1] < 0.8 * losses[0]
        assert trainer.info().optimizer_steps == 10

        [group] = rollout.generate(
            prompts(1, TANDEM["word"], num_samples=2, return_other_logprobs=True)
        )
        samples = [PolicySample(t, "g", reward=float(i)) for i, t in enumerate(group)]
        for refused in (
            lambda: trainer.check_objective({}),
            lambda: trainer.train_step(samples, run_id="r", step=11, expected_version=10),
        ):
            with pytest.raises(FailedPreconditionError, match="freeze_base_model") as caught:
                refused()
            assert caught.value.reason == "BASE_MODEL_FROZEN"

        trainer.publish_weights([rollout.address])
        assert rollout.weights_version().version == 10
        trainer.export_model(str(tmp_path / "exported"))
        trainer.save_checkpoint(str(tmp_path / "checkpoints"), "ten")
    before, after = harness.weights(models.senior), harness.weights(tmp_path / "exported")
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    files = {path.name for path in (tmp_path / "checkpoints/ten").iterdir()}
    assert {"speculator", "speculator_optimizer.safetensors"} <= files
    assert not any(name.startswith("optimizer") for name in files)
