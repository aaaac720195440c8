"""The distributions of a run's teachers, as the trainer receives them."""

import json

import fakes
import pytest
from commands import lines, tandem

from tandem.errors import ConfigError
from tandem.pool.scoring import SCORE_TOKENS, ScoreOptions
from tandem.preflight.teachers import require_room
from tandem.rpc.wire import from_tensor

ON = "objective.distillation={coefficient: 0.5, top_k: 2}"
NO_REWARD = "reward.function=none"


@pytest.fixture
def teacher():
    """A second rollout server, whose senior finds token 7 likelier than 5 and 6."""
    other = fakes.FakeWorld()
    other.logprob["senior"] = lambda token: -1.0 if token == 7 else -token
    other.top = [5, 6, 7]
    with fakes.serve(other) as address:
        yield other, address


def test_the_likeliest_tokens_of_a_server_reach_the_trainer(
    run_file, world, sent, teacher, tmp_path
):
    other, address = teacher
    other.published, other.served_digest = 3, "base"
    arguments = (run_file, ON, f"teachers={{large: '{address}'}}", "sampling.temperature=0.5")
    tandem("train", *arguments, "steps=1")
    assert (world.scores, other.scores) == (0, 1)
    assert other.score_temperatures == [0.5]
    assert len(sent) == 6
    for sample in sent:
        length = len(sample.trajectory.response_token_ids)
        assert sample.teacher.name == "large"
        assert from_tensor(sample.teacher.top_token_ids).tolist() == [[7, 5]] * length
        assert from_tensor(sample.teacher.top_logprobs).tolist() == [[-1, -5]] * length
    asked = world.headers[0].policy.distillation
    assert (asked.coefficient, asked.top_k) == (0.5, 2)
    [line] = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["time/teachers_seconds"] > 0
    servers = json.loads((tmp_path / "run" / "run.json").read_text())["servers"]
    assert servers["teacher_weights"] == {"large": {"version": 3, "digest": "base"}}
    assert servers["models"]["teacher large"]["parameters"] == 1000
    # A resumed run notices that the teacher has other weights.
    other.served_digest = "other"
    done = tandem("train", *arguments, "--resume", check=2)
    assert "servers.teacher_weights.large.digest (base -> other)" in done.stderr


def test_the_junior_is_asked_for_the_distribution_of_its_own(run_file, world, sent):
    world.top = [3, 4]
    world.logprob["junior"] = lambda token: -token
    temperature = "objective.distillation.temperature=2.0"
    tandem("train", run_file, ON, temperature, "teachers={small: junior}", "steps=1", NO_REWARD)
    assert world.score_temperatures == [2.0]
    for sample in sent:
        length = len(sample.trajectory.response_token_ids)
        assert from_tensor(sample.teacher.top_token_ids).tolist() == [[3, 4]] * length
        assert sample.reward == 0


def test_the_trainer_s_own_teacher_needs_no_tokens(run_file, world, sent):
    whole = "objective.distillation={coefficient: 0.5}"
    tandem("train", run_file, whole, "teachers={own: trainer}", "steps=1")
    assert world.scores == 0
    assert {sample.teacher.name for sample in sent} == {"own"}
    assert not any(sample.teacher.HasField("top_token_ids") for sample in sent)
    assert world.headers[0].policy.distillation.top_k == 0


def test_a_teacher_that_changes_ends_the_run(run_file, world, teacher):
    other, address = teacher

    def publish():
        other.published = other.scores - 1  # 0 in the first step, 1 in the second.

    other.on_batch = publish
    done = tandem("train", run_file, ON, f"teachers={{large: '{address}'}}", check=1)
    assert f"teachers.large: {address} holds version 1 with digest d" in done.stderr
    assert len(world.headers) == 1


def test_a_score_call_asks_for_no_more_than_a_message_holds():
    calls = [ScoreOptions(True, True, None, count).call_tokens for count in (0, 8, 128)]
    assert calls == [SCORE_TOKENS, SCORE_TOKENS, SCORE_TOKENS // 4]


def test_a_response_must_fit_into_a_message_with_its_teacher():
    require_room(458_752 // 128, 128, "a response")
    with pytest.raises(
        ConfigError, match=r"top_k: 128 tokens at each place of a response of 4,096"
    ):
        require_room(4096, 128, "a response")
