"""The start of runs and evaluations on servers that may hold other weights."""

import json
from pathlib import Path

import grpc
import pytest

from tandem._proto.config.v1 import optimizer_info_pb2, server_config_pb2
from tandem.errors import (
    ConfigError,
    FailedPreconditionError,
    RunDirectoryError,
    TandemError,
    UnsavedUpdatesError,
)
from tandem.run_directory.directory import RunDirectory
from tandem.session.opening import open_session
from tandem.settings import loading
from tandem.settings.run import RunSettings
from tandem.training import loop as train_module
from tandem.training.loop import train
from tandem.training.start import serve_checkpoint, start_run


@pytest.fixture
def load(run_file):
    def load(*overrides):
        return loading.load(RunSettings, run_file, ["steps=2", *overrides])

    return load


def run_training(config, *, resume=False, on_step=lambda line: None, **options):
    with (
        RunDirectory.open(config, "train", resume=resume) as run,
        open_session(config) as session,
    ):
        train(session, run, on_step, **options)
    return run


def recorded(run):
    return json.loads((run.path / "run.json").read_text())["start"]


def test_every_run_begins_with_the_base_model_and_says_so(world, load, tmp_path, notes):
    run_training(load())
    assert world.version == 2
    world.headers.clear()
    second = run_training(load(f"run_dir={tmp_path / 'second'}"))
    assert [header.expected_version for header in world.headers] == [0, 1]
    assert any(note.startswith("starting from the base model") for note in notes)
    assert recorded(second)["version"] == 0
    assert recorded(second)["from"].startswith("the base model")


def test_only_a_start_may_roll_rollout_servers_back(world, load, tmp_path):
    run_training(load())
    world.publications.clear()
    run_training(load(f"run_dir={tmp_path / 'second'}"))
    assert world.publications == [(0, True), (1, False), (2, False)]


def test_updates_that_no_checkpoint_has_are_not_thrown_away_unasked(world, load, tmp_path):
    world.version = world.published = 3
    world.unsaved = True
    with pytest.raises(UnsavedUpdatesError, match=r"the trainer at .* \(version 3\)") as caught:
        run_training(load())
    assert "start_from=served" in caught.value.hint
    assert "--discard-unsaved" in caught.value.hint
    assert (world.version, world.loads, world.publications) == (3, [], [])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "options"), [("start_from=base", {}), ("seed=0", {"discard_unsaved": True})]
)
def test_unsaved_updates_are_thrown_away_when_asked(world, load, override, options):
    world.version = world.published = 3
    world.unsaved = True
    run_training(load(override), **options)
    assert [header.expected_version for header in world.headers] == [0, 1]


def test_a_run_goes_on_from_what_the_servers_hold(world, load):
    world.version, world.published = 3, 5
    world.unsaved = True
    run = run_training(load("start_from=served"))
    assert world.loads == []
    assert [header.expected_version for header in world.headers] == [3, 4]
    assert world.publications[0] == (3, True)
    assert recorded(run) == {"from": "what the servers hold", "version": 3, "digest": "d"}


def test_a_run_starts_from_a_checkpoint_and_from_another_run(world, load, tmp_path):
    first = run_training(load("checkpoint.every=1"))
    for number, (path, version) in enumerate(
        [(first.path / "checkpoints/step_000001", 1), (first.path, 2)]
    ):
        run = run_training(load(f"run_dir={tmp_path / str(number)}", f"start_from={path}"))
        assert recorded(run)["version"] == version
        assert world.loads[-1] == str(first.path / f"checkpoints/step_00000{version}")
        assert world.headers[-2].expected_version == version
        # The new run has a learning-rate schedule and moments of its own.
        assert world.fresh_loads[-1] == world.loads[-1]


def test_a_run_may_keep_the_optimizer_of_its_start(world, load, tmp_path):
    first = run_training(load())
    run_training(
        load(f"run_dir={tmp_path / 'second'}", f"start_from={first.path}", "start_optimizer=keep")
    )
    assert world.loads[-1] == str(first.path / "checkpoints/step_000002")
    assert world.fresh_loads == []


def optimizer(*, updates, total, floor=0.0, schedule="linear"):
    info = optimizer_info_pb2.OptimizerInfo(updates=updates)
    info.options.schedule = getattr(server_config_pb2, f"LEARNING_RATE_SCHEDULE_{schedule.upper()}")
    info.options.total_steps, info.options.min_learning_rate = total, floor
    return info


@pytest.mark.parametrize(
    ("info", "refused"),
    [
        (optimizer(updates=0, total=1), True),
        (optimizer(updates=0, total=2), False),
        (optimizer(updates=5, total=6), True),
        (optimizer(updates=5, total=7, schedule="cosine"), False),
        (optimizer(updates=9, total=6, schedule="cosine"), True),
        (optimizer(updates=9, total=6, floor=1e-7), False),
        (optimizer(updates=9, total=0, schedule="constant"), False),
    ],
)
def test_a_running_trainer_whose_schedule_ends_before_the_run_is_refused(
    world, load, tmp_path, info, refused
):
    world.optimizer = info
    if not refused:
        run_training(load())
        return
    with pytest.raises(ConfigError, match=r"optimizer: total_steps: the schedule ends after"):
        run_training(load())
    assert world.version == 0
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_resumed_run_counts_the_steps_that_are_left(world, load):
    run_training(load())
    world.optimizer = optimizer(updates=2, total=3)
    run_training(load("steps=3"), resume=True)
    world.optimizer = optimizer(updates=3, total=4)
    with pytest.raises(ConfigError, match="of which 3 are done"):
        run_training(load("steps=5"), resume=True)


def test_a_rollout_server_of_another_base_model_is_refused(world, load):
    world.served_digest = "other"
    with pytest.raises(FailedPreconditionError) as caught:
        run_training(load())
    assert caught.value.reason == "WEIGHTS_DIFFER"
    assert world.publications == []


def test_an_evaluation_goes_back_to_an_older_checkpoint_and_a_run_to_the_base(
    world, load, tmp_path
):
    first = run_training(load("checkpoint.every=1"))
    with open_session(load(), purpose="eval") as session:
        start = serve_checkpoint(session, first.path / "checkpoints/step_000001")
    assert (start.weights.version, world.version, world.published) == (1, 1, 1)
    run_training(load(f"run_dir={tmp_path / 'second'}"))
    assert world.version == 2


def test_a_checkpoint_that_cannot_be_loaded_leaves_the_servers_as_they_are(world, load, tmp_path):
    run_training(load())
    world.publications.clear()
    with open_session(load(), purpose="eval") as session, pytest.raises(TandemError):
        serve_checkpoint(session, tmp_path / "nothing")
    assert (world.version, world.published, world.publications) == (2, 2, [])
    world.unsaved = True
    with open_session(load(), purpose="eval") as session, pytest.raises(UnsavedUpdatesError):
        serve_checkpoint(session, tmp_path / "run")


class Killed(BaseException):
    """Ends a run without saving, as SIGKILL does."""


def killed_after(step):
    def on_step(line):
        if line["step"] == step:
            raise Killed

    return on_step


def test_a_run_that_was_killed_is_resumed_over_its_own_unsaved_steps(world, load):
    config = load("steps=4", "checkpoint.every=2")
    with pytest.raises(Killed):
        run_training(config, on_step=killed_after(3))
    assert (world.version, world.unsaved) == (3, True)
    run_training(config, resume=True)
    assert world.fresh_loads == []  # it goes on
    assert world.loads[-1].endswith("step_000002")
    # The run was killed while the trainer worked, so it did not record the version.
    world.version, world.unsaved = 5, True
    run_training(load("steps=5", "checkpoint.every=1"), resume=True)


def test_a_trainer_that_was_restarted_is_not_saved_as_if_it_had_not_been(world, load, monkeypatch):
    def restart(session, modes):
        world.version, world.unsaved = 0, False
        return {}

    # Between a step and its checkpoint.
    monkeypatch.setattr(train_module, "evaluate", restart)
    config = load("steps=4", "checkpoint.every=1", "eval={every: 2, at_start: false}")
    with pytest.raises(FailedPreconditionError, match="not the run's version 2") as caught:
        run_training(config)
    [note] = caught.value.__notes__
    assert note.startswith("in step 2: saved after step 1, --resume continues from there; what was")
    monkeypatch.undo()
    run_training(config, resume=True)
    assert world.loads[-1].endswith("step_000001")


def test_a_trainer_that_is_restarted_while_it_saves_does_not_save_its_initial_weights(world, load):
    def lose(context):
        if world.version == 2:
            world.version, world.unsaved = 0, False
            context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was lost")

    world.on_save = lose
    config = load("steps=4", "checkpoint.every=1")
    with pytest.raises(FailedPreconditionError) as caught:
        run_training(config)
    assert caught.value.reason == "STALE_POLICY_VERSION"
    assert [Path(path).name for path in world.saved] == ["step_000001"]
    world.on_save = lambda context: None
    run_training(config, resume=True)
    assert world.loads[-1].endswith("step_000001")


def test_a_resumed_run_does_not_throw_away_the_updates_of_another(world, load):
    run_training(load())
    world.version, world.unsaved = 7, True
    config = load("steps=4")
    with pytest.raises(UnsavedUpdatesError):
        run_training(config, resume=True)
    run_training(config, resume=True, discard_unsaved=True)


def test_a_checkpoint_that_was_overwritten_is_not_resumed(world, load):
    run = run_training(load())
    state = run.path / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"digest": "mine"}))
    world.publications.clear()
    with pytest.raises(FailedPreconditionError, match="the run saved mine"):
        run_training(load("steps=4"), resume=True)
    assert world.publications == []


def test_a_new_start_records_models_and_a_resumed_one_must_meet_them(world, load):
    run = run_training(load())
    servers = json.loads((run.path / "run.json").read_text())["servers"]
    assert servers["models"]["senior"]["path"].endswith("model")
    records = run.path / "run.json"
    text = records.read_text()
    records.write_text(text.replace(f'"parameters": {world.parameters}', '"parameters": 7'))
    with pytest.raises(RunDirectoryError, match=r"servers\.models\.\w+\.parameters \(7 -> "):
        run_training(load("steps=3"), resume=True)
    records.write_text(text)
    run_training(load("steps=3"), resume=True)


def test_publications_of_a_run_only_go_forward(world, load):
    config = load()
    with RunDirectory.open(config, "train") as run, open_session(config) as session:
        start_run(session, run)
        world.published = 9
        [client] = session.rollouts.clients
        with pytest.raises(FailedPreconditionError) as caught:
            session.bring_up(session.weights(), client)
    assert caught.value.reason == "WEIGHTS_DIFFER"
