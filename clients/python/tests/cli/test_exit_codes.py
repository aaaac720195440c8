"""Exit codes: 2 for what the user has to correct, and never for what may pass by itself."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import grpc
import pytest
from commands import lines, tandem
from fakes import wait_until

from tandem import errors
from tandem._proto.trainer.v1 import trainer_pb2
from tandem._proto.types.v1 import server_pb2
from tandem.cli.command_line import exit_code
from tandem.run_directory import lock
from tandem.run_directory.account import RunAccount, why_untrained
from tandem.run_directory.directory import RunDirectory
from tandem.settings import loading
from tandem.settings.run import RunSettings

WRITTEN = errors.ConfigError("x")
AWAY = errors.ServerStartError("x")
FULL = errors.StorageError("x")


def test_only_what_the_user_wrote_is_2(subtests):
    for error, code in [
        (WRITTEN, 2),
        (errors.RunDirectoryError("x"), 2),
        (errors.CredentialsError("x"), 2),
        (errors.RunDirectoryBusyError("x"), 1),
        (errors.RewardError("x"), 1),
        (errors.UnsavedUpdatesError("x"), 1),
        (FULL, 1),
        (AWAY, 3),
        (errors.UnavailableError("x", code=grpc.StatusCode.UNAVAILABLE), 3),
        (errors.ServerError("x", code=grpc.StatusCode.INTERNAL), 1),
        (errors.ProblemsError([AWAY, WRITTEN]), 2),
        (errors.ProblemsError([AWAY, FULL]), 1),
        (errors.ProblemsError([AWAY, AWAY]), 3),
    ]:
        with subtests.test(error=error, code=code):
            assert exit_code(error) == code


def test_a_failure_of_storage_is_told_from_a_wrong_path(subtests):
    for number, is_written in [
        ("ENOENT", True),
        ("ENOTDIR", True),
        ("EACCES", True),
        ("EROFS", True),
        ("ENAMETOOLONG", True),
        ("ENOSPC", False),
        ("EDQUOT", False),
        ("EIO", False),
        ("ESTALE", False),
        ("EMFILE", False),
        ("ENOMEM", False),
        ("ETIMEDOUT", False),
        ("ENOLCK", False),
    ]:
        with subtests.test(number=number, is_written=is_written):
            code = getattr(errno, number)
            error = errors.file_error("run_dir: x", OSError(code, os.strerror(code)))
            assert isinstance(error, errors.ConfigError) == is_written
            assert isinstance(error, errors.StorageError) != is_written
            assert str(error) == f"run_dir: x: {os.strerror(code)}"


def test_each_failure_of_a_lock_has_its_own_words(run_file, monkeypatch, subtests):
    for code, kind, says in [
        ("EOPNOTSUPP", errors.RunDirectoryError, "its file system has no locks"),
        ("ENOSYS", errors.RunDirectoryError, "its file system has no locks"),
        ("ENOLCK", errors.StorageError, "it cannot be locked now: No locks available"),
        ("EIO", errors.StorageError, "it cannot be locked now"),
        ("EWOULDBLOCK", errors.RunDirectoryBusyError, "is in use by another process"),
    ]:
        with subtests.test(code=code, kind=kind, says=says):
            number = getattr(errno, code)
            failing = mock.Mock(side_effect=OSError(number, os.strerror(number)))
            monkeypatch.setattr(fcntl, "flock", failing)
            config = loading.load(RunSettings, run_file)
            with pytest.raises(kind, match=says), RunDirectory.open(config, "train"):
                pass


def test_who_waits_for_a_lock_is_told_who_holds_it_and_goes_on_when_it_is_free(
    run_file, monkeypatch, notes
):
    monkeypatch.setattr(lock, "_RETRY_SECONDS", 0.01)
    config = loading.load(RunSettings, run_file)
    opened = []

    def wait():
        with RunDirectory.open(config, "train", resume="auto", wait_seconds=600) as run:
            opened.append(run.path)

    with RunDirectory.open(config, "train") as run:
        with pytest.raises(errors.RunDirectoryBusyError, match=rf"\(pid {os.getpid()} on .*\)$"):
            RunDirectory.open(config, "train")
        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: notes)
        assert f"in use by another process (pid {os.getpid()} on " in notes[0]
        run.begin()
        assert opened == []
    thread.join()
    assert opened == [run.path]


def test_a_successor_waits_until_its_predecessor_has_saved(world, run_file, tmp_path, monkeypatch):
    saving, go_on = threading.Event(), threading.Event()

    def hold(context):
        saving.set()
        assert go_on.wait(60)

    monkeypatch.setattr(world, "on_save", hold)
    command = [sys.executable, "-m", "tandem", "train", run_file, "--resume-auto"]
    command += ["--wait-for-lock", "600"]
    # The predecessor is stopped in the middle of a run, as by an upgrade.
    first = subprocess.Popen([*command, "steps=1000", "checkpoint.every=0"], stdout=subprocess.PIPE)
    try:
        wait_until(lambda: len(world.headers) > 1)
        first.send_signal(signal.SIGTERM)
        assert saving.wait(60)
        second = subprocess.Popen(
            [*command, f"steps={len(world.headers) + 1}"], stdout=subprocess.PIPE, text=True
        )
        told = second.stdout.readline()
        assert f"in use by another process (pid {first.pid} on " in told
        go_on.set()
        assert first.wait(60) == 130
        said, _ = second.communicate(timeout=60)
        assert second.returncode == 0, said
    finally:
        go_on.set()
        first.kill()
    steps = [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert [header.step for header in world.headers] == steps


def test_the_end_of_the_wait_for_a_lock_may_be_tried_again(run_file):
    config = loading.load(RunSettings, run_file)
    with RunDirectory.open(config, "train"):
        done = tandem("train", run_file, "--wait-for-lock", "0.1", check=1)
    assert re.search(r"in use by another process \(pid \d+ on .*\) after \d+ s", done.stderr)


def report(version=1, digest="b", **values):
    metrics = values.pop("metrics", {})
    weights = server_pb2.WeightsVersion(version=version, digest=digest)
    return trainer_pb2.StepReport(weights=weights, metrics=metrics, **values)


def test_a_step_that_changes_no_weight_is_known(subtests):
    for of, why in [
        (report(), None),
        (report(digest=""), None),
        (report(0, "a", skipped=True, skip_reason="NaN"), "NaN"),
        (report(0, "a"), "the trainer made no update"),
        (report(1, "a", metrics={"policy/learning_rate": 0}), "the learning rate was 0"),
        (report(1, "a", metrics={"policy/grad_norm": 0}), "the gradient was 0"),
        (report(1, "b", metrics={"policy/learning_rate": 0}), None),
    ]:
        with subtests.test(of=of, why=why):
            assert why_untrained(of, server_pb2.WeightsVersion(version=0, digest="a")) == why


def test_a_run_that_trains_nothing_says_so_and_exits_with_4(world, run_file, tmp_path):
    world.metrics_of = lambda header: {"policy/learning_rate": 0.0}
    done = tandem("train", run_file, "--json", check=4)
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["steps_done"], result["steps_trained"]) == (4, 0)
    assert "step 3 trained nothing: the learning rate was 0" in done.stderr
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step/trained"] for line in metrics] == [0] * 4


def test_lines_of_earlier_versions_count_as_trained():
    account = RunAccount()
    account.add({"step": 1, "reward/failed": None})
    account.add({"step": 2, "step/trained": 0, "reward/failed": 3})
    assert str(account) == "1 of 2 steps trained, responses without a reward: 3"


HANGING = """
import itertools, time
calls = itertools.count()
def reward(prompt, response, **row):
    if next(calls) >= 6:
        print("hangs", flush=True)
        time.sleep(3600)
    return 1.0
"""


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ([], signal.SIGTERM),
        (["reward.workers=1"], signal.SIGINT),
        (["reward.executor=process"], signal.SIGINT),
    ],
)
def test_one_ctrl_c_ends_a_run_whose_judge_hangs_and_saves_the_steps_before(
    run_file, tmp_path, settings, number
):
    text = HANGING
    if settings == ["reward.executor=process"]:
        # Each process counts for itself: the number of the step says when to hang.
        text = HANGING.replace("**row", "step, **row").replace("next(calls) >= 6", "step == 2")
    (tmp_path / "judge.py").write_text(text)
    command = [sys.executable, "-m", "tandem", "train", run_file, "checkpoint.every=0"]
    command += [f"reward.function={tmp_path}/judge.py:reward", *settings]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = []
        while not said or "hangs" not in said[-1]:
            said.append(run.stdout.readline())
            assert said[-1], said
        run.send_signal(number)
        rest, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130, rest
    assert "step 2 is given up: " in rest
    assert "stopped after step 1; --resume continues" in rest
    assert json.loads((tmp_path / "run" / "state.json").read_text())["step"] == 1


BAD_TEXTS = """
texts = ["\\ud83d", "\\u00e9", "\\udcff", "\\x00", "\\u7dda"]
def reward(prompt, response, **row):
    if len(response) % 2:
        raise ValueError("".join(texts))
    return len(response)
"""


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_no_text_ends_a_run_in_any_locale(run_file, tmp_path, locale, executor):
    (tmp_path / "judge.py").write_text(BAD_TEXTS)
    rows = [{"prompt": "w2 w3", "answer": "線 é", "é\u0000": ["\u2028"]}] * 3
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "tandem", "train", run_file, "steps=2"]
    command += [f"reward.function={tmp_path}/judge.py:reward", "reward.on_error=skip"]
    command += [f"reward.executor={executor}"]
    environment = os.environ | {
        "LC_ALL": locale,
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "",
    }
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"Traceback" not in done.stdout + done.stderr
    log = (tmp_path / "run" / "logs" / "attempt_1.log").read_text(encoding="utf-8")
    assert "ValueError: \\ud83dé\\udcff\x00線" in log
    tandem("view", tmp_path / "run", "--json")


def test_a_full_disk_below_the_output_costs_its_lines_alone(run_file, tmp_path):
    command = [sys.executable, "-m", "tandem", "train", run_file]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=full)
    assert done.returncode == 0
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    log = (tmp_path / "run" / "logs" / "attempt_1.log").read_text()
    assert "<stdout> cannot be written (No space left on device): the run continues" in log


def test_a_reader_that_goes_costs_the_output_alone(run_file, tmp_path):
    run = subprocess.Popen(
        [sys.executable, "-m", "tandem", "train", run_file],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    run.stdout.close()
    assert run.wait(60) == 0
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 4


def test_a_full_disk_below_the_log_costs_its_lines_alone(run_file, tmp_path, monkeypatch):
    write = os.write

    def full(file, data):
        if Path(f"/proc/self/fd/{file}").readlink().name == "attempt_1.log":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    done = tandem("train", run_file)
    log = tmp_path / "run" / "logs" / "attempt_1.log"
    said = f"warning: {log} cannot be written (No space left on device): the run continues"
    assert done.stdout.count(said) == 1
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 4
