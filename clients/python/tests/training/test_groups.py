"""The groups that are drawn for a step, and those that it trains on."""

from types import SimpleNamespace

import pytest

from tandem._proto.rollout.v1 import rollout_pb2
from tandem._proto.types.v1.trajectory_pb2 import Trajectory
from tandem.data.dataset import Example
from tandem.metrics import StepClock, step_line
from tandem.rewards.reward import Judged
from tandem.rpc.seeds import prompt_seed
from tandem.settings.run import DataSettings, RunSettings
from tandem.training.groups import draw_groups, rewards_differ, step_prompt


class Drawing:
    """A session whose row n has responses of `lengths(n)` tokens and the rewards `rewards(n)`."""

    names = ("one",)

    def __init__(self, rewards, lengths=lambda n: (1, 2), **sections):
        self.settings = RunSettings(
            run_dir="run",
            tokenizer="model",
            data=DataSettings(jsonl="rows"),
            batch={"prompts_per_step": 3, "samples_per_prompt": 2} | sections.pop("batch", {}),
            **sections,
        )
        self.data = SimpleNamespace(batch=self._batch)
        self.codec = SimpleNamespace(decode=len)
        self.reward = self
        self.sampling = {"max_tokens": 6}
        self.environment = None
        self._rewards, self._lengths = rewards, lengths
        self.seeds = []

    def _batch(self, first, size):
        return [Example({}, str(n), [n]) for n in range(first, first + size)]

    def generate(self, prompts, expected, *, rule, on_answer, progress):
        self.seeds += [prompt.seed for prompt in prompts]
        groups = [
            [
                Trajectory(prompt_token_ids=prompt.token_ids, response_token_ids=range(length))
                for length in self._lengths(prompt.token_ids[0])
            ]
            for prompt in prompts
        ]
        # Responses come in any order.
        for index in reversed(range(len(groups))):
            on_answer(index, groups[index])
        return groups

    def judging(self):
        return FakeJudging(self)

    def draw(self, first=4):
        return draw_groups(self, 7, first, None, StepClock())


class FakeJudging:
    """Judges examples by the rewards of a Drawing."""

    def __init__(self, drawing):
        self.drawing, self.added = drawing, {}

    def add(self, index, example, responses):
        self.added[index] = list(self.drawing._rewards(example.token_ids[0]))

    def result(self):
        rewards = [self.added[index] for index in range(len(self.added))]
        failures = ["why" for group in rewards for one in group if one is None]
        return Judged(rewards, dict.fromkeys(self.drawing.names, rewards), failures)


def test_rewards_that_differ_by_rounding_are_equal(subtests):
    for rewards, differ in [
        ([], False),
        ([0.5], False),
        ([0.1 + 0.2, 0.3], False),
        ([0.0, 1e-16, -1e-16], False),
        ([1e6, 1e6 * (1 + 1e-15)], False),
        ([0.5, 0.5 + 1e-8], True),
        ([-1.0, 1.0], True),
    ]:
        with subtests.test(rewards=rewards, differ=differ):
            assert rewards_differ(rewards) is differ


def by_thirds(n):
    """Only every third row has rewards that differ."""
    return (1.0, 0.0) if n % 3 == 0 else (1.0, 1.0)


def drawing(rewards=by_thirds, most=10, **sections):
    return Drawing(rewards, batch={"filter_groups": {"max_num_gen_batches": most}}, **sections)


def rows(groups):
    return [group.trajectories[0].prompt_token_ids[0] for group in groups]


def counts(drawn):
    names = ("groups_drawn", "groups_dropped", "num_gen_batches")
    return [drawn.metrics()[f"batch/{name}"] for name in names]


def test_without_a_filter_a_step_is_one_batch():
    drawn = Drawing(by_thirds).draw()
    assert rows(drawn.groups) == rows(drawn.kept) == [4, 5, 6]
    assert counts(drawn) == [3, 0, 1]


def test_as_many_prompts_as_are_missing_are_drawn_until_the_step_is_full():
    session = drawing()
    drawn = session.draw()
    # The batches have 3, 2, 2, 1 and 1 prompts.
    assert rows(drawn.groups) == [4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert rows(drawn.kept) == [6, 9, 12]
    assert [group.id for group in drawn.kept] == [f"step-7/prompt-{i}" for i in (2, 5, 8)]
    assert counts(drawn) == [9, 6, 5]
    assert session.seeds == [prompt_seed(0, 7, i) for i in range(9)]


def test_after_the_last_generation_batch_a_step_may_be_short_of_groups():
    drawn = drawing(most=2).draw()
    assert rows(drawn.groups) == [4, 5, 6, 7, 8]
    assert rows(drawn.kept) == [6]
    assert counts(drawn) == [5, 4, 2]
    assert drawing(lambda n: (0.5, 0.5), most=2).draw().kept == []


def test_a_full_step_draws_no_more():
    drawn = drawing(lambda n: (0.0, 0.5)).draw()
    assert counts(drawn) == [3, 0, 1]


def test_a_failed_reward_makes_no_group_differ():
    given = {4: (None, 1.0), 5: (None, None), 6: (1.0, 0.0)}
    drawn = drawing(given.get, most=1).draw()
    assert rows(drawn.kept) == [6]
    assert drawn.failures == ["why"] * 3


def test_the_mean_of_every_function_is_a_metric_where_there_are_several():
    session = Drawing(lambda n: (1.0, None))
    assert "reward/one" not in session.draw().metrics()
    session.names = ("one", "two")
    drawn = session.draw()
    assert drawn.groups[0].scores == {"one": [1.0, None], "two": [1.0, None]}
    metrics = drawn.metrics()
    assert (metrics["reward/one"], metrics["reward/two"]) == (1.0, 1.0)
    assert step_line(metrics)["reward/two"] == 1.0


# 10 tokens at most, of which the last 4 are the buffer: a response of 8 loses 0.5.
OVERLONG = {"sampling": {"max_tokens": 10}, "reward": {"overlong_buffer": {"len": 4}}}


def test_punishments_are_added_to_rewards_and_recorded_apart():
    drawn = Drawing(lambda n: (1.0, None), lambda n: (8, 10), **OVERLONG).draw()
    [group, *_] = drawn.groups
    assert group.rewards == [1.0, None]
    assert group.punishments == [-0.5, -1.0]
    assert group.shaped_rewards == [0.5, None]
    metrics = drawn.metrics()
    assert (metrics["reward/task_mean"], metrics["reward/overlong_mean"]) == (1.0, -0.5)
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.5, 0.5)


def test_without_a_buffer_nothing_is_punished():
    drawn = Drawing(by_thirds, lambda n: (8, 64)).draw()
    assert {value for group in drawn.groups for value in group.punishments} == {0.0}
    assert drawn.metrics()["reward/task_mean"] == pytest.approx(5 / 6)


def test_a_punishment_alone_makes_no_group_differ():
    drawn = drawing(lambda n: (1.0, 1.0), most=1, lengths=lambda n: (6, 10), **OVERLONG).draw()
    assert drawn.groups[0].shaped_rewards == [1.0, 0.0]
    assert drawn.kept == []


def test_prompts_ask_for_the_drafts_of_the_run():
    drawing = Drawing(by_thirds, speculative={"method": "ngram", "prompt_lookup_min": 1})
    prompt = step_prompt(drawing, Example({}, "7", [7]), 1, 0).message()
    assert prompt.speculative.method == rollout_pb2.SPECULATIVE_METHOD_NGRAM
    assert prompt.speculative.prompt_lookup_min == 1
    plain = step_prompt(Drawing(by_thirds), Example({}, "7", [7]), 1, 0).message()
    assert plain.speculative == rollout_pb2.SpeculativeConfig()
