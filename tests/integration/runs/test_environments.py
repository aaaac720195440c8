"""Runs with an environment on the real servers."""

from __future__ import annotations

import itertools
import json
import runpy

import harness
import pytest
from commands import records, tandem
from tandem.metrics import CLOCK_KEYS
from tandem.rpc.author_schedule import authorship_mask
from tandem.run_directory.trajectories.files import read_records
from tandem.utils.authors import ENVIRONMENT, turns

GUESS = harness.REPOSITORY / "examples" / "guess_number"
STEPS = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The blank model of the example and its rows."""
    folder = tmp_path_factory.mktemp("guess_number")
    runpy.run_path(str(GUESS / "make.py"))["main"](folder)
    return folder


@pytest.fixture
def run(made, tmp_path):
    """Trains in a directory; the blank model writes calls that cannot be read, and goes on."""

    def run(name, *overrides):
        tandem(
            "train",
            GUESS / "run.yaml",
            f"run_dir={tmp_path / name}",
            f"data.jsonl={made}/train.jsonl",
            f"cluster.model={made}/blank",
            f"cluster.directory={tmp_path / 'cluster'}",
            f"reward.function={tmp_path}/reward.py:reward",
            "batch.prompts_per_step=3",
            "batch.samples_per_prompt=4",
            "trajectories.every=1",
            "checkpoint.every=1",
            *overrides,
        )
        return tmp_path / name

    (tmp_path / "reward.py").write_text(
        "def reward(prompt, response, **row):\n    return len(response) / 1000\n"
    )
    return run


@pytest.mark.parametrize(
    "rule",
    [[], ["tandem.selection_strategy=turn", "environment.executor=process"]],
    ids=["word", "turn"],
)
def test_episodes_have_the_authors_of_their_rule_and_numbers_that_a_trainer_agrees_with(run, rule):
    path = run("run", f"steps={STEPS}", *rule)
    episodes = [one for step in range(1, STEPS + 1) for one in records(path, step)]
    assert max(turns(one["authorship_mask"]) for one in episodes) > 1
    for one in episodes:
        mask = one["authorship_mask"]
        said = [place for place, author in enumerate(mask) if author == ENVIRONMENT]
        derived = authorship_mask(
            one["response_token_ids"],
            one["tandem"],
            one["seed"],
            one["sample_index"],
            environment=said,
        )
        assert mask == derived
        if rule:
            # Whole turns of one author.
            assert len(list(itertools.groupby(mask))) == 2 * turns(mask) - 1
        assert [one["senior_logprobs"][place] for place in said] == [None] * len(said)
    for line in harness.json_lines(path / "metrics.jsonl"):
        assert line["environment/parse_errors"] > 0
        assert line["mismatch/max_abs_logprob_diff"] == pytest.approx(0, abs=1e-4)


def test_a_resumed_run_equals_an_uninterrupted_one(run):
    whole, parted = run("whole", f"steps={STEPS}"), run("parted", "steps=1")
    run("parted", f"steps={STEPS}", "--resume")
    for step in range(1, STEPS + 1):
        name = f"trajectories/step_{step}.parquet"
        assert (parted / name).read_bytes() == (whole / name).read_bytes()
    lines = [
        [
            {key: value for key, value in line.items() if key not in CLOCK_KEYS}
            for line in harness.json_lines(path / "metrics.jsonl")
        ]
        for path in (whole, parted)
    ]
    assert lines[0] == lines[1]


def test_evaluations_draw_episodes_of_the_authors_of_their_mode(made, tmp_path):
    takeovers = ["junior_takeover", "senior_takeover"]
    modes = ["solo", "junior_solo", "tandem", "handoff", "legibility", *takeovers]
    (tmp_path / "reward.py").write_text(
        "def reward(prompt, response, **row):\n    return len(response) / 1000\n"
    )
    printed = tandem(
        "eval",
        GUESS / "run.yaml",
        f"data.jsonl={made}/train.jsonl",
        "data.limit=4",
        "eval.temperature=1",
        f"cluster.model={made}/blank",
        f"cluster.directory={tmp_path / 'cluster'}",
        f"reward.function={tmp_path}/reward.py:reward",
        f"eval.modes=[{', '.join(modes)}]",
        'eval.handoff_boundary="}}"',
        "eval.takeover.after_tokens=12",
        "eval.samples=3",
        "eval.k=[1]",
        "--json",
        "--answers",
        tmp_path / "answers",
    )
    found = json.loads(printed.stdout.splitlines()[-1])["evaluations"]
    answers = {mode: read_records(tmp_path / "answers" / f"{mode}.parquet") for mode in modes}
    for mode in modes:
        counted = [turns(one["authorship_mask"]) for one in answers[mode]]
        assert found[mode]["environment/turns_mean"] == sum(counted) / len(counted) > 1
    authors = {mode: {a for one in answers[mode] for a in one["authorship_mask"]} for mode in modes}
    assert (authors["solo"], authors["junior_solo"]) == ({1, 2}, {0, 2})
    assert authors["tandem"] == {0, 1, 2}
    # Each mode draws with the same seeds, so legibility reads the solo episodes.
    assert [one["text"] for one in answers["legibility"]] == [
        one["text"] for one in answers["solo"]
    ]
    # The junior is the senior: wherever one takes over, the tokens stay the same.
    for mode, solo in zip(takeovers, ("solo", "junior_solo"), strict=True):
        assert found[mode]["taken_over"] > 0
        for one, alone in zip(answers[mode], answers[solo], strict=True):
            assert one["response_token_ids"] == alone["response_token_ids"]
            written = [author for author in one["authorship_mask"] if author != ENVIRONMENT]
            [first] = set(alone["authorship_mask"]) - {ENVIRONMENT}
            rest = len(written) - 12
            assert written == [first] * min(12, len(written)) + [1 - first] * rest
    # The junior is the senior, so it reads the senior's tokens as well; the environment's tokens,
    # which nobody drew, do not count.
    written = sum(one["authorship_mask"].count(1) for one in answers["solo"])
    assert found["legibility"]["tokens/response"] == written
    assert found["legibility"]["gap/nats_per_token"] == pytest.approx(0, abs=1e-6)
    assert found["legibility"]["junior/nats_per_token"] > 0


def test_episodes_that_are_drawn_ahead_are_saved_with_the_checkpoint(run, tmp_path):
    """The judge fails once in step 4, of a run that has drawn it with the weights after step 2."""
    options = ("steps=5", "async.max_staleness=2")
    whole = run("whole", *options)
    judge = tmp_path / "reward.py"
    judged = judge.read_text()
    judge.write_text(judged.replace("    return", "    assert step < 5\n    return"))
    judge.write_text(judge.read_text().replace("response, **row", "response, step, **row"))
    with pytest.raises(AssertionError):
        run("parted", *options)
    state = json.loads((tmp_path / "parted" / "state.json").read_text())
    assert list(state["rollouts"]["files"]) == [str(state["step"] + 1)]
    judge.write_text(judged)
    parted = run("parted", *options, "--resume", "--change", "inputs.reward")
    assert _results(parted) == _results(whole)


def _results(path):
    """The metrics of a run without the clock's, and the bytes of its trajectories."""
    steps = harness.metrics_without_clock(path)
    return steps, [
        (path / f"trajectories/step_{one['step']}.parquet").read_bytes() for one in steps
    ]
