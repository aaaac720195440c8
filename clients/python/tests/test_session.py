"""What a session sees to between the servers."""

from types import SimpleNamespace

import grpc
import pytest
import yaml

from tandem import settings
from tandem.errors import (
    ConfigError,
    FailedPreconditionError,
    ServerStartError,
    UnavailableError,
)
from tandem.session import Session
from tandem.settings import RunSettings


@pytest.fixture
def config(run_file):
    return settings.load(RunSettings, run_file)


def published(world):
    return sum(method == "PublishWeights" for method, _ in world.calls)


def test_another_version_is_published_and_the_same_weights_are_not(world, config):
    with Session(config) as session:
        assert session.synchronize() == 0
        assert published(world) == 0
        world.version = 3
        assert session.synchronize() == 3
    assert published(world) == 1


def test_other_weights_of_the_same_version_are_refused(world, config, address):
    world.served_digest = "other"
    with Session(config) as session, pytest.raises(FailedPreconditionError) as caught:
        session.synchronize()
    assert caught.value.reason == "WEIGHTS_DIFFER"
    assert address in caught.value.message
    assert published(world) == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return row['no_such_field']", "KeyError: 'no_such_field' .*judge.py:2"),
        ("return None", "None"),
        ("return float('nan')", "nan"),
    ],
)
def test_a_reward_function_that_fails_is_a_configuration_error(config, tmp_path, body, says):
    file = tmp_path / "judge.py"
    file.write_text(f"def reward(prompt, response, **row):\n    {body}\n")
    config.reward.function = f"{file}:reward"
    with Session(config) as session, pytest.raises(ConfigError, match=f"reward.function.*{says}"):
        session.reward(session.data.examples[0], "text")


def test_a_failed_call_is_explained_by_the_server_that_died(config):
    def check():
        raise ServerStartError("trainer ended with signal SIGKILL")

    with pytest.raises(ServerStartError, match="SIGKILL") as caught, Session(config) as session:
        session.cluster = SimpleNamespace(check=check)
        raise UnavailableError("no connection", code=grpc.StatusCode.UNAVAILABLE)
    assert isinstance(caught.value.__cause__, UnavailableError)


def test_a_failed_call_stays_what_it_is_while_all_servers_live(config):
    with pytest.raises(UnavailableError), Session(config) as session:
        session.cluster = SimpleNamespace(check=lambda: None)
        raise UnavailableError("no connection", code=grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ({"trainer": {"model": "m"}}, "rollout: a run needs a rollout server"),
        ({"rollout": {"senior_model": "m"}}, "trainer: a run needs a trainer server"),
        ({"rollout": {"senior_model": "m"}, "trainer": 7}, "trainer: .*dictionary"),
    ],
)
def test_a_cluster_that_cannot_serve_a_run_is_refused(config, tmp_path, cluster, says):
    config.cluster = tmp_path / "cluster.yaml"
    config.cluster.write_text(yaml.safe_dump(cluster))
    with pytest.raises(ConfigError, match=says), Session(config):
        pass
