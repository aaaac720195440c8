"""TensorBoard events, read back with TensorBoard's own reader."""

import subprocess
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tandem.event_file import EventFile


def scalars(folder):
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, round(event.value, 6)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_numbers_of_lines_and_evaluations_are_scalars(tmp_path):
    with EventFile(tmp_path / "tensorboard", 1) as events:
        events.add({"step": 1, "reward/mean": 0.25, "loss/kl": None, "tokens/response": 7})
        events.add({"step": 1, "accuracy": 0.5, "mode": "solo", "pass_at": {"1": 0.5}}, "eval/")
        # On disk before it is closed.
        assert scalars(tmp_path / "tensorboard") == {
            "reward/mean": [(1, 0.25)],
            "tokens/response": [(1, 7.0)],
            "eval/accuracy": [(1, 0.5)],
            "eval/pass_at/1": [(1, 0.5)],
        }


def test_steps_that_are_done_again_stand_there_once(tmp_path):
    for first, values in ((1, (0.1, 0.2, 0.3)), (2, (0.4, 0.5, 0.6))):
        with EventFile(tmp_path, first) as events:
            for step, value in enumerate(values, start=first):
                events.add({"step": step, "reward/mean": value})
    assert scalars(tmp_path) == {"reward/mean": [(1, 0.1), (2, 0.4), (3, 0.5), (4, 0.6)]}


def test_torch_is_not_imported():
    code = (
        "import sys, tandem.event_file; sys.exit(bool({'torch', 'tensorflow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
