"""The checks for a machine with a GPU, up to the device's first call."""

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import runner
from harness import REPOSITORY
from runner import Part, Runner

PYTHON = sys.executable
BUILD = Path(os.environ.get("TANDEM_BUILD_DIR", REPOSITORY / "build/release"))
# Leaves a grandchild in a session of its own, as a server that pytest started; its id is in a file.
LEAVES = """
import pathlib, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
if sys.argv[2] == "stays":
    time.sleep(600)
"""


def script(name: str, code: str, *arguments: object, limit: float = 100) -> Part:
    return Part(name, limit, [PYTHON, "-c", code, *map(str, arguments)])


def archived(out: Path) -> dict[str, str]:
    with tarfile.open(out / "results.tar.gz") as tar:
        return {m.name: tar.extractfile(m).read().decode() for m in tar.getmembers()}


def is_running(process: Path) -> bool:
    stat = Path("/proc", process.read_text(), "stat")
    return stat.exists() and stat.read_text().split(") ")[1][0] != "Z"


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    """Nothing here needs time to end."""
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.5)


def test_every_part_has_a_row_and_a_log_whatever_becomes_of_it(tmp_path):
    one = Runner(tmp_path / "work", tmp_path / "out", 100)
    one.run(
        [
            script("good", "print('first'); print('42 of 42')"),
            script("bad", "import sys; print('wrong | number'); sys.exit(3)"),
            Part("absent", 10, ["/no/such/program"]),
        ]
    )
    outcomes = {result.name: result.outcome for result in one.results}
    assert outcomes == {
        "good": "passed",
        "bad": "FAILED (exit code 3)",
        "absent": "FAILED to start",
    }
    table = (tmp_path / "out/table.md").read_text()
    assert "| good | passed | 0 | 42 of 42 |" in table
    assert "| bad | FAILED (exit code 3) | 0 | wrong / number |" in table
    files = archived(tmp_path / "out")
    assert files["good.log"] == "first\n42 of 42\n"
    assert files["table.md"] == table


@pytest.mark.parametrize("fate", ["ends", "stays"])
def test_what_a_part_started_is_ended_with_it(tmp_path, monkeypatch, fate):
    process = tmp_path / "process"
    one = Runner(tmp_path / "work", tmp_path / "out", 10_000)
    # The clock jumps beyond the limit once the child of a part that stays is there.
    now = time.monotonic
    late = 1000 if fate == "stays" else 0
    monkeypatch.setattr(time, "monotonic", lambda: now() + (late if process.exists() else 0))
    one.run([script("leaves", LEAVES, process, fate)])
    assert process.exists()
    assert not is_running(process)
    [result] = one.results
    if fate == "stays":
        assert result.outcome == "STOPPED after 100 s"
    else:
        assert (result.outcome, result.finding) == ("passed", " (1 processes were left and ended)")


def test_processes_of_others_are_left_alone(tmp_path):
    with subprocess.Popen([PYTHON, "-c", "import time; time.sleep(600)"]) as other:
        one = Runner(tmp_path / "work", tmp_path / "out", 100)
        one.run([script("leaves", LEAVES, tmp_path / "process", "ends")])
        assert other.poll() is None
        other.send_signal(signal.SIGKILL)


def test_results_are_packed_after_each_part_and_none_starts_too_late(tmp_path):
    out = tmp_path / "out"
    one = Runner(tmp_path / "work", out, 100, lambda _: "\na table of rates\n")
    one.run([script("first", "print(1)")])
    assert set(archived(out)) == {"first.log", "table.md"}
    one.run([script("second", "print(2)")])
    assert set(archived(out)) == {"first.log", "second.log", "table.md"}
    one.end = 0  # the time is over
    one.run([script("third", "print(3)")])
    table = (out / "table.md").read_text()
    assert "| third | NOT RUN | 0 | no time was left |" in table
    assert table.endswith("\na table of rates\n")


def test_a_table_of_rates_that_fails_costs_nothing_else(tmp_path):
    def broken(_):
        raise KeyError("n")

    one = Runner(tmp_path / "work", tmp_path / "out", 100, broken)
    one.run([script("first", "print(1)")])
    table = (tmp_path / "out/table.md").read_text()
    assert "| first | passed |" in table and "no table of rates: KeyError('n')" in table


def test_long_logs_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "MAX_LOG_BYTES", 100)
    one = Runner(tmp_path / "work", tmp_path / "out", 100)
    one.run([script("long", "print('x' * 1000); print('the end')")])
    log = archived(tmp_path / "out")["long.log"]
    assert len(log) < 200 and log.endswith("the end\n")


def test_summaries_of_test_programs():
    assert runner.pytest_summary("....\n== 3 passed, 1 skipped in 4.2s ==\n") == (
        "3 passed, 1 skipped in 4.2s"
    )
    assert runner.pytest_summary("12 passed in 1.00s (0:00:01)\n") == "12 passed in 1.00s"
    log = "[  PASSED  ] 41 tests.\n[  SKIPPED ] 2 tests, listed below:\n[  SKIPPED ] A.b\n"
    assert runner.gtest_summary(log) == "41 passed, 2 skipped"
    assert runner.gtest_summary("no kernel image\n") == "no kernel image"


def check(tmp_path: Path, *parts: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """Runs check.sh as on the device, but for the device."""
    environment = os.environ | {
        "OUT": str(tmp_path / "out"),
        "DEV": "cpu",
        "PYTHON": PYTHON,
        **{name: str(value) for name, value in variables.items()},
    }
    command = [REPOSITORY / "tests/gpu/check.sh", *parts]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_pack_of_this_build_runs_a_step_on_the_cpu(tmp_path):
    pack = tmp_path / "pack.tar.xz"
    subprocess.run(
        [REPOSITORY / "tests/gpu/pack.sh", BUILD, pack, "--no-wheels"],
        env=os.environ | {"XZ_LEVEL": "-0"},
        check=True,
    )
    done = check(tmp_path, "facts", "models", "grpo step bfloat16", "bits float32", PACK=pack)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "out/table.md").read_text()
    assert "| unpack | passed |" in table
    assert "| facts | passed |" in table and "tandem-rollout-server" in table
    assert "2 steps on cpu in bfloat16, version 2 with digest" in table
    # The CPU's own kernels promise equal bits, which the part has to see.
    assert "| float32 | 0 | 1.0000 | 1.0000 | 1.0000 | 1.0000 | 0 |" in table
    assert {"facts.log", "grpo step bfloat16.log"} <= set(archived(tmp_path / "out"))


def test_what_cannot_begin_is_in_the_table_too(tmp_path):
    done = check(tmp_path, PACK=tmp_path / "no.tar.xz")
    assert done.returncode == 1
    table = (tmp_path / "out/table.md").read_text()
    assert "| check | FAILED |" in table and "no.tar.xz" in table
