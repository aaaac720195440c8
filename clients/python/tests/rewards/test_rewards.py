"""Rewards: the built-in ones and the user's own functions."""

import asyncio
import contextlib
import math
import os
import re
import sys
import threading
from pathlib import Path

import pytest
import yaml
from fakes import wait_until

import tandem
from tandem.data.dataset import Example
from tandem.errors import ConfigError, RewardError, TandemError
from tandem.rewards.judges import coroutines
from tandem.rewards.reward import Reward, answer_extractor, overlong_punishment
from tandem.settings.bounds import MAX_REWARD
from tandem.settings.run import OverlongBufferSettings, RewardFunctionSettings, RewardSettings

REPOSITORY = Path(__file__).resolve().parents[4]
EXAMPLE = Example({"prompt": "w1", "answer": " w2", "bonus": 0.25}, "w1", [1], "rows.jsonl:7")


def written(tmp_path, text, **settings):
    (tmp_path / "judge.py").write_text(text)
    return RewardSettings(function="judge.py:reward", python_path=tmp_path, **settings)


@pytest.fixture
def judge():
    """A function that judges responses to one example by the given settings."""
    opened = []

    def run(settings, *responses, example=EXAMPLE):
        opened.append(Reward(settings))
        return opened[-1]([example], [responses]).rewards[0]

    yield run
    for reward in opened:
        reward.close()


@pytest.fixture(autouse=True)
def path():
    """Restores sys.path, so that a test does not import the functions of another."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ("prompt", "too many positional arguments"),
        ("prompt, response", "got an unexpected keyword argument 'answer'"),
        ("prompt, response, answer, level, **row", "missing a required argument: 'level'"),
    ],
)
def test_a_function_that_a_row_does_not_fit_is_known_before_it_is_called(
    tmp_path, parameters, says
):
    reward = Reward(written(tmp_path, f"def reward({parameters}): raise SystemExit"))
    with pytest.raises(ConfigError, match=f"cannot be called for rows.jsonl:7: {says}"):
        reward.check([EXAMPLE])


def test_a_function_that_fits_passes_the_check_uncalled(tmp_path):
    for parameters, batch in (
        ("prompt, response, answer, bonus", False),
        ("prompt, response, **row", False),
        ("*anything, **row", False),
        ("prompts, responses, rows", True),
    ):
        text = f"def reward({parameters}): raise SystemExit"
        Reward(written(tmp_path, text, batch=batch)).check([EXAMPLE])


def test_a_row_without_what_a_builtin_needs_is_known_before_it_is_judged():
    rows = [EXAMPLE, Example({"prompt": "w1"}, "w1", [1], "rows.jsonl:8")]
    needs = r"needs an `answer`, text or a number, in every row: rows\.jsonl:8"
    for row in ({}, {"answer": None}, {"answer": ["w2"]}):
        rows[1] = Example({"prompt": "w1"} | row, "w1", [1], "rows.jsonl:8")
        with pytest.raises(ConfigError, match=needs):
            Reward(RewardSettings(function="exact_match")).check(rows)
    with pytest.raises(ConfigError, match=r"needs data\.reasoning_gym"):
        Reward(RewardSettings(function="reasoning_gym")).check(rows)


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (None, " x \n", "x"),
        (r"-?\d+", "3 + 4 = 7.", "7"),
        (r"answer: (\w+)", "answer: a; answer: b", "b"),
        (r"\d", "none", ""),
    ],
)
def test_the_last_match_is_the_answer(pattern, text, answer):
    assert answer_extractor(pattern)(text) == answer


def test_exact_match_compares_with_the_rows_answer(judge):
    assert judge(RewardSettings(), "w2 ", "w3") == [1.0, 0.0]
    with pytest.raises(ConfigError, match=r"needs an `answer`, .*: rows\.jsonl:8"):
        judge(RewardSettings(), "w2", example=Example({"prompt": "w1"}, "w1", [1], "rows.jsonl:8"))


@pytest.mark.parametrize(("answer", "text"), [(5, "5"), (-3, "-3"), (2.5, "2.5"), (" 7 ", "7")])
def test_exact_match_compares_numbers_as_text(judge, answer, text):
    example = Example({"prompt": "w1", "answer": answer}, "w1", [1], "rows.jsonl:8")
    assert judge(RewardSettings(), f" {text}\n", f"{text}.0", example=example) == [1.0, 0.0]
    reward = RewardSettings(answer_pattern=r"-?[\d.]*\d")
    assert judge(reward, f"The answer is {text}.", example=example) == [1.0]


def test_rewards_are_python_functions_from_a_file(tmp_path, judge):
    text = "def reward(prompt, response, answer, **row):\n    return row['bonus']\n"
    assert judge(written(tmp_path, text), "x") == [0.25]


def test_a_file_may_define_dataclasses_and_hides_no_module(tmp_path, judge):
    settings = written(
        tmp_path,
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Score:\n    value: float\n"
        "def reward(prompt, response, **row):\n    return Score(0.5).value\n",
    )
    assert judge(settings, "x") == [0.5]
    assert "judge" not in sys.modules


def test_a_function_that_is_not_there_is_refused(subtests):
    for name in [
        "nothing",
        "no.such.module:f",
        ":f",
        "no/such/file.py:f",
        "math:no_such",
        "math:pi",
    ]:
        with subtests.test(name=name), pytest.raises(ConfigError, match=r"^reward\.function: "):
            Reward(RewardSettings(function=name))


def test_a_missing_file_and_a_missing_function_are_named(tmp_path):
    file = tmp_path / "judge.py"
    with pytest.raises(ConfigError, match=rf"^reward\.function: {file} does not exist$"):
        Reward(RewardSettings(function=f"{file}:reward"))
    file.write_text("def judge(): ...\n")
    with pytest.raises(ConfigError, match=rf"^reward\.function: {file} has no function 'reward'$"):
        Reward(RewardSettings(function=f"{file}:reward"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def reward(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import nope", "nope"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused(tmp_path, text, message):
    settings, before = written(tmp_path, text), set(sys.modules)
    with pytest.raises(ConfigError, match=rf"^reward\.function: .*judge\.py:reward: .*{message}"):
        Reward(settings)
    assert set(sys.modules) == before


@pytest.mark.parametrize("value", [None, "much", math.nan, math.inf])
def test_a_reward_that_is_no_finite_number_is_refused(tmp_path, judge, value):
    shown = f"float({str(value)!r})" if isinstance(value, float) else repr(value)
    settings = written(tmp_path, f"def reward(*a, **row):\n    return {shown}\n")
    with pytest.raises(RewardError, match="is not a finite number"):
        judge(settings, "x")


@pytest.mark.parametrize(
    ("raises", "says"),
    [
        ("1 / 0", "ZeroDivisionError: division"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("raise asyncio.CancelledError", "CancelledError"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_failure_names_row_prompt_response_and_traceback(tmp_path, judge, kind, raises, says):
    text = f"import asyncio, sys\n\n\n{kind} reward(prompt, response, **row):\n    {raises}\n"
    with pytest.raises(RewardError) as caught:
        judge(written(tmp_path, text), "said", "so")
    lines = str(caught.value).splitlines()
    assert lines[:4] == [
        f"reward.function: judge.py:reward: {lines[0].partition('reward: ')[2]}",
        "  row: rows.jsonl:7",
        "  prompt: 'w1'",
        "  response: 'said'",
    ]
    assert says in lines[0]
    assert f'{tmp_path}/judge.py", line 5, in reward' in str(caught.value)
    assert str(Path(tandem.__file__).parent) not in str(caught.value)
    assert lines[-1] == "1 other calls failed too"
    assert "on_error" in caught.value.hint


@pytest.mark.parametrize("number", ["1e300", "-2e9", "10**400"])
def test_a_reward_that_no_trainer_takes_names_its_row_and_can_be_skipped(tmp_path, judge, number):
    text = f"def reward(prompt, response, **row):\n    return {number} if response == 'x' else 1\n"
    with pytest.raises(RewardError, match=r"judge\.py:reward: .*\n  row: rows\.jsonl:7") as caught:
        judge(written(tmp_path, text), "x", "y")
    assert "on_error" in caught.value.hint
    assert judge(written(tmp_path, text, on_error="skip"), "x", "y") == [None, 1.0]


def test_the_bound_of_a_reward_is_the_trainers():
    code = (REPOSITORY / "services/trainer/engine/steps/batch_check.cc").read_text()
    [bound] = re.findall(r"kMaxReward = (\S+);", code)
    assert float(bound) == MAX_REWARD


@pytest.mark.parametrize("fault", ["undefined_name", "import no_such", "prompt.no_such", "1 + ''"])
def test_a_mistake_in_a_function_is_to_be_corrected_not_skipped(tmp_path, judge, fault):
    text = f"def reward(prompt, response, **row):\n    {fault}\n    return 1\n"
    with pytest.raises(TandemError) as caught:
        judge(written(tmp_path, text), "x")
    assert "on_error" not in caught.value.hint
    # An error that an outage may cause is not the user's mistake: another start may succeed.
    only_written = fault in ("undefined_name", "import no_such")
    assert isinstance(caught.value, ConfigError) == only_written


def weighted(tmp_path, text, **settings):
    (tmp_path / "judge.py").write_text(text)
    return RewardFunctionSettings(python_path=tmp_path, **settings)


SEVERAL = (
    "def length(prompt, response, **row):\n    return len(response)\n"
    "def digit(prompt, response, **row):\n    return float(response)\n"
)


def test_several_functions_give_their_weighted_sum(tmp_path):
    reward = Reward(
        weighted(tmp_path, SEVERAL, function="judge.py:length", weight=0.5),
        weighted(tmp_path, SEVERAL, function="judge.py:digit", weight=-2, on_error="skip"),
        weighted(tmp_path, SEVERAL, function="exact_match", name="right"),
    )
    judged = reward([EXAMPLE, EXAMPLE], [["3", "w2"], ["10"]])
    assert judged.scores == {
        "length": [[1.0, 2.0], [2.0]],
        "digit": [[3.0, None], [10.0]],
        "right": [[0.0, 1.0], [0.0]],
    }
    assert judged.rewards == [[-5.5, None], [-19.0]]
    assert judged.failures[0].startswith("rewards.1.function: judge.py:digit: ValueError")
    assert len(judged.failures) == 1
    assert reward.files == [tmp_path / "judge.py"] * 2


def test_a_sum_that_no_trainer_takes_is_refused(tmp_path):
    reward = Reward(weighted(tmp_path, SEVERAL, function="judge.py:digit", weight=1e9))
    with pytest.raises(RewardError, match=r"^rewards: the weighted sum 1e\+10 is out of range"):
        reward([EXAMPLE], [["10"]])


def test_a_list_of_one_is_named_as_a_list(tmp_path):
    with pytest.raises(ConfigError, match=r"^rewards\.0\.function: "):
        Reward(weighted(tmp_path, SEVERAL, function="judge.py:nope"))


def test_one_of_several_that_cannot_be_loaded_is_named_by_its_place(tmp_path):
    with pytest.raises(ConfigError, match=r"^rewards\.1\.function: .* has no function 'nope'"):
        Reward(
            weighted(tmp_path, SEVERAL, function="judge.py:length"),
            weighted(tmp_path, SEVERAL, function="judge.py:nope"),
        )


def test_a_skipped_failure_leaves_none_and_its_message(tmp_path):
    text = "def reward(prompt, response, **row):\n    return float(response)\n"
    reward = Reward(written(tmp_path, text, on_error="skip"))
    judged = reward([EXAMPLE, EXAMPLE], [["1", "x"], ["y", "2"]])
    assert judged.rewards == [[1.0, None], [None, 2.0]]
    assert ["'x'" in judged.failures[0], "'y'" in judged.failures[1]] == [True, True]


def test_results_stand_in_the_order_of_the_responses(tmp_path, judge):
    # A call waits for the one after it, so the last response is judged first.
    text = (
        "import threading\n"
        "judged = [threading.Event() for _ in range(10)]\njudged[9].set()\n"
        "def reward(prompt, response, **row):\n"
        "    number = int(response)\n    assert judged[number + 1].wait(30)\n"
        "    judged[number].set()\n    return number\n"
    )
    names = [str(i) for i in range(1, 9)]
    assert judge(written(tmp_path, text), *names) == [float(name) for name in names]


def test_calls_that_wait_run_at_the_same_time(tmp_path, judge):
    # The barrier breaks unless eight calls meet at it.
    text = (
        "import threading\nbarrier = threading.Barrier(8)\n"
        "def reward(prompt, response, **row):\n    barrier.wait(30)\n    return 1\n"
    )
    assert judge(written(tmp_path, text), *["x"] * 8) == [1.0] * 8


def test_one_worker_is_the_calling_thread(tmp_path, judge):
    text = (
        "import threading\n"
        "def reward(prompt, response, **row):\n"
        "    return threading.current_thread() is threading.main_thread()\n"
    )
    assert judge(written(tmp_path, text, workers=1), "a", "b") == [1.0, 1.0]
    assert judge(written(tmp_path, text), "a", "b") == [0.0, 0.0]


def test_coroutines_are_awaited_together_in_one_loop(tmp_path):
    # Eight calls meet; the queue that the first step opened works in the second.
    text = (
        "import asyncio\nqueue, arrived = asyncio.Queue(), []\n"
        "async def reward(prompt, response, **row):\n"
        "    arrived.append(response)\n"
        "    if len(arrived) % 8 == 0:\n"
        "        for _ in range(8):\n            queue.put_nowait(1)\n"
        "    return await asyncio.wait_for(queue.get(), 30)\n"
    )
    reward = Reward(written(tmp_path, text))
    for _ in range(2):
        assert reward([EXAMPLE], [["x"] * 8]).rewards == [[1.0] * 8]

    async def has_a_loop():
        return reward([EXAMPLE], [["x"] * 8]).rewards

    assert asyncio.run(has_a_loop()) == [[1.0] * 8]
    reward.close()


def test_a_coroutine_that_ignores_its_cancellation_does_not_hold_up_the_end(tmp_path, monkeypatch):
    text = (
        "import asyncio\n"
        "async def reward(prompt, response, **row):\n"
        "    while response == 'stubborn':\n"
        "        try:\n            await asyncio.sleep(0.01)\n"
        "        except asyncio.CancelledError:\n            pass\n"
        "    return 1\n"
    )
    monkeypatch.setattr(coroutines, "CLOSE_SECONDS", 0.1)
    reward = Reward(written(tmp_path, text))

    def judge_a_stubborn_one():
        with contextlib.suppress(RewardError):  # once the judge is closed
            reward([EXAMPLE], [["stubborn"]])

    threading.Thread(target=judge_a_stubborn_one, daemon=True).start()
    assert reward([EXAMPLE], [["x"]]).rewards == [[1.0]]
    reward.close()


def test_workers_bound_the_coroutines_that_run_at_once(tmp_path, judge):
    text = (
        "import asyncio\nrunning = 0\n"
        "async def reward(prompt, response, **row):\n"
        "    global running\n    running += 1\n    most = running\n"
        "    await asyncio.sleep(0.01)\n    running -= 1\n    return most\n"
    )
    assert max(judge(written(tmp_path, text, workers=3), *["x"] * 9)) == 3


def test_processes_compute_and_load_the_function_themselves(tmp_path, judge):
    (tmp_path / "helper.py").write_text("def length(text):\n    return len(text)\n")
    text = (
        "import os\nfrom helper import length\n"
        "def reward(prompt, response, parent, **row):\n"
        "    if response == 'x':\n        raise ValueError('no x')\n"
        "    return length(response) + 100 * (os.getpid() != parent)\n"
    )
    example = Example({"prompt": "w1", "parent": os.getpid()}, "w1", [1], "rows.jsonl:7")
    settings = written(tmp_path, text, executor="process", workers=2, on_error="skip")
    assert judge(settings, "a", "bb", "x", "ccc", example=example) == [101, 102, None, 103]


def test_a_call_that_hangs_in_a_process_does_not_hold_up_the_end(tmp_path):
    begun = tmp_path / "begun"
    text = (
        "import os, time\nfrom pathlib import Path\n"
        "def reward(prompt, response, **row):\n"
        f"    Path({str(begun)!r}).write_text(str(os.getpid()) + '\\n')\n    time.sleep(3600)\n"
    )
    reward = Reward(written(tmp_path, text, executor="process", workers=1))

    def judge():
        with contextlib.suppress(RewardError):
            reward([EXAMPLE], [["x"]])

    thread = threading.Thread(target=judge, daemon=True)
    thread.start()
    wait_until(lambda: begun.exists() and begun.read_text().endswith("\n"))
    reward.close()
    wait_until(lambda: not thread.is_alive())
    wait_until(lambda: not Path(f"/proc/{begun.read_text().strip()}").exists())


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_batch_is_one_call(tmp_path, judge, kind):
    text = (
        f"{kind} reward(prompts, responses, rows):\n"
        "    assert prompts == ['w1'] * 3 and rows[0]['bonus'] == 0.25\n"
        "    return [len(response) + len(responses) for response in responses]\n"
    )
    assert judge(written(tmp_path, text, batch=True), "a", "bb", "ccc") == [4.0, 5.0, 6.0]


def test_a_batch_of_another_length_is_refused(tmp_path, judge):
    text = "def reward(prompts, responses, rows):\n    return [1.0]\n"
    with pytest.raises(RewardError, match="1 rewards for 2 responses"):
        judge(written(tmp_path, text, batch=True), "a", "b")


def test_a_batch_that_is_no_list_of_numbers_is_refused(tmp_path, judge, subtests):
    for kind in ["def", "async def"]:
        for returned, says in [
            ("dict.fromkeys(responses, 1.0)", "must be a list of numbers, not dict"),
            ("{1.0, 2.0}", "must be a list of numbers, not set"),
            ("'12'", "must be a list of numbers, not str"),
            ("None", "must be a list of numbers, not NoneType"),
            ("['1', '2']", "'1' is not a finite number"),
        ]:
            with subtests.test(returned=returned, says=says, kind=kind):
                text = f"{kind} reward(prompts, responses, rows):\n    return {returned}\n"
                with pytest.raises(RewardError, match=says):
                    judge(written(tmp_path, text, batch=True), "a", "b")


def test_a_file_that_changes_within_a_second_is_read_again(tmp_path, judge):
    for value in (3, 4, 5):
        text = f"def reward(prompt, response, **row):\n    return {value}\n"
        assert judge(written(tmp_path, text), "a") == [value]
    assert not (tmp_path / "__pycache__").exists()


def test_a_batch_may_be_an_array(tmp_path, judge):
    text = "import numpy\ndef reward(prompts, responses, rows):\n    return numpy.arange(2.0)\n"
    assert judge(written(tmp_path, text, batch=True), "a", "b") == [0.0, 1.0]


def test_an_async_function_runs_in_no_process(tmp_path):
    text = "async def reward(prompt, response, **row):\n    return 1\n"
    with pytest.raises(ConfigError, match=r"^reward\.executor: "):
        Reward(written(tmp_path, text, executor="process"))


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 2},
        {"batch": True},
        {"function": "a:b", "batch": True, "workers": 2},
        {"function": "a:b", "batch": True, "executor": "process"},
    ],
)
def test_ways_to_call_that_exclude_each_other_are_refused(settings):
    with pytest.raises(ValueError, match="batch"):
        RewardSettings(**settings)


def test_a_column_named_response_is_called_row_response(tmp_path, judge):
    text = "def reward(prompt, response, row_response, **row):\n    return row_response == 'gold'\n"
    example = Example({"prompt": "w1", "response": "gold"}, "w1", [1])
    assert judge(written(tmp_path, text), "mine", example=example) == [1.0]


def test_messages_reach_the_function_as_they_are(tmp_path, judge):
    text = "def reward(prompt, response, **row):\n    return prompt[0]['content'] == 'w3'\n"
    example = Example({"messages": [{"role": "user", "content": "w3"}]}, "[...]", [3])
    assert judge(written(tmp_path, text), "x", example=example) == [1.0]


def test_a_file_imports_its_siblings_and_they_hide_nothing(tmp_path, judge):
    (tmp_path / "siblings.py").write_text("value = 0.5\n")
    (tmp_path / "json.py").write_text("raise ImportError('hidden')\n")
    text = (
        "def reward(prompt, response, **row):\n"
        "    import siblings, json\n    return siblings.value\n"
    )
    assert judge(written(tmp_path, text), "x") == [0.5]


def test_modules_are_looked_up_in_the_folder_of_the_run_file(tmp_path, judge):
    (tmp_path / "my_rewards.py").write_text("def short(prompt, response, **row):\n    return 0.5\n")
    settings = RewardSettings(function="my_rewards:short", python_path=tmp_path)
    assert judge(settings, "x") == [0.5]
    with pytest.raises(ConfigError) as caught:
        Reward(RewardSettings(function="no_such_module:f", python_path=tmp_path))
    assert str(tmp_path) in caught.value.hint


DEMO = REPOSITORY / "examples/sums/run.yaml"


def test_the_demo_counts_an_answer_where_one_is_given(subtests):
    for response, answer in [
        ("7", "7"),
        ("7.", "7"),
        ("**7**", "7"),
        (" -3\n", "-3"),
        ("4 + 3 = 7", "7"),
        ("4 + 3 =7.", "7"),
        ("The sum of 4 and 3 is 7.", "7"),
        ("The answer to 4 - 7 is: -3.", "-3"),
        ("The answer is **12**.", "12"),
        ("Answer: 12", "12"),
        ("4 plus 3 equals 7", "7"),
        ("To find 8 - 4, we simply subtract", ""),
        ("To find the sum of 4 and 3, we", ""),
        ("4 + 3 =", ""),
        ("4 + 3 is the same as 3 +", ""),
        ("8 - 4 is 8 minus", ""),
        ("The answer is 8 - 4", ""),
        ("4, 3", ""),
        ("= 3.5", ""),
    ]:
        with subtests.test(response=response, answer=answer):
            pattern = yaml.safe_load(DEMO.read_text())["reward"]["answer_pattern"]
            assert answer_extractor(pattern)(response) == answer


def test_the_soft_overlong_punishment_is_that_of_the_paper(subtests):
    """With L_max = 20480 and L_cache = 4096, as in DAPO's experiments."""
    for length, punishment in [
        (1, 0.0),
        (16384, 0.0),
        (16385, -1 / 4096),
        (18432, -0.5),
        (20480, -1.0),
        (20481, -1.0),
    ]:
        with subtests.test(length=length, punishment=punishment):
            buffer = OverlongBufferSettings(len=4096)
            assert overlong_punishment(length, 20480, buffer) == punishment
            half = OverlongBufferSettings(len=4096, penalty_factor=0.5)
            assert overlong_punishment(length, 20480, half) == punishment / 2


def test_a_buffer_may_hold_the_whole_response():
    buffer = OverlongBufferSettings(len=4)
    assert [overlong_punishment(n, 4, buffer) for n in range(5)] == [0, -0.25, -0.5, -0.75, -1]
