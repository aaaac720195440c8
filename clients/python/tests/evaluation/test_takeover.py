"""One model finishes what the other one began, against fake servers."""

import math

import numpy as np
import pytest

from tandem._proto.types.v1 import server_pb2, trajectory_pb2
from tandem.errors import ConfigError
from tandem.evaluation import evaluate
from tandem.evaluation.report import in_words
from tandem.evaluation.takeover import joined
from tandem.rpc.wire import from_tensor, to_tensor
from tandem.session.opening import open_session
from tandem.settings import loading
from tandem.settings.run import RunSettings
from tandem.settings.values import dump_values


@pytest.fixture
def evaluated(run_file):
    def evaluated(*overrides):
        settings = loading.load(RunSettings, run_file, ["reward.answer_pattern=w.$", *overrides])
        with open_session(settings, purpose="eval") as session:
            return evaluate(session)

    return evaluated


def pairs(results, first, second):
    """The answers of two modes to the same prompts, as (token ids, authors) each."""
    flat = ([one for group in results[mode].answers for one in group] for mode in (first, second))
    return [
        tuple((list(one.response_token_ids), list(one.authorship_mask)) for one in pair)
        for pair in zip(*flat, strict=True)
    ]


def test_the_junior_goes_on_after_some_tokens_of_the_senior(world, evaluated):
    results = evaluated("eval.modes=[solo, junior_takeover]", "eval.takeover.after_tokens=2")
    taken = 0
    for (solo, _), (ids, authors) in pairs(results, "solo", "junior_takeover"):
        assert ids[:2] == solo[:2]
        assert len(ids) <= 6
        if len(solo) <= 2:
            assert (ids, set(authors)) == (solo, {1})
        else:
            assert authors == [1, 1] + [0] * (len(ids) - 2)
            taken += 1
    summary = results["junior_takeover"].summary()
    assert 0 < taken == summary["taken_over"]
    # The senior's answers serve both modes; what ended by itself is not asked for again.
    assert [len(batch) for batch in world.batches] == [20, taken]
    assert f"answers taken over {taken}, tokens by the senior" in in_words(summary)


def test_the_senior_goes_on_after_a_share_of_the_juniors_answer(evaluated):
    results = evaluated("eval.modes=[senior_takeover]", "eval.takeover.after_share=0.5")
    whole = evaluated("eval.modes=[senior_takeover]", "eval.takeover.after_share=0.999")
    for (ids, authors), (longer, _) in zip(
        *(
            [
                (list(one.response_token_ids), list(one.authorship_mask))
                for group in one["senior_takeover"].answers
                for one in group
            ]
            for one in (results, whole)
        ),
        strict=True,
    ):
        kept = authors.count(0)
        assert authors == [0] * kept + [1] * (len(ids) - kept)
        assert ids[:kept] == longer[:kept]
        assert kept == math.ceil(0.5 * len(longer))


def test_one_place_of_a_takeover_is_set(evaluated):
    both = ["eval.takeover.after_tokens=2", "eval.takeover.after_share=0.5"]
    with pytest.raises(ConfigError, match=r"eval\.takeover: after_tokens and after_share: set one"):
        evaluated(*both)


def test_the_settings_of_a_takeover_are_read_back(run_file, tmp_path):
    for chosen in ([], ["eval.takeover.after_tokens=2"], ["eval.takeover.after_share=0.3"]):
        settings = loading.load(RunSettings, run_file, chosen)
        file = tmp_path / "again.yaml"
        file.write_text(dump_values(settings.model_dump(mode="json", exclude_none=True)))
        assert loading.load(RunSettings, file).eval.takeover == settings.eval.takeover


def test_a_takeover_needs_a_junior(world, evaluated):
    world.has_junior = False
    with pytest.raises(ConfigError, match=r"eval\.modes: junior_takeover: the rollout server at"):
        evaluated("eval.modes=[junior_takeover]", "tandem.enabled=false")


def test_a_joined_answer_is_a_whole_trajectory():
    def part(ids, author, **more):
        return trajectory_pb2.Trajectory(
            prompt_token_ids=[9],
            response_token_ids=ids,
            authorship_mask=bytes([author] * len(ids)),
            author_logprobs=to_tensor(np.arange(len(ids)) - 10.0 * author),
            senior_versions=[
                trajectory_pb2.VersionRun(
                    weights=server_pb2.WeightsVersion(version=4, digest="d"), count=len(ids)
                )
            ],
            finish_reason=2 - author,
            **more,
        )

    begun = part([1, 2, 3], 1, accepted_draft_mask=bytes(3), other_logprobs=to_tensor([0, 0, 0]))
    rest = part([7, 8], 0, junior_version="j")
    rest.prompt_token_ids[:] = [9, 1, 2]
    whole = joined(begun, 2, rest)
    assert list(whole.prompt_token_ids) == [9]
    assert list(whole.response_token_ids) == [1, 2, 7, 8]
    assert whole.authorship_mask == bytes([1, 1, 0, 0])
    assert from_tensor(whole.author_logprobs).tolist() == [-10, -9, 0, 1]
    assert [(one.weights.version, one.count) for one in whole.senior_versions] == [(4, 4)]
    assert (whole.junior_version, whole.finish_reason) == ("j", rest.finish_reason)
    assert not whole.HasField("other_logprobs")
    assert whole.accepted_draft_mask == b""


def test_patterns_give_the_share_of_answers_with_them(evaluated):
    results = evaluated(
        "eval.modes=[solo, handoff, legibility]", "eval.patterns={seven: 'w7(?!\\d)', any: 'w'}"
    )
    solo = results["solo"]
    seven = [7 in one.response_token_ids for group in solo.answers for one in group]
    assert 0 < sum(seven) < len(seven)
    assert solo.summary()["pattern/seven"] == pytest.approx(sum(seven) / len(seven))
    assert f"answers with seven {sum(seven) / len(seven):.1%}" in in_words(solo.summary())
    assert "pattern/any" in results["handoff"].summary()
    assert "pattern/any" not in results["legibility"].summary()


@pytest.mark.parametrize(
    ("patterns", "said"),
    [("{'a b': w}", r"eval\.patterns"), ("{code: '('}", "not a regular expression")],
)
def test_patterns_that_cannot_be_used_are_refused(evaluated, patterns, said):
    with pytest.raises(ConfigError, match=said):
        evaluated(f"eval.patterns={patterns}")
