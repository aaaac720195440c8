"""The score of a reward model as a reward, with a critic that tests stand in for."""

import json

import fakes
import pytest
from commands import tandem
from pydantic import ValidationError

from tandem._proto.critic.v1 import critic_pb2
from tandem._proto.types.v1 import trajectory_pb2
from tandem.data.dataset import Example
from tandem.errors import ConfigError, FailedPreconditionError, RewardError
from tandem.rewards.judges.responses import Response
from tandem.rewards.reward import Reward
from tandem.rpc.client import CriticClient
from tandem.rpc.retry import RetryPolicy
from tandem.settings.run import RewardFunctionSettings, RewardSettings


@pytest.fixture
def critic():
    return fakes.FakeCritic()


@pytest.fixture
def judge(critic):
    """The address of the critic."""
    with fakes.serve_critic(critic) as address:
        yield address


def opened(judge, seconds=0.0, **settings):
    """A reward of the server `judge` alone."""
    reward = Reward(RewardSettings(server=judge, **settings))
    for server in reward.servers.values():
        server.open(lambda one, limit: CriticClient(one, retry=RetryPolicy(seconds=seconds)))
    return reward


def response(*tokens, prompt=(2, 3), length=None):
    trajectory = trajectory_pb2.Trajectory(prompt_token_ids=prompt, response_token_ids=tokens)
    return Response("text", trajectory, step=1, length=length)


@pytest.fixture
def judged_file(run_file, judge):
    """The file of a run, which starts once the reward model serves."""
    return run_file


EXAMPLE = Example({"prompt": "w2 w3"}, "w2 w3", [2, 3], "rows.jsonl:1")
GROUPS = [[response(4), response(5, 6)], [response(7, prompt=(1,))]]


def test_one_call_scores_all_responses_of_a_step(critic, judge):
    reward = opened(judge)
    judged = reward([EXAMPLE, EXAMPLE], GROUPS)
    assert judged.rewards == [[9.0, 16.0], [8.0]]
    assert judged.scores == {"reward_model": [[9.0, 16.0], [8.0]]}
    assert critic.calls == [3]
    # An evaluation may judge the beginning of an answer alone.
    assert reward([EXAMPLE], [[response(5, 6, length=1)]]).rewards == [[10.0]]
    reward.close()


def test_it_is_one_of_several_rewards_with_a_name_and_a_weight(judge):
    reward = Reward(
        RewardFunctionSettings(server=judge, name="judge", weight=0.5),
        RewardFunctionSettings(),
    )
    reward.servers["judge"].open(lambda one, limit: CriticClient(one))
    example = Example({"prompt": "w2", "answer": "text"}, "w2", [2], "rows.jsonl:1")
    judged = reward([example], [[response(4)]])
    assert judged.rewards == [[1.0 + 0.5 * 9]]
    assert judged.scores == {"judge": [[9.0]], "exact_match": [[1.0]]}
    reward.close()


def test_a_server_that_does_not_answer_is_waited_for(critic, judge):
    critic.failures = 1
    reward = opened(judge, seconds=30.0)
    assert reward([EXAMPLE], [[response(4)]]).rewards == [[9.0]]
    assert critic.calls == [1, 1]
    reward.close()


def test_a_server_that_stays_away_fails_the_reward_or_leaves_responses_out(critic, judge):
    critic.failures = 99
    reward = opened(judge)
    with pytest.raises(RewardError, match=r"^reward\.server: 127\.0\.0\.1:\d+: .*the judge sleeps"):
        reward([EXAMPLE], [[response(4)]])
    reward.close()
    reward = opened(judge, on_error="skip")
    judged = reward([EXAMPLE], [[response(4)]])
    assert judged.rewards == [[None]]
    assert "the judge sleeps" in judged.failures[0]
    reward.close()


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_other_weights_end_the_run(critic, judge, on_error):
    reward = opened(judge, on_error=on_error)
    critic.weights = fakes.weights(4)
    with pytest.raises(FailedPreconditionError, match=r"holds version 4 .* began with version 3"):
        reward([EXAMPLE], [[response(4)]])
    reward.close()


def test_a_response_without_tokens_has_no_score(judge):
    reward = opened(judge, on_error="skip")
    judged = reward([EXAMPLE], [[response(), response(4)]])
    assert judged.rewards == [[None, 9.0]]
    reward.close()


def test_a_head_that_nobody_trained_is_refused(critic, judge):
    critic.head, critic.weights = critic_pb2.VALUE_HEAD_SOURCE_RANDOM, fakes.weights(0)
    with pytest.raises(ConfigError, match=r"^reward\.server: .*/models/judge, which has no value"):
        opened(judge)
    # One that began so may have been trained since.
    critic.weights = fakes.weights(7)
    opened(judge).close()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"server": "somewhere"}, "must be HOST:PORT, not 'somewhere'"),
        ({"server": "h:1", "function": "gsm8k"}, "function does not apply to a reward of `server`"),
        ({"server": "h:1", "batch": True}, "batch does not apply to a reward of `server`"),
        ({"server": "h:1", "workers": 2}, "workers does not apply to a reward of `server`"),
        ({"server": "h:1", "answer_pattern": "x"}, "answer_pattern does not apply to a reward"),
    ],
)
def test_settings_of_functions_are_refused(fields, told):
    with pytest.raises(ValidationError, match=told):
        RewardSettings(**fields)


def test_a_run_records_its_model_and_weights_and_does_not_go_on_with_others(
    world, judged_file, judge, critic, tmp_path
):
    judged = ["train", judged_file, f"reward.server={judge}"]
    tandem(*judged, "steps=2")
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["servers"]
    [model] = recorded["reward_models"].values()
    assert model["path"] == "/models/judge"
    assert model["weights"] == {"version": 3, "digest": "d"}
    assert critic.calls == [6, 6]
    critic.weights = fakes.weights(4)
    assert "servers.reward_models" in tandem(*judged, "--resume", check=2).stderr
    tandem(*judged, "--resume", "--change", "servers.reward_models")


def test_another_tokenizer_is_refused_before_anything_is_written(
    world, judged_file, judge, critic, tmp_path
):
    critic.vocabulary_digest = "another"
    done = tandem("train", judged_file, f"reward.server={judge}", check=2)
    assert f"is not the tokenizer of the reward model at {judge}" in done.stderr
    assert not (tmp_path / "run").exists()


def test_responses_that_it_may_not_read_are_noted(world, judged_file, judge):
    long = tandem("train", judged_file, f"reward.server={judge}", "sampling.max_tokens=9")
    assert "reads 10 tokens, but a prompt with its response may have 11" in long.stdout
