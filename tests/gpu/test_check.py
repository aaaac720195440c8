"""The checks for a machine with a GPU, up to the device's first call."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import make_models
import pytest
import runner
import tables
import torch
import transformers
import work
from harness import REPOSITORY
from runner import Part, Runner
from torch.utils.flop_counter import FlopCounterMode

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


@pytest.mark.parametrize("name", ["tiny", "0.5b", "1.5b"])
def test_work_counts_the_parameters_of_the_models(name):
    config = transformers.Qwen2Config(**make_models.SHAPES[name], tie_word_embeddings=True)
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config)
    assert work.parameters(config.to_dict()) == sum(p.numel() for p in model.parameters())


def test_work_counts_the_operations_of_prompts():
    config = transformers.Qwen2Config(
        **make_models.SHAPES["tiny"], tie_word_embeddings=True, attn_implementation="eager"
    )
    model = transformers.Qwen2ForCausalLM(config)
    sequences, tokens = 3, 20
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(torch.ones((sequences, tokens), dtype=torch.long), logits_to_keep=1)
    # Counted is attention to all tokens, of which a causal pass needs half.
    half = 2 * 4 * 16 * 4 * tokens * tokens * sequences / 2
    ours = work.prefill_operations(config.to_dict(), sequences, tokens)
    assert ours == counted.get_total_flops() - half


def test_the_tables_have_shares_of_the_devices_most(tmp_path):
    write_rows(
        tmp_path / "ceilings.jsonl",
        {"name": "copy", "rate": 1e12},
        {"name": "bfloat16", "rate": 1e14},
    )
    decode = {
        "shape": "0.5b", "dtype": "bfloat16", "n": 4, "ms_per_step": 2.0, "step_bytes": 1e9,
        "prefill_s": 0.5, "prefill_tok_s": 1000, "prefill_operations": 1e13,
    }  # fmt: skip
    write_rows(tmp_path / "decode.jsonl", decode | {"side": "solo"}, decode | {"side": "tandem"})
    write_rows(
        tmp_path / "train.jsonl",
        {"name": "operations", "of_token": 3e9},
        {"side": "tandem", "dtype": "bfloat16", "tok_s": 10000, "seconds": [1]},
    )
    write_rows(
        tmp_path / "loss.jsonl",
        {"side": "torch", "dtype": "bfloat16", "ms": 31.0, "extra_mb": 14200},
    )
    text = tables.tables(tmp_path)
    assert "| 0.5b | bfloat16 | solo | 50 % |" in text  # of the bandwidth
    assert "| 0.5b | bfloat16 | solo | 20 % |" in text  # of the products
    assert "| 0.5b | bfloat16 | tandem |  |" in text
    assert "| tandem | bfloat16 | 10000 | 30 % | [1] |" in text
    assert "| torch | bfloat16 | 31.0 |  | 14200 |" in text


def test_the_profile_says_what_a_decode_step_asks_of_the_gpu(tmp_path):
    write_rows(
        tmp_path / "profiled-64.jsonl",
        {"side": "solo", "dtype": "bfloat16", "start_s": 3.0},
        {"n": 64, "ms_per_step": 10.0, "decode_s": 2.0, "ended": 102.0},
    )
    names = ("launches", "graphs", "kernels", "syncs", "h2d", "d2h")
    write_rows(
        tmp_path / "decode-64.counts.17",
        # Before the steps, two counts of them, and after.
        *(
            {"t": t, "kernel_s": 0.75 * (t - 100), **dict.fromkeys(names, 3000 * (t - 100))}
            for t in (99.0, 100.5, 101.5, 103.0)
        ),
        {"kernel": "attention", "count": 3, "seconds": 0.1},
    )
    write_rows(tmp_path / "decode-64.counts.18", {"t": 101.0})  # of a process that ended
    text = tables.tables(tmp_path)
    assert f"| 64 |{' 30.0 |' * 6} 25 % |" in text


def write_rows(path: Path, *rows: dict) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


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
    done = check(
        tmp_path,
        *("facts", "ceilings", "models", "grpo step bfloat16", "ranks", "bits float32", "overlap"),
        PACK=pack,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "out/table.md").read_text()
    assert "| unpack | passed |" in table
    assert "| facts | passed |" in table and "tandem-rollout-server" in table
    assert "2 steps on cpu in bfloat16, version 2 with digest" in table
    assert "| ranks float32 | passed |" in table
    assert table.count("| 3 | True | [") == 1  # a row of the part `overlap`
    # The CPU's own kernels promise equal bits, which the part has to see.
    assert "| float32 | 0 | 1.0000 | 1.0000 | 1.0000 | 1.0000 | 0 |" in table
    assert {"facts.log", "grpo step bfloat16.log"} <= set(archived(tmp_path / "out"))


def test_what_cannot_begin_is_in_the_table_too(tmp_path):
    done = check(tmp_path, PACK=tmp_path / "no.tar.xz")
    assert done.returncode == 1
    table = (tmp_path / "out/table.md").read_text()
    assert "| check | FAILED |" in table and "no.tar.xz" in table
