"""Checkpoints that a trainer writes beside the next steps, and copies of them at a URL."""

import json

import fakes
import pytest
from commands import contents, lines, tandem
from flaky_store import FlakyFileSystem
from grpc_status import rpc_status

from tandem.run_directory import mirror as mirrors
from tandem.run_directory.mirror import restore_run


@pytest.fixture(autouse=True)
def _fresh_store(monkeypatch):
    FlakyFileSystem.reset()
    monkeypatch.setattr(mirrors, "RETRY_SECONDS", (0.01, 0.01))


def state_of(run):
    return json.loads((run / "state.json").read_text())


def test_steps_are_made_while_a_checkpoint_is_written(world, run_file, tmp_path):
    world.writes_beside = True
    seen = []

    def write(context):
        # The next step is made before the checkpoint of the first is on disk.
        if not seen:
            fakes.wait_until(lambda: world.version > 1)
            assert not (tmp_path / "run/state.json").exists()
        seen.append(world.version)

    world.on_write = write
    tandem("train", run_file, "steps=3", "checkpoint.every=1", "checkpoint.keep=0")
    assert len(seen) == 3
    assert seen[0] > 1
    state = state_of(tmp_path / "run")
    assert (state["step"], state["version"]) == (3, 3)
    saved = {path.rpartition("/")[2]: version for path, version in world.saved.items()}
    assert saved == {"step_000001": 1, "step_000002": 2, "step_000003": 3}


def test_a_run_with_background_saves_resumes_as_ever(world, run_file, tmp_path):
    world.writes_beside = True
    tandem("train", run_file, "steps=2", "checkpoint.every=1")
    tandem("train", run_file, "steps=4", "--resume")
    assert [line["step"] for line in lines(tmp_path / "run/metrics.jsonl")] == [1, 2, 3, 4]
    assert state_of(tmp_path / "run")["step"] == 4


def test_a_checkpoint_that_fails_ends_the_run_and_the_one_before_stays(world, run_file, tmp_path):
    world.writes_beside = True
    full = rpc_status.to_status(fakes.error_status(8, "no space left on the device"))

    def write(context):
        if world.version > 1:
            context.abort_with_status(full)

    world.on_write = write
    shown = tandem("train", run_file, "steps=4", "checkpoint.every=1", check=1)
    assert "no space left on the device" in shown.stderr
    assert "saved after step 1, --resume continues from there" in shown.stderr
    assert state_of(tmp_path / "run")["step"] == 1
    # Every step that was made has its line.
    steps = [line["step"] for line in lines(tmp_path / "run/metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    world.on_write = lambda context: None
    tandem("train", run_file, "steps=4", "checkpoint.every=1", "--resume")
    assert state_of(tmp_path / "run")["step"] == 4


UPLOAD = "checkpoint.upload=flaky://bucket/runs/one"


def stored():
    return {name.lstrip("/") for name in FlakyFileSystem.store}


def test_a_run_resumes_from_its_copy_on_an_empty_disk(world, run_file, tmp_path):
    tandem("train", run_file, "steps=4", f"run_dir={tmp_path / 'whole'}")
    world.version = world.published = 0
    tandem("train", run_file, "steps=2", "checkpoint.every=1", UPLOAD)
    # A disk that has nothing of the run.
    (tmp_path / "run").rename(tmp_path / "lost")
    shown = tandem("train", run_file, "steps=4", "checkpoint.every=1", UPLOAD, "--resume")
    assert (
        "the run of flaky://bucket/runs/one is fetched, with its checkpoint of step 2"
        in shown.stdout
    )
    whole, parted = (lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "run"))
    rewards = [[line["reward/mean"] for line in one] for one in (whole, parted)]
    assert rewards[0] == rewards[1]
    assert state_of(tmp_path / "run")["step"] == 4
    # As many checkpoints stay as in the run directory.
    steps = {name.split("/")[4] for name in stored() if "/checkpoints/" in name}
    assert steps == {"step_000003", "step_000004"}


def test_a_flaky_store_costs_tries_and_no_run(world, run_file, tmp_path):
    failures = iter([True, True, False])

    def fail(name):
        if name == "manifest.json" and next(failures, False):
            raise OSError("the connection is gone")

    FlakyFileSystem.before_write = staticmethod(fail)
    tandem("train", run_file, "steps=1", UPLOAD)
    assert "bucket/runs/one/state.json" in stored()
    tandem("checkpoint", "verify", "flaky://bucket/runs/one")


def test_uploads_that_fail_are_counted(world, run_file, tmp_path):
    tried = []

    def fail(name):
        tried.append(name)
        raise OSError("the connection is gone")

    FlakyFileSystem.before_write = staticmethod(fail)
    # The second step ends after the first upload was given up.
    world.on_samples = lambda samples: (
        world.version == 0 or fakes.wait_until(lambda: len(tried) > len(mirrors.RETRY_SECONDS))
    )
    shown = tandem("train", run_file, "steps=3", "checkpoint.every=1", UPLOAD)
    assert "could not be uploaded: flaky://bucket/runs/one/" in shown.stdout
    assert lines(tmp_path / "run/metrics.jsonl")[-1]["checkpoint/upload_failures"] >= 1
    assert lines(tmp_path / "run/metrics.jsonl")[-1]["checkpoint/uploads"] == 0
    assert restore_run(tmp_path / "other", "flaky://bucket/runs/one") is None


def test_an_upload_that_is_required_ends_the_run(world, run_file, tmp_path):
    def fail(name):
        raise OSError("the connection is gone")

    FlakyFileSystem.before_write = staticmethod(fail)
    required = "checkpoint.upload_required=true"
    shown = tandem("train", run_file, "steps=1", UPLOAD, required, check=1)
    assert "checkpoint.upload: step 1: flaky://bucket/runs/one/" in shown.stderr
    assert state_of(tmp_path / "run")["step"] == 1


def test_the_copy_of_another_run_is_not_replaced(world, run_file, tmp_path):
    tandem("train", run_file, "steps=1", UPLOAD)
    before = dict(FlakyFileSystem.store)
    world.version = world.published = 0
    shown = tandem("train", run_file, f"run_dir={tmp_path / 'other'}", UPLOAD, check=2)
    assert "checkpoint.upload: flaky://bucket/runs/one holds the run run-" in shown.stderr
    assert FlakyFileSystem.store == before
    assert not (tmp_path / "other").exists()


def test_a_copy_that_broke_off_is_the_one_of_the_checkpoint_before(world, run_file, tmp_path):
    def fail(name):
        if world.version > 1 and name == "tandem_state.json":
            raise OSError("the connection is gone")

    FlakyFileSystem.before_write = staticmethod(fail)
    tandem("train", run_file, "steps=2", "checkpoint.every=1", UPLOAD)
    restore_run(tmp_path / "other", "flaky://bucket/runs/one")
    assert state_of(tmp_path / "other")["step"] == 1
    assert contents(tmp_path / "other/checkpoints/step_000001")


def test_a_new_run_starts_from_a_checkpoint_at_a_url(world, run_file, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    tandem("train", run_file, "steps=2", UPLOAD)
    world.saved = _AnyPath(world.saved)
    other = f"run_dir={tmp_path / 'other'}"
    tandem("train", run_file, other, "steps=1", "start_from=flaky://bucket/runs/one")
    assert world.loads[-1].endswith("/one/checkpoints/step_000002")
    assert world.loads[-1].startswith(str(tmp_path / "cache"))


class _AnyPath(dict):
    """Versions of checkpoints by the name of their directory, wherever it is."""

    def __missing__(self, path):
        return next(version for one, version in self.items() if one[-11:] == path[-11:])
