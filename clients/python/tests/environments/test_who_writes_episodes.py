"""Episodes whose turns senior and junior share: takeovers, and whole turns in alternation."""

import itertools
import json
import math

import fakes
import pytest
from commands import records as records_of
from commands import tandem
from guess_game import guessing, train
from talking import let_write

from tandem.run_directory.trajectories.files import read_records
from tandem.utils.authors import turns

ASSISTANT = "<|im_start|>assistant\n"


@pytest.fixture
def playing(world, codec):
    """The models write the same texts; what one has begun, the other one continues."""

    def sample(prompt, index, version):
        before = "".join(codec.token_texts(list(prompt.response.token_ids)))
        earlier, _, begun = before.rpartition(ASSISTANT)
        text = guessing(prompt.seed, index, earlier + "|")
        assert text.startswith(begun)
        tokens = codec.encode(text[len(begun) :] + "<|im_end|>", special=False)
        cut = tokens[: prompt.sampling.max_tokens]
        turn = fakes.written(prompt, index, version, cut)
        turn.finish_reason = 1 if cut == tokens else 2
        return turn

    world.sample = sample


def evaluated(run_file, folder, modes, *given):
    """The summaries of modes, and the answers of each."""
    arguments = ["--json", f"eval.modes=[{', '.join(modes)}]", "--answers", folder, *given]
    printed = tandem("eval", run_file, "reward.correct_at=0.5", *arguments)
    found = json.loads(printed.stdout.splitlines()[-1])["evaluations"]
    answers = {mode: list(read_records(folder / f"{mode}.parquet")) for mode in modes}
    return found, answers


def handed_over(mask, after):
    """The authors of a solo answer after a takeover behind so many tokens of its model."""
    [first] = set(mask) - {2}
    count, authors = 0, []
    for author in mask:
        if author != 2:
            count += 1
            author = first if count <= after else 1 - first
        authors.append(author)
    return authors


@pytest.mark.parametrize("place", [1, 9, 40, 67, 68, 69, 100, 100_000, 0.3, 0.5])
@pytest.mark.parametrize("successor", ["junior", "senior"])
def test_a_model_takes_over_where_it_is_said(playing, run_file, tmp_path, successor, place):
    solo = "solo" if successor == "junior" else "junior_solo"
    setting = "after_tokens" if isinstance(place, int) else "after_share"
    mode = f"{successor}_takeover"
    found, answers = evaluated(
        run_file, tmp_path / "answers", [solo, mode], f"eval.takeover.{setting}={place}"
    )
    taken = []
    for one, other in zip(answers[solo], answers[mode], strict=True):
        whole = sum(author != 2 for author in one["authorship_mask"])
        after = place if isinstance(place, int) else math.ceil(place * whole)
        # Equal models write the same, wherever one takes over from the other.
        assert list(other["response_token_ids"]) == list(one["response_token_ids"])
        assert list(other["authorship_mask"]) == handed_over(one["authorship_mask"], after)
        assert other["reward"] == one["reward"]
        taken.append(after < whole)
    assert found[mode]["taken_over"] == sum(taken)
    assert sum(taken) > 0 or place == 100_000
    for key in ("accuracy", "environment/turns_mean", "environment/tool_calls_mean"):
        assert found[mode][key] == found[solo][key]


def test_a_takeover_keeps_the_limits_of_turns_and_episodes(playing, run_file, tmp_path):
    limits = ["sampling.max_tokens=70", "environment.max_episode_tokens=200"]
    found, answers = evaluated(
        run_file,
        tmp_path / "answers",
        ["solo", "junior_takeover"],
        "eval.takeover.after_tokens=30",
        *limits,
    )
    assert found["solo"]["environment/stop_tokens"] > 0
    for key, value in found["solo"].items():
        if key.startswith("environment/"):
            assert found["junior_takeover"][key] == value
    for one, other in zip(answers["solo"], answers["junior_takeover"], strict=True):
        assert list(other["response_token_ids"]) == list(one["response_token_ids"])


def test_an_episode_that_fails_has_no_answer_to_take_over(playing, run_file, tmp_path):
    rows = [{"prompt": "a", "answer": 0}, {"prompt": "b", "answer": 0, "breaks": "reset"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = evaluated(run_file, tmp_path / "answers", ["junior_takeover"])
    one = found["junior_takeover"]
    assert (one["environment/failures"], one["taken_over"]) == (1, 1)


def alternating(mask):
    """The authors of an episode whose turns alternate, the senior first."""
    number, authors = 0, []
    for said, group in itertools.groupby(author == 2 for author in mask):
        count = len(list(group))
        authors += [2 if said else 1 - number % 2] * count
        number += not said
    return authors


def test_senior_and_junior_write_whole_turns(world, codec, run_file, tmp_path):
    let_write(world, codec, guessing)
    train(run_file, "tandem.selection_strategy=turn")
    for step in (1, 2):
        masks = [one["authorship_mask"] for one in records_of(tmp_path / "run", step)]
        assert max(map(turns, masks)) > 2
        assert [list(mask) for mask in masks] == list(map(alternating, masks))


def test_a_handoff_of_whole_turns(world, codec, run_file, tmp_path):
    let_write(world, codec, guessing)
    found, answers = evaluated(
        run_file, tmp_path / "answers", ["handoff"], "eval.handoff_turns=true"
    )
    masks = [one["authorship_mask"] for one in answers["handoff"]]
    assert all(list(mask) == alternating(mask) for mask in masks)
    assert found["handoff"]["rounds/mean"] == sum(map(turns, masks)) / len(masks) > 1
