"""Evaluations against fake servers."""

import numpy as np
import pytest

from tandem.errors import ConfigError, FailedPreconditionError
from tandem.evaluation import evaluate
from tandem.evaluation.handoff import MAX_ROUNDS, first_rounds, rounds
from tandem.evaluation.report import in_words, measures
from tandem.models.tokenizer import TextCodec
from tandem.pool.scoring import SCORE_TOKENS
from tandem.session.opening import open_session
from tandem.settings import loading
from tandem.settings.run import RunSettings

ALL = "eval.modes=[solo, handoff, legibility]"


@pytest.fixture
def load(run_file):
    common = ["eval.samples=3", "eval.temperature=1.0"]

    def load(*overrides):
        own = any(one.startswith("reward.function=") for one in overrides)
        pattern = [] if own else ["reward.answer_pattern=w.$"]
        return loading.load(RunSettings, run_file, [*common, *pattern, *overrides])

    return load


@pytest.fixture
def counted(tmp_path):
    """A reward that counts the words of a response."""
    file = tmp_path / "count.py"
    file.write_text("def reward(prompt, response, **row):\n    return response.count('w')\n")
    return f"reward.function={file}:reward"


def evaluated(config):
    with open_session(config, purpose="eval") as session:
        return evaluate(session)


def tokens(evaluation):
    return [list(one.response_token_ids) for group in evaluation.answers for one in group]


def test_batches_are_bounded_and_change_nothing(world, load):
    with open_session(load(ALL)) as session:
        whole = evaluate(session)
    assert len(world.batches) == 2
    world.batches.clear()
    # Two prompts of three samples each fit into a queue of eight.
    world.max_queue = 8
    with open_session(load(ALL)) as session:
        assert evaluate(session) == whole
    assert len(world.batches) == 20


def test_the_modes_are_those_of_the_settings_in_their_order(load):
    results = evaluated(load("eval.modes=[legibility, solo]"))
    assert [(mode, one.mode) for mode, one in results.items()] == [
        ("legibility", "legibility"),
        ("solo", "solo"),
    ]


def test_solo_answers_are_drawn_once(world, load):
    results = evaluated(load("eval.modes=[solo, legibility]"))
    assert results["solo"].answers is results["legibility"].answers
    assert (len(world.batches), world.scores) == (1, 1)
    assert all(set(one.authorship_mask) == {1} for one in results["solo"].answers[0])


def test_all_modes_are_measured_on_the_weights_of_the_trainer(world, load):
    world.version, world.published = 3, 0
    results = evaluated(load(ALL))
    assert {one.summary()["version/senior"] for one in results.values()} == {3}


def test_a_handoff_changes_the_author_after_every_boundary(load):
    # The run's boundary is "7": w7, w17, w27, …
    config = load("eval.modes=[handoff]", "sampling.max_tokens=99")
    result = evaluated(config)["handoff"]
    turns, by_senior = [], 0
    for group in result.answers:
        for one in group:
            author, authors = 1, []
            for token in one.response_token_ids:
                authors.append(author)
                author ^= token % 10 == 7
            assert list(one.authorship_mask) == authors
            turns.append(1 + sum(token % 10 == 7 for token in one.response_token_ids[:-1]))
            by_senior += sum(authors)
    summary = result.summary()
    assert summary["rounds/mean"] == pytest.approx(sum(turns) / 60)
    assert summary["rounds/mean"] > 3
    assert summary["rounds/cut"] == 0
    assert summary["tandem/senior_token_fraction"] == pytest.approx(
        by_senior / sum(map(len, tokens(result)))
    )


@pytest.mark.parametrize(("max_tokens", "told"), [(1, True), (30, False)])
def test_a_handoff_that_never_happened_is_told(load, max_tokens, told, notes):
    config = load("eval.modes=[handoff]", f"sampling.max_tokens={max_tokens}")
    with open_session(config, purpose="eval") as session:
        rounds_mean = evaluate(session)["handoff"].summary()["rounds/mean"]
    assert (rounds_mean == 1) == told
    assert any(note.startswith("handoff: no answer has a token") for note in notes) == told


def test_what_follows_the_last_round_does_not_count(load, world, counted, monkeypatch):
    """Every token is a round here, so the first MAX_ROUNDS tokens count."""
    world.max_model_len = world.junior_max_model_len = 512
    monkeypatch.setattr(TextCodec, "ids_ending_with", lambda codec, text: range(64))
    config = load("eval.modes=[handoff]", "sampling.max_tokens=200", counted)
    result = evaluated(config)["handoff"]
    lengths = list(map(len, tokens(result)))
    summary = result.summary()
    # Some answers end before that.
    assert 0 < summary["rounds/cut"] == sum(n > MAX_ROUNDS for n in lengths) < len(lengths)
    kept = [ids[:MAX_ROUNDS] for ids in tokens(result)]
    assert summary["rounds/mean"] == pytest.approx(sum(map(len, kept)) / len(kept))
    assert summary["tandem/senior_token_fraction"] == pytest.approx(
        sum((len(ids) + 1) // 2 for ids in kept) / sum(map(len, kept))
    )
    judged = [value for group in result.grades.rewards for value in group]
    assert judged == [sum(token > 0 for token in ids) for ids in kept]


@pytest.mark.parametrize(
    ("mask", "most", "kept"),
    [
        ([1, 1, 0, 1, 1], 1, [1, 1]),
        ([1, 1, 0, 1, 1], 2, [1, 1, 0]),
        ([1, 1, 0, 1, 1], 3, [1, 1, 0, 1, 1]),
        ([1, 1, 0, 1, 1], 4, [1, 1, 0, 1, 1]),
        ([1], 1, [1]),
    ],
)
def test_the_first_rounds_end_where_the_next_one_begins(mask, most, kept):
    assert first_rounds(bytes(mask), most) == bytes(kept)
    assert rounds(bytes(kept)) <= most


def recorded(one):
    """The senior's log-probs of an answer, as the fake server drew it."""
    return np.log(np.arange(1, len(one.response_token_ids) + 1) / 100)


@pytest.mark.parametrize(("temperature", "scored"), [(1.0, False), (0.0, False), (0.5, True)])
def test_legibility_is_a_mean_over_tokens(world, load, temperature, scored):
    """The senior scores its answers if they were sampled at another temperature than 1."""
    world.logprob = {"senior": lambda token: -token / 64, "junior": lambda token: -token / 16}
    config = load("eval.modes=[legibility]", f"eval.temperature={temperature}")
    result = evaluated(config)["legibility"]
    flat = np.concatenate(tokens(result))
    # A mean over responses would be another number.
    assert len(set(map(len, tokens(result)))) > 1
    senior = flat / 64
    if not scored:
        senior = -np.concatenate([recorded(one) for group in result.answers for one in group])
    summary = result.summary()
    assert summary["tokens/response"] == len(flat)
    assert summary["junior/nats_per_token"] == pytest.approx(flat.mean() / 16)
    assert summary["senior/nats_per_token"] == pytest.approx(senior.mean())
    assert summary["gap/nats_per_token"] == pytest.approx((flat / 16 - senior).mean())
    low, high = (summary[f"junior/nats_per_token_{end}"] for end in ("low", "high"))
    assert low < summary["junior/nats_per_token"] < high
    assert "accuracy" not in summary


def test_one_prompt_has_a_legibility_without_an_interval(load, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w1"}\n')
    summary = evaluated(load("eval.modes=[legibility]"))["legibility"].summary()
    assert summary["junior/nats_per_token"] == 2.0
    assert summary["junior/nats_per_token_low"] is None
    assert "junior, nats/token 2.000, " in in_words(summary)


def test_scores_are_asked_for_in_calls_that_fit_into_a_message(world, load):
    world.max_model_len = SCORE_TOKENS
    # Two of four sequences fit into a call.
    length = SCORE_TOKENS // 2 - 1
    with open_session(load(), purpose="eval") as session:
        scored = session.score([([1] * length, length - n) for n in (1, 2, 3, 4)])
    assert [len(one.junior) for one in scored] == [1, 2, 3, 4]
    assert world.scores == 2


def test_a_server_that_restarts_while_it_scores_is_asked_again(world, load, notes):
    world.version = world.published = 3

    def restart():
        if world.scores == 1:
            world.published = 0

    world.on_batch = restart
    with open_session(load("eval.modes=[legibility]"), purpose="eval") as session:
        result = evaluate(session)["legibility"]
    assert result.summary()["junior/nats_per_token"] == 2.0
    assert world.scores == 2
    assert "60 prompts were answered by other weights: retrying them" in notes


def test_a_server_that_keeps_restarting_while_it_scores_ends_the_evaluation(world, load):
    world.version = world.published = 3

    def restart():
        world.published = 0 if world.scores else 3

    world.on_batch = restart
    with pytest.raises(FailedPreconditionError, match="60 prompts"):
        evaluated(load("eval.modes=[legibility]"))


def test_a_server_without_a_junior_is_named_even_without_a_check_at_the_start(world, load):
    """The run has no `eval.every`, so nothing checks it, yet it evaluates, as the demo does."""
    world.has_junior = False
    with (
        open_session(load("eval.modes=[legibility]", "tandem.enabled=false")) as session,
        pytest.raises(ConfigError, match=r"eval\.modes: legibility: the rollout server at"),
    ):
        evaluate(session)
    assert world.batches == []


def test_an_evaluation_counts_the_rewards_that_failed(load, tmp_path):
    file = tmp_path / "judge.py"
    file.write_text(
        "def reward(prompt, response, **row):\n    return None if 'w1' in response else 1\n"
    )
    config = load(f"reward.function={file}:reward", "reward.on_error=skip")
    result = evaluated(config)["solo"]
    failed = sum(value is None for group in result.grades.rewards for value in group)
    assert failed > 0
    assert result.summary()["reward/failed"] == failed
    assert f", rewards failed {failed}; 20 prompts, 3 samples each" in in_words(result.summary())


def test_pass_at_k_is_shown_where_it_is_more_than_the_accuracy(load):
    shown = {
        k: [one.name for one in measures(evaluated(load(f"eval.k={k}"))["solo"].summary())]
        for k in ("[1]", "[1, 3]")
    }
    assert shown == {"[1]": ["accuracy"], "[1, 3]": ["accuracy", "pass@1", "pass@3"]}


def test_the_mean_of_graded_rewards_is_shown(load, tmp_path):
    file = tmp_path / "judge.py"
    file.write_text("def reward(prompt, response, **row):\n    return len(response) / 8\n")
    summary = evaluated(load(f"reward.function={file}:reward"))["solo"].summary()
    assert f", mean reward {summary['reward/mean']:.3f}; " in in_words(summary)
    # The mean of rewards of 0 and 1 is the accuracy, which is shown alone.
    assert "mean reward" not in in_words(evaluated(load())["solo"].summary())
