"""The gate: what the reward favours before training, against fake servers."""

import json

import pytest
from commands import tandem

from tandem.evaluation.gate import Favour, Gate, Group, as_in_training, gate
from tandem.evaluation.report import gate_rows
from tandem.session.opening import open_session
from tandem.settings import loading
from tandem.settings.run import RunSettings

PATTERN = "eval.patterns={seven: 'w7(?!\\d)'}"


@pytest.fixture
def load(run_file, tmp_path):
    file = tmp_path / "judge.py"
    file.write_text(
        "import re\n\ndef reward(prompt, response, **row):\n"
        "    return float(bool(re.search(r'w7(?!\\d)', response)))\n"
    )

    def load(*overrides):
        chosen = [f"reward.function={file}:reward", "batch.samples_per_prompt=8", *overrides]
        return as_in_training(loading.load(RunSettings, run_file, chosen))

    return load


def gated(settings):
    with open_session(settings, purpose="eval") as session:
        return gate(session)


def test_answers_are_drawn_as_in_training(world, load):
    drawn = []
    world.on_prompt = drawn.append
    found = gated(load(PATTERN, "sampling.temperature=0.7"))
    [senior, junior, both] = drawn[:20], drawn[20:40], drawn[40:]
    for prompts in (senior, junior, both):
        assert {(one.num_samples, one.sampling.temperature) for one in prompts} == {(8, 0.7)}
    assert not any(one.tandem.enabled for one in senior)
    assert {one.tandem.prob_senior for one in junior} == {0.0}
    assert {one.tandem.enabled for one in both} == {True}
    assert found.authors["senior"].answers == 20 * 8


def test_a_pattern_that_the_reward_favours_is_found(load):
    found = gated(load(PATTERN))
    matching, other = found.patterns["seven"]
    assert matching.answers + other.answers == found.authors["senior"].answers
    assert matching.share + other.share == pytest.approx(1)
    assert (matching.accuracy, other.accuracy) == (1.0, 0.0)
    favour = found.favours["seven"]
    assert favour.sign == 1
    assert favour.difference == pytest.approx(1, abs=0.3)
    assert any("moves the senior towards it" in one for one in found.findings())
    [line] = [row for row in gate_rows(found) if row[0] == "senior, with seven"]
    assert line[2] == "100.0%"


def test_a_pattern_that_no_answer_has_tells_nothing(load):
    found = gated(load("eval.patterns={never: zzz}"))
    assert found.favours["never"] == Favour(0, None, None)
    assert found.patterns["never"][0] == Group(0, 0.0, None, None, None)
    assert any("no prompt has answers with and without it" in one for one in found.findings())
    assert "-" in next(row for row in gate_rows(found) if row[0] == "senior, with never")


def test_a_run_without_tandem_has_one_author(load):
    assert list(gated(load("tandem.enabled=false")).authors) == ["senior"]


@pytest.mark.parametrize(
    ("difference", "half_width", "sign"),
    [(0.2, 0.1, 1), (-0.2, 0.1, -1), (0.2, 0.3, 0), (0.2, None, 0), (None, None, 0)],
)
def test_the_sign_is_that_of_a_certain_difference(difference, half_width, sign):
    assert Favour(9, difference, half_width).sign == sign


def test_a_copy_of_the_senior_and_equal_rewards_are_findings():
    group = Group(8, 1.0, 0.5, 0.5, 3.0)
    authors, equal = {"senior": group, "both": group}, {"senior": 0.2, "both": 0.9}
    found = Gate(authors, equal, {}, {}, same_model=True).findings()
    assert "both: the answers to 90% of the prompts have one reward each" in found[0]
    assert "the junior has the senior's weights" in found[1]


def test_the_command_prints_the_gate(run_file):
    printed = tandem("eval", run_file, PATTERN, "reward.answer_pattern=w.$", "--gate", "--json")
    record = json.loads(printed.stdout)
    assert set(record["authors"]) == {"senior", "junior", "both"}
    assert set(record["patterns"]["seven"]) == {"with", "without", "favour"}
    refused = tandem("eval", run_file, "--gate", "--mode", "solo", check=2)
    assert "--gate: goes without --mode" in refused.stderr
