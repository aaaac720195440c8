"""Environments in processes: trouble costs its own episode, and the bits are those of threads."""

import datetime
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import fakes
import psutil
import pytest
from commands import contents, lines
from commands import records as records_of
from guess_game import (
    ENVIRONMENT,
    crash_in_the_second_step,
    guessing,
    resume,
    train,
    train_in_trouble,
)
from talking import let_write

from tandem.environments.calls import Call
from tandem.environments.contract import EnvironmentClass
from tandem.environments.live import LiveEnvironment, Said
from tandem.environments.processes import CallsInProcesses, Loads
from tandem.errors import ConfigError
from tandem.rewards.judges.cases import Failure, FailureKind
from tandem.settings.environment import EnvironmentSettings

PROCESS = "environment.executor=process"

# An environment whose calls end in several ways; none of them can be ended in a thread.
TROUBLES = '''
import asyncio, ctypes, os, sys, time
from tandem import EnvironmentFailedError

class Trouble:
    def reset(self, **row):
        self.row, self.count = row, 0
        return f"{row.get('text', '')}{os.getpid()}"

    def add(self, number: int) -> int:
        """Adds.

        Args:
            number: how much.
        """
        self.count += number
        return self.count

    async def later(self) -> str:
        """Waits."""
        await asyncio.sleep(0)
        return str(id(asyncio.get_running_loop()))

    def make(self, trouble: str) -> str:
        """Makes trouble.

        Args:
            trouble: which.
        """
        return getattr(self, "_" + trouble)()

    def _hangs(self):
        ctypes.PyDLL(None).sleep(3600)  # A PyDLL keeps the interpreter's lock.

    def _exits(self):
        os._exit(7)

    def _segfaults(self):
        print("about to read address 0")
        ctypes.string_at(0)

    def _eats(self):
        kept = []
        while True:
            kept.append(bytearray(1 << 26))

    def _says(self):
        return "x" * (1 << 27)

    def _fails(self):
        raise EnvironmentFailedError("y" * (1 << 24))

    def _prints(self):
        while True:
            print("z" * 4096)

    def _prints_little(self):
        print("one", "\\udcff")
        os.write(2, b"two\\n")
        return "said"

    def _forks(self):
        import subprocess
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        return str(self.child.pid)

    def _leaves(self):
        raise SystemExit(3)

    def get_reward(self):
        return 0.1 * self.count
'''


def live_calls(folder, text=TROUBLES, *, count=2, limit=30.0, memory=1 << 30, name="Trouble"):
    """Opened calls in processes, with the class of the text."""
    (folder / "env.py").write_text(text)
    loads = Loads((f"{folder}/env.py:{name}", folder, "environment.class"), memory)
    calls = CallsInProcesses("test", count, limit, loads)
    calls.open()
    return calls


class Player:
    """Calls one environment after another, and waits for each call."""

    def __init__(self, calls, folder):
        self.calls = calls
        settings = EnvironmentSettings.model_validate(
            {"class": f"{folder}/env.py:Trouble", "python_path": folder, "executor": "process"}
        )
        self.kind = EnvironmentClass.load(settings)

    def begin(self, **row):
        one = self.calls.environment(self.kind)
        return one, self.ask(one, lambda live: live.reset(row))

    def ask(self, one, run):
        return self.calls.start(Call(one, run, "rows:1")).result(60)

    def make(self, one, trouble):
        return self.ask(one, lambda live: live.tool("make", {"trouble": trouble}))


@pytest.fixture
def player(tmp_path):
    """A player with two processes, whose calls may take a second."""
    calls = live_calls(tmp_path, limit=1.0)
    yield Player(calls, tmp_path)
    calls.close()


def test_an_environment_keeps_its_process_and_gives_it_on(player):
    first, begun = player.begin(text="pid ")
    second, other = player.begin()
    assert begun.text.startswith("pid ")
    assert begun.text.removeprefix("pid ") != other.text
    for one in (first, second):
        assert player.ask(one, lambda live: live.tool("add", {"number": 2})).text == "2"
    assert player.ask(first, lambda live: live.tool("add", {"number": 3})).text == "5"
    assert player.ask(first, lambda live: live.reward()).reward == 0.1 * 5
    loops = {player.ask(first, lambda live: live.tool("later", {})).text for _ in range(2)}
    assert len(loops) == 1
    player.calls.close_environment(first, "rows:1")
    third, again = player.begin()
    # The process of an episode that has ended serves the next one, which has its own object.
    assert f"pid {again.text}" == begun.text
    assert player.ask(third, lambda live: live.tool("add", {"number": 1})).text == "1"


WAYS = {
    "hangs": (FailureKind.TIMEOUT, "no answer within 1 s"),
    "exits": (FailureKind.CRASH, "its process ended with code 7"),
    "segfaults": (FailureKind.CRASH, "its process was ended by SIGSEGV"),
    "eats": (FailureKind.FLOOD, "MemoryError"),
    "says": (FailureKind.FLOOD, "make() said 134,217,728 characters, at most 1,048,576"),
    "prints": (FailureKind.FLOOD, "a call printed more than 16,777,216 bytes"),
    "fails": (FailureKind.ERROR, "16,777,216 characters"),
}


@pytest.mark.parametrize("trouble", WAYS)
def test_trouble_costs_its_own_environment_and_the_process_is_replaced(tmp_path, trouble):
    calls = live_calls(tmp_path, limit=1.0 if trouble == "hangs" else 30.0)
    player = Player(calls, tmp_path)
    kind, what = WAYS[trouble]
    other, before = player.begin()
    for _ in range(3):
        one, begun = player.begin()
        failure = player.make(one, trouble)
        assert isinstance(failure, Failure)
        assert failure.kind == kind
        assert what in failure.what
        assert len(failure.what) + len(failure.trace) < 1 << 16
        if trouble == "segfaults":
            assert failure.trace == "it printed last:\nabout to read address 0"
        assert isinstance(player.ask(one, lambda live: live.close()), Said)
        calls.leave(one)
        if kind is not FailureKind.ERROR:
            fakes.wait_until(lambda pid=int(begun.text): not psutil.pid_exists(pid))
        assert player.ask(other, lambda live: live.tool("add", {"number": 1})).text
    assert int(before.text) in {one.pid for one in psutil.Process().children(recursive=True)}
    calls.close()


def test_a_tool_that_raises_is_told_to_the_model_as_in_a_thread(player):
    one, _ = player.begin()
    said = player.make(one, "leaves")
    assert (said.text, said.tool_failed) == ("Error: SystemExit: 3", True)
    bad = player.ask(one, lambda live: live.tool("add", {"number": "x"}))
    assert bad.text.startswith("Error: TypeError: unsupported operand")


def test_what_an_environment_says_is_what_it_says_in_a_thread(tmp_path):
    text = (
        TROUBLES
        + """
    def show(self, value: str) -> list:
        \"\"\"Shows.

        Args:
            value: what.
        \"\"\"
        from PIL import Image
        image = Image.new("RGB", (3, 5), (self.count, 7, 9))
        values = {
            "image": image,
            "parts": [{"type": "text", "text": "a"}, {"type": "image", "image": image}],
            "json": {"x": [1, None, 0.1], "y": self.row["when"]},
            "surrogate": "\\ud800 \\U0001f600",
            "nothing": None,
        }
        return values[value]
"""
    )
    calls = live_calls(tmp_path, text)
    player = Player(calls, tmp_path)
    thread = LiveEnvironment(player.kind.make)
    row = {"when": datetime.date(2026, 1, 2), "tags": ("a", b"b")}
    thread.reset(row)
    one, _ = player.begin(**row)
    for value in ("image", "parts", "json", "surrogate", "nothing", "no such value"):
        said = player.ask(one, lambda live, value=value: live.tool("show", {"value": value}))
        assert said.record() == thread.tool("show", {"value": value}).record() | {
            "seconds": said.seconds
        }
    calls.close()


def test_what_an_environment_prints_is_in_the_log(player, caplog):
    one, _ = player.begin()
    with caplog.at_level("INFO"):
        assert player.make(one, "prints_little").text == "said"
    fakes.wait_until(lambda: "two" in caplog.text)
    assert "environment: rows:1: 15 bytes printed\none \\udcff\ntwo" in caplog.text


def test_a_call_that_is_waited_for_ends_with_the_calls(tmp_path):
    calls = live_calls(tmp_path, limit=3600.0)
    player = Player(calls, tmp_path)
    one, begun = player.begin()
    hung = calls.start(Call(one, lambda live: live.tool("make", {"trouble": "hangs"}), "rows:1"))
    calls.close()
    assert hung.result(30).kind == FailureKind.CRASH
    fakes.wait_until(lambda: not psutil.pid_exists(int(begun.text)))


def test_more_episodes_than_processes_wait_and_processes_are_bounded(tmp_path):
    """Many short episodes have all one of three processes, though one in a hundred crashes."""
    calls = live_calls(tmp_path, count=3)
    player = Player(calls, tmp_path)
    count, pids, ended = 10_000, set(), threading.Semaphore(0)
    most = [0]

    def play(number):
        one = calls.environment(player.kind)

        def begun(done):
            pids.add(done.result().text)
            trouble = number % 100 == 0
            call = "exits" if trouble else "leaves"
            calls.start(
                Call(one, lambda live: live.tool("make", {"trouble": call}), "")
            ).add_done_callback(over)

        def over(done):
            assert isinstance(done.result(), Failure) == (number % 100 == 0)
            calls.leave(one)
            if number % 500 == 0:
                children = psutil.Process().children(recursive=True)
                most[0] = max(most[0], len(children))
            ended.release()

        calls.start(Call(one, lambda live: live.reset({}), "")).add_done_callback(begun)

    for number in range(count):
        play(number)
    for _ in range(count):
        assert ended.acquire(timeout=120)
    calls.close()
    assert len(pids) <= 3 + count // 100
    # The fork server, multiprocessing's tracker, the three, and those that are being replaced.
    assert most[0] <= 2 + 3 * 2


def test_a_class_that_a_process_cannot_load_is_refused_before_the_first_call(tmp_path):
    text = TROUBLES.replace("import asyncio,", "import os; os._exit(9)\nimport asyncio,")
    with pytest.raises(
        ConfigError, match="a process cannot load it: its process ended with code 9"
    ):
        live_calls(tmp_path, text)


def test_memory_is_bounded_per_process(tmp_path):
    text = TROUBLES.replace(
        "kept = []", "import resource; return str(resource.getrlimit(resource.RLIMIT_DATA))"
    )
    calls = live_calls(tmp_path, text, memory=123 << 20)
    player = Player(calls, tmp_path)
    one, _ = player.begin()
    assert player.make(one, "eats").text == f"({123 << 20}, {123 << 20})"
    calls.close()


# A program with environments in processes, one of which keeps the interpreter's lock.
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_processes as here

if __name__ == "__main__":
    folder = Path({folder!r})
    calls = here.live_calls(folder, limit=3600.0)
    player = here.Player(calls, folder)
    one, begun = player.begin()
    child = player.make(one, "forks").text
    calls.start(here.Call(one, lambda live: live.tool("make", {{"trouble": "hangs"}}), ""))
    print(begun.text, child, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_the_run_however_it_ends(tmp_path, how):
    tests = Path(__file__).parent
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(tests=str(tests), folder=str(tmp_path)))
    path = os.pathsep.join([str(tests.parent.parent), str(tests.parent), str(tests)])
    run = subprocess.Popen(
        [sys.executable, program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    pids = [int(one) for one in run.stdout.readline().split()]
    assert len(pids) == 2
    started = psutil.Process(run.pid).children(recursive=True)
    assert set(pids) <= {one.pid for one in started}
    run.send_signal(how)
    run.wait(30)
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive


def test_a_signal_to_all_of_a_run_leaves_its_environments_alone(player):
    one, begun = player.begin()
    for process in psutil.Process().children(recursive=True):
        # Multiprocessing's tracker of semaphores ignores it too.
        process.send_signal(signal.SIGTERM)
    assert player.ask(one, lambda live: live.tool("add", {"number": 1})).text == "1"
    player.make(one, "exits")
    player.calls.leave(one)
    assert player.begin()[1].text != begun.text


# Runs.

TROUBLED = (
    ENVIRONMENT.replace(
        "        self.tries += 1\n",
        """        self.tries += 1
        if self.trouble == "hangs":
            ctypes.PyDLL(None).sleep(3600)
        if self.trouble == "crashes":
            ctypes.string_at(0)
        if self.trouble == "exits":
            os._exit(1)
        if self.trouble == "floods":
            return "x" * (1 << 27)
        while self.trouble == "eats":
            self.kept.append(bytearray(1 << 26))
        while self.trouble == "prints":
            print("x" * 4096)
""",
    )
    .replace("import time", "import ctypes, os, time")
    .replace(
        "self.done = answer, 0, False",
        "self.done = answer, 0, False\n        self.trouble, self.kept = row.get('trouble'), []",
    )
)


def test_one_hung_one_crashing_one_flooding_environment_of_64_cost_their_own_episodes(
    world, codec, run_file, tmp_path
):
    (tmp_path / "env.py").write_text(TROUBLED)
    names = ("hangs", "crashes", "exits", "floods", "eats", "prints")
    troubles = {7 + 9 * index: name for index, name in enumerate(names)}
    limits = ["environment.timeout_seconds=5", "environment.memory_bytes=1073741824"]
    line = train_in_trouble(world, codec, run_file, troubles, PROCESS, *limits)
    assert {
        key: line[f"environment/{key}"]
        for key in ("failures", "timeouts", "crashes", "floods", "stop_time")
    } == {"failures": 6, "timeouts": 1, "crashes": 2, "floods": 3, "stop_time": 1}
    assert line["reward/failed"] == 6
    assert line["trained"] == 58
    log = (tmp_path / "run" / "logs" / "attempt_1.log").read_text()
    for message in (
        "no answer within 5 s (timeout_seconds)",
        "its process was ended by SIGSEGV",
        "its process ended with code 1",
        "guess() said 134,217,728 characters, at most 1,048,576",
        "MemoryError",
        "a call printed more than 16,777,216 bytes",
    ):
        assert message in log


def test_nothing_waits_for_a_hung_environment(world, codec, run_file, tmp_path):
    """All other episodes end while one keeps the interpreter's lock of its process."""
    text = TROUBLED.replace("ctypes.PyDLL(None).sleep(3600)", "self._hang()") + (
        f"""
    def _hang(self):
        while not os.path.exists({str(tmp_path / "go")!r}):
            ctypes.PyDLL(None).usleep(10000)
"""
    )
    (tmp_path / "env.py").write_text(text)
    rows = [{"prompt": str(i), "answer": 1, "trouble": "" if i else "hangs"} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    let_write(world, codec, guessing)
    episodes = tmp_path / "run" / "episodes" / "step_1.jsonl"
    others_done = threading.Event()

    def release():
        fakes.wait_until(lambda: episodes.exists() and episodes.read_text().count('"end"') == 4)
        others_done.set()
        (tmp_path / "go").write_text("")

    thread = threading.Thread(target=release)
    thread.start()
    train(run_file, "steps=1", PROCESS)
    thread.join()
    assert others_done.is_set()
    assert len(records_of(tmp_path / "run", 1)) == 6


@pytest.mark.parametrize("workers", [1, 6])
def test_a_run_has_the_bits_of_one_in_threads(world, codec, run_file, tmp_path, workers):
    let_write(world, codec, guessing)
    train(run_file, f"run_dir={tmp_path / 'threads'}")
    world.version = world.published = 0
    given = [PROCESS, f"environment.workers={workers}", f"run_dir={tmp_path / 'processes'}"]
    train(run_file, *given)
    for step in (1, 2):
        name = f"trajectories/step_{step}.parquet"
        threads, own = (tmp_path / run / name for run in ("threads", "processes"))
        assert own.read_bytes() == threads.read_bytes()


def test_a_step_that_is_drawn_again_gets_its_answers_from_the_record(
    world, codec, run_file, tmp_path
):
    # Nothing that it says is said twice, and a third guess takes the process down.
    random = ENVIRONMENT.replace("self.done", "self.found").replace(
        'return "right"', 'import os\n        return os.urandom(4).hex() + " right"'
    )
    crash = "        self.tries += 1\n        self.tries == 3 and __import__('os')._exit(1)\n"
    (tmp_path / "env.py").write_text(random.replace("        self.tries += 1\n", crash))
    let_write(world, codec, lambda *asked: "Bye." if "right" in asked[2] else guessing(*asked))
    run = crash_in_the_second_step(run_file, PROCESS)
    first, line = contents(run), lines(run / "metrics.jsonl")[-1]
    crashes = line["environment/crashes"]
    assert 0 < crashes < 6
    resume(run_file, PROCESS)
    again = contents(run)
    assert again["trajectories/step_2.parquet"] == first["trajectories/step_2.parquet"]
    assert sorted(again["episodes/step_2.jsonl"].splitlines()) == sorted(
        first["episodes/step_2.jsonl"].splitlines()
    )
    assert lines(run / "metrics.jsonl")[-1]["environment/crashes"] == crashes


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_no_episode_sees_what_another_did_to_its_row(world, codec, run_file, tmp_path, executor):
    text = ENVIRONMENT.replace('return " Begin."', "row['tags'].append(1)\n        return str(row)")
    (tmp_path / "env.py").write_text(text)
    rows = [{"prompt": str(i), "answer": 1, "tags": []} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    let_write(world, codec, guessing)
    train(run_file, "steps=1", f"environment.executor={executor}")
    prompts = [one["prompt_token_ids"] for one in records_of(tmp_path / "run", 1)]
    texts = ["".join(codec.token_texts(one)) for one in prompts]
    assert ["'tags': [1]" in one for one in texts] == [True] * 6


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["environment.memory_bytes=1"], "environment: memory_bytes: only applies with executor"),
        (
            ["environment={openenv: {url: 'http://127.0.0.1:1'}, executor: process}"],
            "environment: executor: only applies to a `class`",
        ),
        ([PROCESS, "environment.class=nowhere.py:Guess"], "environment.class: "),
    ],
)
def test_settings_that_do_not_fit_are_refused(world, codec, run_file, tmp_path, overrides, says):
    printed = train(run_file, *overrides, check=2)
    assert says in printed.stderr.replace(f"{tmp_path}/", "")
    assert not (tmp_path / "run").exists()


def test_a_class_that_only_a_process_cannot_load_ends_the_run_before_its_first_step(
    world, codec, run_file, tmp_path
):
    text = f"import os\nif os.getpid() != {os.getpid()}:\n    raise OSError('no display')\n"
    (tmp_path / "env.py").write_text(text + ENVIRONMENT)
    printed = train(run_file, PROCESS, check=2)
    assert "environment.class: a process cannot load it" in printed.stderr
    assert "no display" in printed.stderr
    assert not world.batches
