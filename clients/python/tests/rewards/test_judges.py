"""Judges that hang, die, change what they are given or ask for more; no call harms another one."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fakes import wait_until

from tandem._proto.types.v1.trajectory_pb2 import Trajectory
from tandem.data.dataset import Example
from tandem.errors import ConfigError, RewardError
from tandem.rewards.judges import coroutines, watch, workers
from tandem.rewards.judges.responses import Response
from tandem.rewards.reward import Reward
from tandem.settings.run import RewardSettings
from tandem.utils.cpu_count import usable_cpus
from tandem.utils.interrupt import StopRequested

EXAMPLE = Example(
    {"prompt": "w1", "info": {"target": [1]}, "tags": ["a"]}, "w1", [1], "rows.jsonl:7"
)
WAYS = {
    "threads": ("def", {}),
    "one thread": ("def", {"workers": 1}),
    "processes": ("def", {"executor": "process", "workers": 2}),
    "coroutines": ("async def", {}),
}


@pytest.fixture
def opened(tmp_path):
    """A function that opens a reward, which the test's end closes."""
    rewards = []

    def make(text, name="judge.py", **settings):
        (tmp_path / name).write_text(text)
        settings = RewardSettings(function=f"{name}:reward", python_path=tmp_path, **settings)
        rewards.append(Reward(settings))
        return rewards[-1]

    yield make
    for reward in rewards:
        reward.close()


HANGS = """
import asyncio, time
{kind} reward(prompt, response, **row):
    if response == "hang":
        {hangs}
    return float(len(response))
"""
HANGING = {
    "sleeps": "time.sleep(3600)",
    "computes": "while True: pass",
    "swallows": "while True:\n            try: time.sleep(999)\n            except Exception: pass",
}


@pytest.mark.parametrize("hangs", HANGING)
@pytest.mark.parametrize("way", WAYS)
def test_a_call_beyond_its_limit_fails_alone(opened, way, hangs, monkeypatch):
    monkeypatch.setattr(coroutines, "CLOSE_SECONDS", 0.2)
    kind, settings = WAYS[way]
    text = HANGS.format(kind=kind, hangs=HANGING[hangs])
    reward = opened(text, on_error="skip", timeout_seconds=0.5, **settings)
    for _ in range(2):  # What replaces the lost worker works in the next step, too.
        judged = reward([EXAMPLE, EXAMPLE], [["a", "hang"], ["bb", "ccc"]])
        assert judged.rewards == [[1.0, None], [2.0, 3.0]]
        assert judged.timed_out == 1
        [failure] = judged.failures
        assert "no answer within 0.5 s (timeout_seconds)\n  row: rows.jsonl:7" in failure


def test_a_coroutine_that_waits_is_cancelled_at_its_limit(opened):
    text = (
        "import asyncio\nended = []\n"
        "async def reward(prompt, response, **row):\n"
        "    if response == 'hang':\n"
        "        try:\n            await asyncio.sleep(3600)\n"
        "        finally:\n            ended.append(1)\n"
        "    return len(ended)\n"
    )
    reward = opened(text, on_error="skip", timeout_seconds=0.3)
    assert reward([EXAMPLE], [["hang"]]).rewards == [[None]]
    assert reward([EXAMPLE], [["x"]]).rewards == [[1.0]]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_batch_beyond_its_limit_fails(opened, kind):
    text = f"import time, asyncio\n{kind} reward(prompts, responses, rows):\n    "
    text += "await asyncio.sleep(3600)\n" if kind == "async def" else "time.sleep(3600)\n"
    reward = opened(text, on_error="skip", batch=True, timeout_seconds=0.3)
    judged = reward([EXAMPLE], [["a", "b"]])
    assert (judged.rewards, judged.timed_out) == ([[None, None]], 2)


def test_a_call_that_hangs_with_the_default_ends_the_run(opened):
    reward = opened(HANGS.format(kind="def", hangs="time.sleep(3600)"), timeout_seconds=0.3)
    with pytest.raises(RewardError, match=r"no answer within 0\.3 s") as caught:
        reward([EXAMPLE], [["a", "hang"]])
    assert "on_error: skip" in caught.value.hint


def test_threads_that_never_return_are_bounded(opened, monkeypatch):
    monkeypatch.setattr(workers, "MOST_ABANDONED", 3)
    reward = opened(
        HANGS.format(kind="def", hangs="time.sleep(3600)"),
        on_error="skip",
        timeout_seconds=0.2,
        workers=2,
    )
    judged = reward([EXAMPLE], [["hang"] * 9])
    assert judged.rewards == [[None] * 9]
    assert 3 <= judged.timed_out <= 5
    assert "earlier calls never returned" in judged.failures[-1]


@pytest.mark.parametrize("way", WAYS)
def test_a_long_call_is_told_with_its_row(opened, way, monkeypatch, notes):
    monkeypatch.setattr(watch, "NOTE_SECONDS", 0.1)
    kind, settings = WAYS[way]
    waits = "await asyncio.sleep" if kind == "async def" else "time.sleep"
    reward = opened(HANGS.format(kind=kind, hangs=f"{waits}(0.6)"), **settings)
    assert reward([EXAMPLE], [["hang"]]).rewards == [[4.0]]
    told = "reward.function: judge.py:reward has run for "
    assert notes[0].startswith(told)
    assert "for rows.jsonl:7; it is given up after 600 s (timeout_seconds)" in notes[0]


DEATHS = {
    "segfault": "import ctypes; ctypes.string_at(0)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "exit": "os._exit(7)",
    "forked child first": "os.fork() or time.sleep(3600); os._exit(7)",
}
SAYS = {"segfault": "SIGSEGV", "killed": "SIGKILL: is the machine out of memory?"}


@pytest.mark.parametrize("death", DEATHS)
def test_a_process_that_dies_fails_its_call_alone(opened, death):
    text = (
        "import os, signal, time\n"
        "def reward(prompt, response, **row):\n"
        f"    if response == 'die':\n        {DEATHS[death]}\n"
        "    return len(response)\n"
    )
    reward = opened(text, executor="process", workers=2, on_error="skip")
    for _ in range(2):
        judged = reward([EXAMPLE], [["a", "die", "bb", "ccc"]])
        assert judged.rewards == [[1.0, None, 2.0, 3.0]]
        assert SAYS.get(death, "its process ended with code 7") in judged.failures[0]


def test_a_process_that_takes_too_much_memory_fails_its_call_alone(opened):
    text = (
        "import resource\n"
        "def reward(prompt, response, **row):\n"
        "    if response == 'eat':\n"
        "        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "        return len(bytes(1 << 40))\n"
        "    return 1\n"
    )
    reward = opened(text, executor="process", workers=1, on_error="skip")
    judged = reward([EXAMPLE], [["x", "eat", "x"]])
    assert judged.rewards == [[1.0, None, 1.0]]
    assert "MemoryError" in judged.failures[0]


def test_what_a_killed_call_started_ends_with_it(opened, tmp_path):
    text = (
        "import subprocess, sys, time\nfrom pathlib import Path\n"
        "def reward(prompt, response, **row):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        f"    Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        "    child.wait()\n"
    )
    reward = opened(text, executor="process", workers=1, on_error="skip", timeout_seconds=3)
    assert reward([EXAMPLE], [["x"]]).timed_out == 1
    child = (tmp_path / "child").read_text()
    wait_until(lambda: not alive(child))


# A program whose judge keeps the interpreter's lock of its process.
HANGING_PROGRAM = """
import sys
from pathlib import Path
from tandem.data.dataset import Example
from tandem.rewards.reward import Reward
from tandem.settings.run import RewardSettings

if __name__ == "__main__":
    settings = RewardSettings(
        function="judge.py:reward", python_path=Path(sys.argv[1]), executor="process"
    )
    Reward(settings)([Example({"prompt": "w1"}, "w1", [1], "rows.jsonl:1")], [["x"]])
"""


def test_a_judge_that_hangs_in_c_ends_with_its_run(tmp_path):
    judge, written = tmp_path / "judge.py", tmp_path / "pid"
    judge.write_text(
        "import ctypes, os\nfrom pathlib import Path\n"
        "def reward(prompt, response, **row):\n"
        f"    Path({str(written)!r}).write_text(str(os.getpid()))\n"
        "    ctypes.PyDLL(None).sleep(3600)\n"  # A PyDLL keeps the lock.
    )
    program = tmp_path / "program.py"
    program.write_text(HANGING_PROGRAM)
    path = os.pathsep.join(sys.path)
    command = [sys.executable, program, tmp_path]
    run = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})
    wait_until(lambda: written.exists() and written.read_text() and alive(written.read_text()))
    run.kill()
    run.wait()
    wait_until(lambda: not alive(written.read_text()))


def alive(pid):
    """Whether a process runs; one that waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


CHANGES = """
{kind} reward(prompt, response, info, tags, **row):
    size = len(info) + len(info["target"]) + len(tags)
    info.pop("target")
    info["seen"] = response
    tags.append(response)
    row.clear()
    return float(size)
"""
CHANGES_BATCH = """
{kind} reward(prompts, responses, rows):
    sizes = [float(len(r["info"]) + len(r["info"]["target"]) + len(r["tags"])) for r in rows]
    for row in rows[:1]:
        row["info"].clear(), row["tags"].clear(), row.clear()
    prompts.clear(), responses.clear(), rows.clear()
    return sizes
"""


def written(way, text, batch_text):
    """Returns a judge's source for one way to call it, and its settings."""
    if way in WAYS:
        kind, settings = WAYS[way]
        return text.format(kind=kind), settings
    return batch_text.format(kind="def" if way == "batch" else "async def"), {"batch": True}


@pytest.mark.parametrize("way", [*WAYS, "batch", "awaited batch"])
def test_no_call_sees_what_another_did_to_its_row(opened, way):
    text, settings = written(way, CHANGES, CHANGES_BATCH)
    example = Example(
        {"prompt": "w1", "info": {"target": [1]}, "tags": ["a"]}, "w1", [1], "rows.jsonl:7"
    )
    reward = opened(text, **settings)
    for _ in range(2):
        assert reward([example], [["x", "y", "z"]]).rewards == [[3.0, 3.0, 3.0]]
    assert example.row == EXAMPLE.row


BAD_TEXTS = ["\ud83d", "é", "\x00", "\udcff", "線", "\u2028"]


@pytest.mark.parametrize("way", WAYS)
def test_any_text_of_an_error_is_a_message(opened, way):
    kind, settings = WAYS[way]
    text = f"{kind} reward(prompt, response, **row):\n    raise ValueError(row['info'])\n"
    reward = opened(text, on_error="skip", **settings)
    examples = [Example({"prompt": "w1", "info": one}, "w1", [1], one) for one in BAD_TEXTS]
    judged = reward(examples, [["\ud83d"]] * len(examples))
    assert judged.rewards == [[None]] * len(examples)
    for failure, bad in zip(judged.failures, BAD_TEXTS, strict=True):
        assert f"ValueError: {bad}\n" in failure


@pytest.fixture
def recursion_limit():
    """Restores the limit, which a judge in a thread may change for the whole process."""
    limit = sys.getrecursionlimit()
    yield limit
    sys.setrecursionlimit(limit)


@pytest.mark.parametrize(
    "raised",
    [
        "raise Odd()",
        "return Unshown()",
        "raise GeneratorExit",
        "sys.setrecursionlimit(100); return reward(prompt, response, **row)",
    ],
)
@pytest.mark.parametrize("way", ["threads", "processes"])
def test_whatever_a_function_raises_is_its_calls_failure(opened, way, raised, recursion_limit):
    text = (
        "import sys\n"
        "class Odd(BaseException):\n"
        "    def __str__(self):\n        raise RuntimeError('no text')\n"
        "class Unshown:\n"
        "    def __repr__(self):\n        raise RuntimeError('no text')\n"
        f"def reward(prompt, response, **row):\n    if response == 'x':\n        {raised}\n"
        "    return 1\n"
    )
    reward = opened(text, on_error="skip", **WAYS[way][1])
    assert reward([EXAMPLE], [["y", "x", "y"]]).rewards == [[1.0, None, 1.0]]


def test_a_request_to_stop_gives_a_hanging_call_up(opened, monkeypatch):
    monkeypatch.setattr(watch, "STOP_SECONDS", 0.2)
    monkeypatch.setattr("tandem.rewards.reward.STOP_SECONDS", 0.2)
    for way in WAYS:
        kind, settings = WAYS[way]
        waits = "await asyncio.sleep(3600)" if kind == "async def" else "time.sleep(3600)"
        reward = opened(HANGS.format(kind=kind, hangs=waits), on_error="skip", **settings)
        asked = threading.Event()
        reward.stopping = asked.is_set
        threading.Timer(0.3, asked.set).start()
        with pytest.raises(StopRequested):
            reward([EXAMPLE], [["a", "hang"]])
        reward.close()


DETAILED = """
{kind} reward(prompt, response, *, response_token_ids, authorship_mask, finish_reason, step,
           prompt_token_ids, **row):
    assert "step" not in row
    assert (prompt_token_ids, finish_reason) == ([1, 2], "stop")
    return float(sum(response_token_ids) * 100 + sum(authorship_mask) * 10 + step)
"""
DETAILED_BATCH = """
{kind} reward(prompts, responses, rows, *, response_token_ids, authorship_mask, finish_reason,
           step):
    return [float(sum(ids) * 100 + sum(mask) * 10 + step + len(finish_reason) - len(rows))
            for ids, mask in zip(response_token_ids, authorship_mask)]
"""


@pytest.mark.parametrize("way", [*WAYS, "batch", "awaited batch"])
def test_a_function_gets_the_details_that_it_declares(opened, way):
    text, settings = written(way, DETAILED, DETAILED_BATCH)
    reward = opened(text, **settings)
    reward.check([EXAMPLE])
    trajectories = [
        Trajectory(
            prompt_token_ids=[1, 2],
            response_token_ids=ids,
            authorship_mask=bytes(mask),
            finish_reason=1,
        )
        for ids, mask in (([3, 4], [1, 0]), ([5], [1]))
    ]
    group = [Response("text", one, 6) for one in trajectories]
    assert reward([EXAMPLE], [group]).rewards == [[716.0, 516.0]]


def test_rows_reach_a_function_that_asks_for_no_details_as_they_are(opened):
    example = Example({"prompt": "w1", "step": 4}, "w1", [1], "rows.jsonl:7")
    reward = opened("def reward(prompt, response, **row):\n    return row['step']\n")
    reward.check([example])
    response = Response("text", Trajectory(response_token_ids=[3]), 6)
    assert reward([example], [[response]]).rewards == [[4.0]]


def test_a_column_with_the_name_of_a_detail_is_refused(opened):
    example = Example({"prompt": "w1", "step": 4}, "w1", [1], "rows.jsonl:7")
    reward = opened("def reward(prompt, response, *, step, **row):\n    return step\n")
    with pytest.raises(ConfigError, match=r"parameter 'step', which the run fills, and rows") as e:
        reward.check([example])
    assert "data.columns" in e.value.hint


@pytest.mark.parametrize(
    "parameters",
    [
        "prompts, completions, **kwargs",
        "completions, **kwargs",
        "completions, ground_truth, **kwargs",
        "data_source, solution_str, ground_truth, extra_info=None",
    ],
)
def test_the_signatures_of_other_trainers_are_answered_with_ours(opened, parameters):
    reward = opened(f"def reward({parameters}):\n    return [1.0]\n")
    with pytest.raises(ConfigError, match=r"cannot be called for rows\.jsonl:7") as caught:
        reward.check([EXAMPLE])
    assert "def reward(prompt, response, answer, **row) -> float" in caught.value.hint
    assert "def rewards(prompts, responses, rows) -> list[float]" in caught.value.hint


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"0": "0::/\n", "cpu.max": "50000 100000\n"}, 1),
        ({"0": "0::/a/b\n", "a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 2),
        ({"0": "0::/not/here\n", "cpu.max": "100000 100000\n"}, 1),
        ({"0": "0::/\n", "cpu.max": "max 100000\n"}, None),
        (
            {
                "0": "4:cpu,cpuacct:/a\n3:memory:/b\n",
                "cpu,cpuacct/a/cpu.cfs_quota_us": "100000\n",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        ({"0": "4:cpu:/a\n", "cpu/a/cpu.cfs_quota_us": "-1\n"}, None),
        ({"0": "damaged\n"}, None),
        ({}, None),
    ],
)
def test_the_cpus_are_those_that_the_control_groups_give(tmp_path, files, cpus):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    cores = len(os.sched_getaffinity(0))
    assert usable_cpus(tmp_path / "0", tmp_path) == min(cores, cpus or cores)


def test_a_time_limit_of_the_functions_own_works_in_the_main_thread(opened):
    text = (
        "import signal, time\n"
        "def stop(*_):\n    raise TimeoutError\n"
        "def reward(prompt, response, **row):\n"
        "    signal.signal(signal.SIGALRM, stop)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.1)\n"
        "    try:\n        time.sleep(3600)\n"
        "    except TimeoutError:\n        return 0.5\n"
    )
    before = signal.getsignal(signal.SIGALRM)
    try:
        assert opened(text, workers=1)([EXAMPLE], [["x"]]).rewards == [[0.5]]
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("settings", [{"batch": True}, {"workers": 1}])
def test_limits_hold_in_another_thread_than_the_main_one(opened, settings):
    """An asynchronous run judges in the thread that draws ahead."""
    text = (
        "import time\n"
        "def reward(prompt, response, *rows, **row):\n"
        "    while 'hang' in response:\n        time.sleep(0.01)\n"
        "    return [1.0] * len(response) if rows else 1.0\n"
    )
    reward = opened(text, on_error="skip", timeout_seconds=0.3, **settings)
    judged = []

    def judge():
        judged.append(reward([EXAMPLE], [["hang", "x"]]))
        judged.append(reward([EXAMPLE], [["x", "y"]]))

    thread = threading.Thread(target=judge)
    thread.start()
    thread.join(30)
    first, second = judged
    # A batch is one call.
    assert first.rewards == [[None, None if "batch" in settings else 1.0]]
    assert first.timed_out == (2 if "batch" in settings else 1)
    assert second.rewards == [[1.0, 1.0]]


@pytest.mark.parametrize("settings", [{"batch": True}, {"workers": 1}])
def test_calls_that_wait_for_all_responses_come_in_the_order_of_the_data(opened, settings):
    text = (
        "import itertools\ncount = itertools.count()\n"
        "def reward(prompt, response, *rows, **row):\n"
        "    return range(len(response)) if rows else next(count)\n"
    )
    judging = opened(text, **settings).judging()
    for index in (2, 0, 1):
        judging.add(index, EXAMPLE, ["a", "b"])
    assert judging.result().rewards == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
