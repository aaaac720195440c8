"""The work at the moment: what is told, and how a terminal and a log show it."""

import threading
import time

import fakes
import pytest
from commands import tandem
from screens import Screen

from tandem.evaluation import evaluate
from tandem.metrics import StepClock
from tandem.rpc.requests import Prompt
from tandem.run_directory.directory import RunDirectory
from tandem.session.opening import open_session
from tandem.settings import loading
from tandem.settings.run import RunSettings
from tandem.terminal.progress import progress_shown
from tandem.terminal.steps import StepDisplay
from tandem.training.loop import train
from tandem.utils.byte_progress import ByteCount
from tandem.utils.progress import Progress, ProgressLines


class Clock:
    """A clock that tests move."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_the_line_has_phase_counts_rate_and_time(clock):
    progress = Progress(clock)
    assert progress.line() == ""
    progress.begin("step 3")
    with progress.phase("generate"):
        assert progress.line() == "step 3: generate, 0s"
        progress.expect(64)
        clock.now += 10
        progress.advance(1, tokens=12_000)
        progress.advance(36)
        assert progress.line() == "step 3: generate 37/64, 1.2k tok/s, 10s"
        # Those of a prompt that is asked again come again.
        progress.advance(-7)
        clock.now += 3600
        assert progress.line() == "step 3: generate 30/64, 3.3 tok/s, 1h00m"
    assert progress.line() == ""


def test_work_beside_is_told_too(clock):
    progress, ahead = Progress(clock), Progress(clock)
    progress.beside = ahead
    ahead.begin("step 5")
    with ahead.phase("generate"):
        ahead.expect(64)
        assert progress.line() == "step 5: generate 0/64, 0s"
        progress.begin("step 4")
        with progress.phase("train"):
            assert progress.line() == "step 4: train, 0s; step 5: generate 0/64, 0s"


def test_an_inner_phase_is_shown_and_the_outer_one_goes_on(clock):
    progress = Progress(clock)
    with progress.phase("eval"):
        clock.now += 5
        with progress.phase("evaluate solo"):
            progress.expect(100)
            progress.advance(12)
            assert progress.line() == "evaluate solo 12/100, 0s"
        assert progress.line() == "evaluate, 5s"
    with pytest.raises(ValueError, match="gone"), progress.phase("checkpoint"):
        assert progress.line() == "save, 0s"
        raise ValueError("gone")
    assert progress.line() == ""


def test_bytes_have_units(clock):
    progress = Progress(clock)
    with progress.phase("import"):
        progress.bytes_done(0, 2_700_000_000)
        assert progress.line() == "import 0 B of 2.7 GB, 0s"
        clock.now += 4
        progress.bytes_done(1_000_000_000, 2_700_000_000)
        assert progress.line() == "import 1.0 GB of 2.7 GB, 250.0 MB/s, 4s"


def test_counted_bytes_are_told(clock):
    progress = Progress(clock)
    with progress.phase("import"):
        count = ByteCount(5_000_000_000, progress.bytes_done)
        clock.now += 2
        for _ in range(3):
            count.add(1_000_000_000)
        assert progress.line() == "import 3.0 GB of 5.0 GB, 1.5 GB/s, 2s"
    ByteCount(5, None).add(5)


def test_what_is_told_outside_of_a_phase_is_forgotten(clock):
    progress = Progress(clock)
    progress.expect(5)
    progress.advance(3)
    progress.bytes_done(1, 2)
    assert progress.line() == ""


def test_a_log_has_a_line_every_thirty_seconds_and_none_of_short_work(clock):
    said = []
    progress = Progress(clock)
    lines = ProgressLines(progress, said.append, 30.0, clock)
    with progress.phase("train"):
        for _ in range(100):
            clock.now += 1
            lines.tick()
    assert said == ["train, 30s", "train, 1m00s", "train, 1m30s"]
    said.clear()
    for _ in range(100):
        clock.now += 1
        lines.tick()
    assert said == []


def test_the_lines_come_by_themselves():
    said = threading.Event()
    progress = Progress()
    with ProgressLines(progress, lambda line: said.set(), seconds=0.001), progress.phase("train"):
        assert said.wait(60)


def test_a_terminal_shows_the_work_below_the_bar(clock):
    screen = Screen(80)
    progress = Progress(clock)
    with StepDisplay(screen.output, 1, 4, work=progress) as display:
        progress.begin("step 1")
        with StepClock(progress).phase("train"):
            assert display._bars is not None
            display._bars.refresh()
    assert any(line == "step 1: train, 0s" for line in screen.lines)
    # The last picture is that of the bar alone.
    assert "steps" in screen.lines[-1]


def test_a_command_without_steps_shows_its_work_too(clock):
    screen = Screen(80)
    progress = Progress(clock)
    with progress_shown(screen.output, progress), progress.phase("import"):
        progress.bytes_done(1000, 2000)
        fakes.wait_until(lambda: any("import 1.0 kB of 2.0 kB" in one for one in screen.lines))
    plain = Screen(80, terminal=False)
    with progress_shown(plain.output, progress), progress.phase("import"):
        pass
    assert plain.lines == []


@pytest.mark.parametrize("count", [1, 2])
def test_a_pool_tells_how_many_samples_came(address, world, count):
    progress = Progress()
    pool = fakes.pool(*[address] * count, progress=progress)
    prompts = [Prompt([i], num_samples=2, sampling={"max_tokens": 5}) for i in range(1, 6)]
    with progress.phase("generate"):
        pool.generate(prompts)
        assert progress.line().startswith("generate 10/10, ")
        assert " tok/s, " in progress.line()
        pool.score([([1, 2, 3], 1)] * 3, junior=True)
        assert progress.line().startswith("generate 3/3, ")
    pool.close()


def test_a_run_tells_each_phase_of_a_step(run_file, world):
    config = loading.load(
        RunSettings, run_file, ["steps=1", "eval={every: 1, modes: [solo, legibility]}"]
    )
    progress, seen = Progress(), []

    def look(*_):
        seen.append(progress.line().rpartition(",")[0].partition(",")[0])

    world.on_prompt = world.on_samples = world.on_save = look
    world.on_batch = look
    with (
        RunDirectory.open(config, "train") as run,
        open_session(config, progress=progress) as session,
    ):
        train(session, run, lambda line: None)
    phases = list(dict.fromkeys(one.split(" ")[-2:][0] if "/" in one else one for one in seen))
    assert "evaluate" in phases[0]
    assert "step 1: train" in seen
    assert "step 1: save" in seen
    assert any(one.startswith("step 1: generate 0/6") for one in seen)
    assert any(one.startswith("step 1: evaluate") for one in seen)


def test_a_long_step_is_counted_in_the_trainers_micro_batches(run_file, world, monkeypatch):
    monkeypatch.setattr("tandem.session.step_progress._SECONDS", 0.01)
    config = loading.load(RunSettings, run_file, ["steps=1"])
    progress, counts = Progress(), iter([(0, 0), (2, 8), (3, 8)])
    world.micro_batches = lambda: next(counts, (7, 8))

    def until_the_last(*_):
        while not progress.line().startswith("step 1: train 7/8, "):  # else the suite's time limit
            time.sleep(0.01)

    world.on_samples = until_the_last
    with (
        RunDirectory.open(config, "train") as run,
        open_session(config, progress=progress) as session,
    ):
        train(session, run, lambda line: None)


def test_judges_are_counted_as_they_end(run_file, tmp_path):
    # The last call ends when the progress shows that the others have.
    (tmp_path / "judge.py").write_text(
        "import itertools, threading\n"
        "go = threading.Event()\n"
        "numbers = itertools.count(1)\n"
        "def reward(prompt, response, **row):\n"
        "    if next(numbers) == 6:\n"
        "        assert go.wait(60)\n"
        "    return len(response) % 2\n"
    )
    config = loading.load(
        RunSettings, run_file, ["steps=1", f"reward.function={tmp_path}/judge.py:reward"]
    )
    progress, seen = Progress(), threading.Event()
    with (
        RunDirectory.open(config, "train") as run,
        open_session(config, progress=progress) as session,
    ):

        def let_go():
            fakes.wait_until(lambda: progress.line().startswith("step 1: reward 5/6"))
            seen.set()
            function = session.reward._functions[0]
            function._function.__globals__["go"].set()

        watching = threading.Thread(target=let_go)
        watching.start()
        train(session, run, lambda line: None)
        watching.join()
    assert seen.is_set()


def test_an_evaluation_counts_its_answers(run_file, world):
    config = loading.load(RunSettings, run_file, ["eval.modes=[handoff]"])
    progress, seen = Progress(), set()
    world.on_batch = lambda: seen.add(progress.line().split(",")[0])
    with open_session(config, purpose="eval", progress=progress) as session:
        evaluate(session)
    assert "evaluate handoff 0/20" in seen


def test_a_run_in_a_log_is_its_step_lines_alone_when_steps_are_short(run_file):
    shown = tandem("train", run_file, "steps=2").stdout
    assert "generate 0/" not in shown
