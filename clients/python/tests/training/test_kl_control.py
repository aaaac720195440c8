"""The adaptive KL coefficient, from step to step."""

import pytest

from tandem._proto.trainer.v1.trainer_pb2 import StepReport
from tandem.run_directory.checkpoints import SavedState
from tandem.settings.run import DataSettings, RunSettings
from tandem.training.kl_control import first_kl_coefficient, next_kl_coefficient


def config(control=None, **objective):
    return RunSettings(
        run_dir="run",
        tokenizer="model",
        data=DataSettings(jsonl="rows"),
        objective={"kl_coefficient": 0.1} | objective,
        kl_control=control,
    )


def report(kl, tokens, dropped=0, **fields):
    metrics = {
        "policy/kl_to_ref": kl,
        "policy/weighted_tokens": tokens,
        "policy/dropped_samples": dropped,
    }
    return StepReport(metrics=metrics, **fields)


CONTROL = {"target": 6.0, "horizon": 100}


@pytest.mark.parametrize(
    ("kl", "off"),
    [
        # 0.66 nats for each of 10 tokens are 6.6 nats a response, a tenth above the target.
        (0.66, 0.1),
        (0.54, -0.1),
        (0.6, 0.0),
        # The deviation is clipped to a fifth.
        (6.0, 0.2),
        (-1.0, -0.2),
    ],
)
def test_the_coefficient_follows_the_kl_of_a_response(kl, off):
    found = next_kl_coefficient(config(CONTROL), 0.1, report(kl, 80), 8)
    assert found == pytest.approx(0.1 * (1 + off * 8 / 100), rel=1e-12)


def test_tokens_are_counted_once_per_epoch():
    found = next_kl_coefficient(config(CONTROL, num_epochs=2), 0.1, report(0.66, 160), 8)
    assert found == pytest.approx(0.1 * (1 + 0.1 * 8 / 100), rel=1e-12)


def test_samples_that_the_trainer_dropped_are_no_responses():
    found = next_kl_coefficient(config(CONTROL), 0.1, report(0.66, 40, dropped=4), 8)
    assert found == pytest.approx(0.1 * (1 + 0.1 * 4 / 100), rel=1e-12)


def test_a_skipped_step_and_a_run_without_control_keep_the_coefficient():
    assert next_kl_coefficient(config(CONTROL), 0.1, StepReport(skipped=True), 8) == 0.1
    assert next_kl_coefficient(config(), 0.1, report(6.0, 80), 8) == 0.1
    assert next_kl_coefficient(config(kl_coefficient=None), None, report(0.0, 80), 8) is None


def test_a_run_begins_with_the_setting_and_goes_on_with_what_was_saved():
    saved = SavedState(2, 2, "checkpoints/step_000002", kl_coefficient=0.3)
    assert first_kl_coefficient(config(CONTROL), None) == 0.1
    assert first_kl_coefficient(config(CONTROL), saved) == 0.3
    # Without control the coefficient is the setting, which --change may have changed.
    assert first_kl_coefficient(config(), saved) == 0.1
    assert first_kl_coefficient(config(kl_coefficient=0), None) is None
