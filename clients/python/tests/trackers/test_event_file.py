"""TensorBoard events, read back with TensorBoard's own reader."""

import subprocess
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tandem.trackers.event_file import EventFile, forget_after


def scalars(folder, **options):
    events = EventAccumulator(str(folder), **options).Reload()
    return {
        tag: [(event.step, round(event.value, 6)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_numbers_of_lines_and_evaluations_are_scalars(tmp_path):
    with EventFile(tmp_path / "tensorboard", 1) as events:
        events.add({"step": 1, "reward/mean": 0.25, "loss/kl": None, "tokens/response": 7})
        events.add(
            {"step": 1, "accuracy": 0.5, "mode": "solo", "pass_at": {"1": 0.5}}, "eval/solo/"
        )
        # The events are on disk before the file is closed.
        assert scalars(tmp_path / "tensorboard") == {
            "reward/mean": [(1, 0.25)],
            "tokens/response": [(1, 7.0)],
            "eval/solo/accuracy": [(1, 0.5)],
            "eval/solo/pass_at/1": [(1, 0.5)],
        }


def test_a_reader_sees_a_repeated_step_once(tmp_path):
    for first, values in ((1, (0.1, 0.2, 0.3)), (2, (0.4, 0.5, 0.6))):
        with EventFile(tmp_path, first) as events:
            for step, value in enumerate(values, start=first):
                events.add({"step": step, "reward/mean": value})
    assert scalars(tmp_path) == {"reward/mean": [(1, 0.1), (2, 0.4), (3, 0.5), (4, 0.6)]}


def test_steps_that_a_resumed_run_gives_up_are_taken_out_of_the_files(tmp_path):
    for first in (1, 3):
        forget_after(tmp_path, first - 1)
        with EventFile(tmp_path, first) as events:
            for step in range(first, 6):
                events.add({"step": step, "reward/mean": step / 10})
    # A crash leaves an unfinished record.
    for file in tmp_path.iterdir():
        with file.open("ab") as file:
            file.write(b"half a record")
    before = [file.name for file in sorted(tmp_path.iterdir())]
    forget_after(tmp_path, 3)
    assert [file.name for file in sorted(tmp_path.iterdir())] == before
    with EventFile(tmp_path, 4) as events:
        events.add({"step": 4, "reward/mean": 0.9})
    kept = scalars(tmp_path, purge_orphaned_data=False)
    assert kept == {"reward/mean": [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.9)]}


def test_event_files_import_neither_torch_nor_tensorflow():
    code = (
        "import sys, tandem.trackers.event_file; "
        "sys.exit(bool({'torch', 'tensorflow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
