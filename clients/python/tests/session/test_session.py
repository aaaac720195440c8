"""A session keeps the servers at the same weights."""

import json
import threading
from contextlib import closing
from types import SimpleNamespace

import fakes
import grpc
import pytest

from tandem.errors import (
    ConfigError,
    DeadlineError,
    FailedPreconditionError,
    InvalidArgumentError,
    RewardError,
    ServerStartError,
    UnavailableError,
)
from tandem.rpc.requests import Prompt
from tandem.session.opening import open_session
from tandem.session.session import WeightsRule
from tandem.settings import loading
from tandem.settings.cluster import ClusterSettings
from tandem.settings.run import DataSettings, RunSettings


@pytest.fixture
def config(run_file):
    return loading.load(RunSettings, run_file)


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row | {"answer": "w1"}) + "\n" for row in rows))


def published(world):
    return sum(method == "PublishWeights" for method, _ in world.calls)


def test_every_call_may_take_as_long_as_the_settings_say(config, address):
    config.servers.critic = address
    config.servers.timeout_seconds = 77
    with open_session(config) as session, session.critic() as critic:
        clients = [session.trainer, critic, *session.rollouts.clients]
        assert {client.timeout_seconds for client in clients} == {77}


def test_a_generation_that_takes_longer_than_it_may_ends(world, config, monkeypatch):
    done = threading.Event()
    with open_session(config) as session:
        [client] = session.rollouts.clients
        client.timeout_seconds = 0.1
        monkeypatch.setattr(world, "enter", lambda *_: done.wait(60))
        try:
            with pytest.raises(DeadlineError):
                session.rollouts.generate([Prompt([1], seed=1)])
        finally:
            done.set()


def test_a_missing_critic_is_named_by_its_field(config):
    with (
        open_session(config) as session,
        pytest.raises(ConfigError, match=r"^servers\.critic: not set"),
    ):
        session.critic()


def test_held_out_rows_are_left_out_whatever_the_formats_say(config, tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    write_rows(held_out, {"prompt": "w2 w3"}, {"prompt": "the words w3 w4"})
    config.data.format = "{prompt} w9"
    config.eval.data = DataSettings(jsonl=held_out, extract=r"w\d+ w\d+")
    with open_session(config) as session:
        assert [example.text for example in session.eval_data.examples] == ["w2 w3", "w3 w4"]
        assert len(session.data) == 18
        assert not {"w2 w3", "w3 w4"} & {example.row["prompt"] for example in session.data.examples}


def test_rows_that_share_one_column_with_a_held_out_row_stay(config, tmp_path):
    for name, passages in (("data", (1, 2, 3)), ("held_out", (3,))):
        rows = [{"prompt": "w9", "passage": f"w{i}"} for i in passages]
        write_rows(tmp_path / f"{name}.jsonl", *rows)
    config.data.jsonl, config.data.format = tmp_path / "data.jsonl", "{passage} {prompt}"
    config.eval.data = DataSettings(jsonl=tmp_path / "held_out.jsonl", format="{prompt} {passage}")
    with open_session(config) as session:
        assert {example.row["passage"] for example in session.data.examples} == {"w1", "w2"}


def test_held_out_conversations_are_left_out_whatever_the_order_of_their_keys(config, tmp_path):
    for name, count in (("data", 2), ("held_out", 1)):
        turns = [[{"role": "user", "content": f"w{i}"}] for i in range(count)]
        if name == "held_out":
            turns = [[dict(reversed(message.items())) for message in turn] for turn in turns]
        write_rows(tmp_path / f"{name}.jsonl", *({"messages": turn} for turn in turns))
    config.data.jsonl = tmp_path / "data.jsonl"
    config.eval.data = DataSettings(jsonl=tmp_path / "held_out.jsonl")
    with open_session(config) as session:
        [left] = session.data.examples
    assert left.row["messages"][0]["content"] == "w1"


def test_a_server_that_is_behind_is_caught_up_and_another_is_left_alone(world, config):
    with open_session(config) as session:
        [client] = session.rollouts.clients
        session.bring_up(session.weights(), client)
        assert published(world) == 0
        world.version = 3
        session.bring_up(session.weights(), client)
        assert client.weights_version().version == 3
    assert world.publications == [(3, False)]
    assert world.targets == ["rollout.cluster:7701"]


@pytest.mark.parametrize("version", [None, 0])
def test_a_run_says_once_that_a_server_does_not_use_the_speculator(world, config, version, notes):
    world.has_speculator, world.speculator_version = True, version
    with open_session(config) as session:
        for _ in range(2):
            world.version += 1
            session.publish()
    unused = [note for note in notes if "senior.speculator" in note]
    assert len(unused) == (version is None)
    assert all(note.startswith("rollout.cluster:7701: ") for note in unused)
    assert published(world) == 2, "the run goes on"


def test_other_weights_of_the_same_version_are_refused(world, config, address):
    world.served_digest = "other"
    with open_session(config) as session, pytest.raises(FailedPreconditionError) as caught:
        session.generate([Prompt([1], seed=1)])
    assert caught.value.reason == "WEIGHTS_DIFFER"
    assert "senior.model of a rollout server and model of the trainer" in caught.value.hint
    world.version = world.published = 2
    with open_session(config) as session, pytest.raises(FailedPreconditionError) as later:
        session.generate([Prompt([1], seed=1)])
    assert "--resume" in later.value.hint
    assert address in caught.value.message
    assert published(world) == 0


def versions(groups):
    return {run.weights.version for group in groups for one in group for run in one.senior_versions}


def test_a_rollout_server_that_was_restarted_is_caught_up_before_it_generates(world, config):
    world.version, world.published = 3, 0
    with open_session(config) as session:
        groups = session.generate([Prompt([1], seed=1, num_samples=2)], rule=WeightsRule.ANY_SINCE)
    assert versions(groups) == {3}


def test_samples_of_a_server_restarted_in_the_middle_are_drawn_again(world, config):
    world.version = world.published = 3
    prompts = [Prompt([1], seed=seed, num_samples=2) for seed in range(4)]
    with open_session(config) as session:
        whole = session.generate(prompts)

        def restart():
            world.published = 0
            world.on_batch = lambda: None

        world.on_batch = restart
        assert session.generate(prompts) == whole
        world.on_batch = restart
        assert versions(session.generate(prompts, rule=WeightsRule.ANY_SINCE)) == {0}


def test_a_server_that_keeps_restarting_ends_the_run(world, config):
    world.version = world.published = 3

    def restart():
        world.published = 0

    world.on_batch = restart
    with open_session(config) as session, pytest.raises(FailedPreconditionError, match="1 prompts"):
        session.generate([Prompt([1], seed=1)])


def test_a_trainer_that_was_restarted_is_noticed_before_a_generation(world, config):
    with open_session(config) as session:
        held = session.weights()
        world.version = 2
        with pytest.raises(FailedPreconditionError, match="not the run's version 0") as caught:
            session.generate([Prompt([1], seed=1)], held)
    assert caught.value.reason == "STALE_POLICY_VERSION"
    assert world.batches == []


def test_a_step_of_more_samples_than_a_queue_holds_travels_in_several_batches(world, config):
    prompts = [Prompt([1], seed=seed, num_samples=2) for seed in range(5)]
    with open_session(config) as session:
        whole = session.generate(prompts)
    world.max_queue = 4
    world.batches.clear()
    with open_session(config) as session:
        assert session.generate(prompts) == whole
    assert world.batches == [
        ["prompt-0", "prompt-1"],
        ["prompt-2", "prompt-3"],
        ["prompt-4"],
    ]


def test_rows_that_are_held_out_are_counted_and_an_evaluation_keeps_its_own(
    config, tmp_path, notes
):
    held_out = tmp_path / "held_out.jsonl"
    write_rows(held_out, {"prompt": "w2 w3"}, {"prompt": "w3 w4"})
    config.eval.data = DataSettings(jsonl=held_out)
    with open_session(config) as session:
        assert len(session.data) == 18
    assert notes == ["data: 2 of 20 rows are left out: eval.data has their prompts"]
    # In an evaluation, the training data may be held out as a whole.
    config.data.jsonl = held_out
    with open_session(config, purpose="eval") as session:
        assert len(session.data) == 2


def test_a_server_that_fails_is_told_while_another_still_draws(world, address):
    slow, done, drawn = fakes.FakeWorld(), threading.Event(), []
    slow.on_batch = lambda: drawn.append(done.wait(60))
    world.failures = [fakes.error_status(3, "no")]
    prompts = [Prompt([1], seed=seed) for seed in range(2)]
    with (
        fakes.serve(slow) as other,
        closing(fakes.pool(other, address)) as pool,
    ):
        try:
            with pytest.raises(InvalidArgumentError):
                pool.generate(prompts)
            assert drawn == []
        finally:
            done.set()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return row['no_such_field']", "KeyError: 'no_such_field'"),
        ("return None", "None"),
        ("return float('nan')", "nan"),
    ],
)
def test_a_reward_function_that_fails_is_named(config, tmp_path, body, says):
    file = tmp_path / "judge.py"
    file.write_text(f"def reward(prompt, response, **row):\n    {body}\n")
    config.reward.function = f"{file}:reward"
    with (
        open_session(config) as session,
        pytest.raises(RewardError, match=f"reward.function.*{says}"),
    ):
        session.reward(session.data.examples[:1], [["text"]])


def test_nobody_waits_for_a_server_of_the_cluster_that_died(world, config):
    def check(**_):
        raise ServerStartError("trainer ended with signal SIGKILL")

    calls = {
        "trainer": lambda session: session.trainer.info(),
        "rollout": lambda session: session.generate([Prompt([1])], rule=WeightsRule.ANY_SINCE),
    }
    for call in calls.values():
        with pytest.raises(ServerStartError, match="SIGKILL"), open_session(config) as session:
            session.connections.cluster = SimpleNamespace(check=check)
            world.failures = [fakes.error_status(14, "gone")] * 1000
            call(session)
        assert len(world.failures) > 990
        world.failures.clear()


def test_a_failed_call_is_explained_by_the_server_that_died(config):
    def check(**_):
        raise ServerStartError("trainer ended with signal SIGKILL")

    with (
        pytest.raises(ServerStartError, match="SIGKILL") as caught,
        open_session(config) as session,
    ):
        session.connections.cluster = SimpleNamespace(check=check)
        raise UnavailableError("no connection", code=grpc.StatusCode.UNAVAILABLE)
    assert isinstance(caught.value.__cause__, UnavailableError)


def test_a_failed_call_stays_what_it_is_while_all_servers_live(config):
    asked = []
    with pytest.raises(UnavailableError), open_session(config) as session:
        session.connections.cluster = SimpleNamespace(check=lambda **options: asked.append(options))
        raise UnavailableError("no connection", code=grpc.StatusCode.UNAVAILABLE)
    assert asked == [{"spare_rollouts": True}]


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ({"trainer": {"model": "m"}}, "cluster.rollout: a run needs a rollout server"),
        ({"rollout": {"senior_model": "m"}}, "cluster.trainer: a run needs a trainer server"),
    ],
)
def test_a_cluster_that_cannot_serve_a_run_is_refused(config, cluster, says):
    config.cluster = loading.validate(ClusterSettings, cluster, "test")
    with pytest.raises(ConfigError, match=says), open_session(config):
        pass
