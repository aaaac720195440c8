"""Asynchronous runs against fake servers: what is drawn when, saved, and refused."""

import json
import sys
import threading
from types import SimpleNamespace

import fakes
import pytest
from commands import lines, tandem
from commands import records as records_of
from test_run import without_clock

from tandem.errors import ConfigError
from tandem.rpc.seeds import prompt_seed
from tandem.settings import loading
from tandem.settings.run import RunSettings
from tandem.training.schedule import Schedule
from tandem.view.about import about


def versions(run, step):
    """The versions of the weights that wrote the tokens of a step."""
    return {one[0] for record in records_of(run, step) for one in record["senior_versions"]}


def begin_anew(world):
    world.version = world.published = 0
    world.unsaved = False


def without_async(metrics):
    """The lines without the clock's keys and those that only asynchronous runs have."""
    return [
        {key: value for key, value in line.items() if not key.startswith("staleness/")}
        for line in without_clock(metrics)
    ]


def assert_same_steps(whole, run, steps):
    """The runs have the same metrics, but for the clock's, and the same trajectories."""
    assert without_clock(lines(whole / "metrics.jsonl")) == without_clock(
        lines(run / "metrics.jsonl")
    )
    for step in range(1, steps + 1):
        name = f"trajectories/step_{step}.parquet"
        assert (whole / name).read_bytes() == (run / name).read_bytes()


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_every_step_is_drawn_with_the_weights_of_the_schedule(run_file, tmp_path, staleness):
    tandem("train", run_file, "steps=9", f"async.max_staleness={staleness}")
    run, schedule = tmp_path / "run", Schedule(staleness)
    for step, line in enumerate(lines(run / "metrics.jsonl"), start=1):
        assert versions(run, step) == {schedule.drawn_after(step)}
        assert (
            line["staleness/mean"]
            == line["staleness/max"]
            == (step - 1 - schedule.drawn_after(step))
        )


def test_the_trainer_is_told_the_bound_in_versions(world, run_file):
    tandem("train", run_file, "async.max_staleness=2", "objective.num_epochs=3")
    assert {header.policy.max_staleness for header in world.headers} == {6}
    begin_anew(world)
    world.headers.clear()
    tandem("train", run_file, "async.max_staleness=2", "objective.max_staleness=9", "--clean")
    assert {header.policy.max_staleness for header in world.headers} == {9}


def test_without_staleness_a_run_is_the_one_in_step(world, run_file, tmp_path):
    for name, overrides in (("a", []), ("b", ["async.max_staleness=0"])):
        begin_anew(world)
        tandem("train", run_file, f"run_dir={tmp_path / name}", *overrides)
    a, b = (lines(tmp_path / name / "metrics.jsonl") for name in "ab")
    assert without_clock(a) == without_clock(b)
    assert list(a[0]) == list(b[0])
    assert "rollouts" not in {one.name for one in (tmp_path / "b").iterdir()}


@pytest.mark.parametrize("staleness", [1, 3])
def test_generation_runs_ahead_of_the_training_and_never_further_than_the_bound(
    world, run_file, staleness
):
    """A step that trains waits until as much is drawn as is allowed; later it is still as much."""
    seeds, ahead = [], []
    drawn = threading.Condition()

    def on_prompt(prompt):
        with drawn:
            seeds.append(prompt.seed)
            drawn.notify_all()

    def on_samples(samples):
        # Steps that are begun, of three prompts each; the one that trains is one of them.
        step, schedule = len(ahead) + 1, Schedule(staleness)
        last = min(8, schedule.last_drawn_before(step))
        with drawn:
            assert drawn.wait_for(lambda: len(seeds) >= 3 * last, 30)
            drawn.wait_for(lambda: len(seeds) > 3 * last, 0.05)
            ahead.append(len(seeds) / 3 - step)

    world.on_prompt, world.on_samples = on_prompt, on_samples
    tandem("train", run_file, "steps=8", f"async.max_staleness={staleness}")
    assert len(set(seeds)) == 24
    assert max(ahead) == staleness
    assert min(ahead[: 8 - staleness]) >= 1


def test_rewards_come_while_the_step_before_trains(world, run_file, tmp_path, monkeypatch):
    """The judge of a step and the training of the step before it wait for each other."""
    meetings = [threading.Barrier(2, timeout=30) for _ in range(5)]
    judged, trained = set(), []
    first = threading.Lock()

    def reward(prompt, response, step, **row):
        with first:
            meets = step not in judged
            judged.add(step)
        if meets and step > 1:
            meetings[step - 2].wait()
        return float(len(response))

    def on_samples(samples):
        trained.append(len(samples))
        if len(trained) < 6:
            meetings[len(trained) - 1].wait()

    monkeypatch.setitem(sys.modules, "meeting", SimpleNamespace(reward=reward))
    (tmp_path / "judge.py").write_text("from meeting import reward\n")
    world.on_samples = on_samples
    judge = f"reward.function={tmp_path}/judge.py:reward"
    tandem("train", run_file, judge, "steps=6", "async.max_staleness=1")
    assert judged == {1, 2, 3, 4, 5, 6}
    assert len(trained) == 6


def test_several_weights_are_published_for_one_another_only_when_they_are_needed(world, run_file):
    tandem("train", run_file, "steps=7", "async.max_staleness=3", "checkpoint.every=2")
    # The start needs none. The checkpoint of step 4 waits for step 7, which version 3 draws.
    assert [version for version, _ in world.publications] == [3, 6]


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 6])
def test_a_resumed_run_draws_with_the_weights_of_an_uninterrupted_one(
    world, run_file, tmp_path, cut
):
    """The run is killed after a checkpoint, whatever it had drawn ahead by then."""
    options = ("async.max_staleness=3", "checkpoint.every=1", "checkpoint.keep=0", "steps=8")
    tandem("train", run_file, f"run_dir={tmp_path / 'whole'}", *options)
    begin_anew(world)
    parted = f"run_dir={tmp_path / 'parted'}"
    state = {}

    def on_save(context):
        # The contents of state.json when the run is killed in the save of a later step.
        if world.version == cut + 1:
            context.abort(fakes.grpc.StatusCode.DATA_LOSS, "killed")

    world.on_save = on_save
    tandem("train", run_file, parted, *options, check=1)
    world.on_save = lambda context: None
    state = json.loads((tmp_path / "parted" / "state.json").read_text())
    assert state["step"] == cut
    last = min(8, Schedule(3).last_drawn_before(cut))
    assert list(state["rollouts"]["files"]) == [str(one) for one in range(cut + 1, last + 1)]
    tandem("train", run_file, parted, *options, "--resume")
    assert_same_steps(tmp_path / "whole", tmp_path / "parted", 8)
    assert list((tmp_path / "parted" / "rollouts").iterdir()) == []


def test_a_checkpoint_whose_rollouts_are_damaged_is_refused(world, run_file, tmp_path):
    options = ("async.max_staleness=2", "checkpoint.every=1")
    world.on_samples = lambda samples: None if world.version < 2 else fail()

    def fail():
        raise ValueError("no more")

    tandem("train", run_file, "steps=6", *options, check=1)
    [file] = (tmp_path / "run" / "rollouts").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    world.on_samples = lambda samples: None
    done = tandem("train", run_file, "steps=6", *options, "--resume", check=2)
    assert f"{file}: has the digest" in done.stderr
    file.unlink()
    done = tandem("train", run_file, "steps=6", *options, "--resume", check=2)
    assert f"{file}: No such file" in done.stderr


def test_a_prolonged_run_begins_a_new_schedule(world, run_file, tmp_path):
    tandem("train", run_file, "steps=4", "async.max_staleness=3")
    tandem("train", run_file, "steps=9", "async.max_staleness=3", "--resume")
    schedule = Schedule(3, origin=4)
    for step in range(5, 10):
        assert versions(tmp_path / "run", step) == {schedule.drawn_after(step)}


def test_another_staleness_draws_the_steps_after_the_checkpoint_again(world, run_file, tmp_path):
    options = ("steps=8", "checkpoint.every=2")
    world.on_samples = lambda samples: None if world.version < 4 else fail()

    def fail():
        raise ValueError("no more")

    tandem("train", run_file, *options, "async.max_staleness=3", check=1)
    world.on_samples = lambda samples: None
    changed = ("--resume", "--change", "async", "--change", "objective")
    tandem("train", run_file, *options, "async.max_staleness=1", *changed)
    schedule = Schedule(1, origin=4)
    for step in range(5, 9):
        assert versions(tmp_path / "run", step) == {schedule.drawn_after(step)}


JUDGE = """
def reward(prompt, response, **row):
    if "w9" in prompt:
        raise ValueError("no more")
    return 1.0
"""


def lose_weights_at(world, step):
    """Lets the rollout server restart, once, when the first prompt of a step has come."""
    first = prompt_seed(0, step, 0)

    def on_prompt(prompt):
        if prompt.seed == first:
            world.on_prompt = lambda prompt: None
            world.published = 0

    world.on_prompt = on_prompt


def test_a_run_goes_on_when_the_weights_of_a_step_are_lost(world, run_file, tmp_path):
    options = ("steps=9", "async.max_staleness=2", "checkpoint.every=2")
    tandem("train", run_file, f"run_dir={tmp_path / 'whole'}", *options)
    begin_anew(world)
    lose_weights_at(world, 7)
    done = tandem("train", run_file, f"run_dir={tmp_path / 'run'}", *options)
    assert "which the trainer has left behind: going on from the checkpoint of step 4" in (
        done.stderr + done.stdout
    )
    assert_same_steps(tmp_path / "whole", tmp_path / "run", 9)


def test_a_run_ends_when_lost_weights_keep_it_where_it_is(world, run_file):
    def on_prompt(prompt):
        if prompt.seed == prompt_seed(0, 7, 0):
            world.published = 0

    world.on_prompt = on_prompt
    options = ("steps=9", "async.max_staleness=2", "checkpoint.every=2")
    done = tandem("train", run_file, *options, check=1)
    assert "--resume draws the steps after the last checkpoint again" in done.stderr
    assert done.stdout.count("going on from the checkpoint of step 4") == 1
    begin_anew(world)
    lose_weights_at(world, 5)
    done = tandem("train", run_file, *options, "checkpoint.every=0", "--clean", check=1)
    assert "there is no checkpoint yet" in done.stderr


def test_a_judge_that_fails_ends_the_run_at_the_step_of_its_response(world, run_file, tmp_path):
    """The steps before it are trained first, as in a run in step."""
    (tmp_path / "judge.py").write_text(JUDGE)
    judge = f"reward.function={tmp_path}/judge.py:reward"
    ends = []
    for staleness in (0, 2):
        begin_anew(world)
        path = tmp_path / str(staleness)
        done = tandem(
            "train",
            run_file,
            judge,
            f"run_dir={path}",
            f"async.max_staleness={staleness}",
            "batch.prompts_per_step=2",
            "steps=10",
            check=1,
        )
        assert "no more" in done.stderr
        ends.append([line["step"] for line in lines(path / "metrics.jsonl")])
    assert ends[0] == ends[1]


def test_steps_that_train_nothing_keep_the_schedule(world, run_file, tmp_path):
    """The weights of step 2 are those of step 1, which nobody has published yet."""
    judge = tmp_path / "judge.py"
    judge.write_text(
        "def reward(prompt, response, step, **row):\n"
        "    assert step not in (2, 5)\n"
        "    return 1.0\n"
    )
    options = (f"reward.function={judge}:reward", "reward.on_error=skip", "steps=9")
    tandem("train", run_file, *options, "async.max_staleness=2")
    lines_of_run = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step/trained"] for line in lines_of_run] == [1, 0, 1, 1, 0, 1, 1, 1, 1]
    after = [0, *(line["version/senior"] for line in lines_of_run)]
    for step in range(1, 10):
        assert versions(tmp_path / "run", step) == {after[Schedule(2).drawn_after(step)]}
    assert [version for version, _ in world.publications] == [1, 3, 4, 6]


def test_evaluations_are_those_of_the_weights_after_their_step(world, run_file, tmp_path):
    evaluated = []
    for staleness in (0, 3):
        begin_anew(world)
        path = tmp_path / str(staleness)
        tandem(
            "train",
            run_file,
            f"run_dir={path}",
            "steps=6",
            f"async.max_staleness={staleness}",
            "eval.every=2",
        )
        evaluated.append(
            [(line["step"], line["version/senior"]) for line in lines(path / "evals.jsonl")]
        )
    assert evaluated[0] == evaluated[1] == [(0, 0), (2, 2), (4, 4), (6, 6)]


def test_the_page_of_a_run_shows_its_staleness(run_file, tmp_path):
    tandem("train", run_file, "async.max_staleness=2", "steps=4")
    found = about(tmp_path / "run")
    assert dict(found.facts)["method"].endswith(", rollouts up to 2 steps old")
    assert found.curves["staleness/mean"] == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 1.0)]


def test_supervised_training_is_refused(run_file):
    done = tandem("sft", run_file, "async.max_staleness=1", check=2)
    assert "async.max_staleness: only applies to `tandem train`" in done.stderr


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["async.max_staleness=-1"], "async.max_staleness: must be at least 0"),
        (["async.max_stalenes=1"], "async.max_stalenes: unknown key; did you mean 'max_staleness'"),
        (["max_async_level=1"], "max_async_level is async.max_staleness here"),
        (["async.max_staleness=65"], "async.max_staleness: must be at most 64"),
        (
            ["async.max_staleness=3", "objective.max_staleness=2"],
            "objective.max_staleness: 2 versions, but async.max_staleness: 3 steps",
        ),
        (
            ["async.max_staleness=60", "objective.num_epochs=20"],
            "async.max_staleness: 60 steps of 20 updates are 1,200 versions",
        ),
    ],
)
def test_bounds_that_cannot_hold_are_named(run_file, overrides, says):
    with pytest.raises(ConfigError, match=says):
        loading.load(RunSettings, run_file, overrides)


def test_what_is_left_uncorrected_or_costs_time_is_noted(run_file, tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    done = tandem(
        "train",
        run_file,
        "--dry-run",
        "async.max_staleness=3",
        "objective.old_logprobs=recomputed",
        "checkpoint.every=10",
        f"reward.function={tmp_path}/judge.py:reward",
        "reward.workers=1",
    )
    assert "time limits by `signal` fail there" in done.stdout
    assert "the clip does not bound how far the update follows" in done.stdout
    assert "checkpoint.every: 10 is not a multiple of async.max_staleness (3)" in done.stdout
    several = ("objective.old_logprobs=recomputed", "objective.num_epochs=2")
    warned = tandem("train", run_file, "--dry-run", "async.max_staleness=5", *several).stdout
    assert "nothing corrects the update for tokens of older weights" in warned
    quiet = tandem("train", run_file, "--dry-run", "async.max_staleness=5").stdout
    assert "recomputed" not in quiet
    assert "no multiple" not in quiet
