"""Calls of environments: what they give, and what becomes of those that take too long."""

import asyncio
import threading
import time

import fakes
import pytest

from tandem.environments.calls import Call, CallsInThreads
from tandem.environments.live import MOST_SAID, LiveEnvironment, Said
from tandem.errors import EnvironmentFailedError
from tandem.rewards.judges.cases import Failure, FailureKind


class Several:
    """An environment whose tools end in several ways."""

    def __init__(self):
        self.thread = threading.get_ident()
        self.cancelled = False
        self.closed = False

    def reset(self, **row):
        return row.get("text")

    def number(self, x):
        return {"x": x}

    async def loop(self):
        return str(id(asyncio.get_running_loop()))

    async def wait(self):
        try:
            await asyncio.sleep(60)
        finally:
            self.cancelled = True

    def compute(self):
        while True:
            pass

    def leave(self):
        raise SystemExit(3)

    def flood(self, length):
        return "x" * length

    def refuse(self, length):
        raise EnvironmentFailedError("x" * length)

    async def get_reward(self):
        return "much"

    async def close(self):
        self.closed = True


@pytest.fixture
def calls():
    made = CallsInThreads("test", 4, 0.5)
    yield made
    made.close()


@pytest.fixture
def live():
    one = LiveEnvironment(Several)
    one.reset({})
    return one


def new_threads(before):
    return [one for one in set(threading.enumerate()) - before if one.name == "judge"]


def given(calls, live, run):
    return calls.start(Call(live, lambda _: run(), "rows:1")).result(20)


def test_what_a_tool_returns_goes_to_the_model_as_text(live):
    assert live.tool("number", {"x": 1}).text == '{"x": 1}'
    assert live.tool("leave", {}).text == "Error: SystemExit: 3"
    assert live.tool("leave", {}).tool_failed


def test_coroutines_of_an_environment_share_an_event_loop_of_its_own(calls, live):
    other = LiveEnvironment(Several)
    other.reset({})
    loops = [given(calls, one, lambda one=one: one.tool("loop", {})).text for one in (live,) * 3]
    assert len(set(loops)) == 1
    assert other.tool("loop", {}).text not in loops


def test_a_coroutine_that_takes_too_long_is_cancelled(calls, live):
    failure = given(calls, live, lambda: live.tool("wait", {}))
    assert isinstance(failure, Failure)
    assert failure.timed_out
    fakes.wait_until(lambda: live._made.cancelled)


def test_a_tool_that_computes_too_long_ends_and_others_go_on(calls, live):
    before = set(threading.enumerate())
    others = [LiveEnvironment(Several) for _ in range(8)]
    for one in others:
        one.reset({})
    hung = [calls.start(Call(one, lambda one: one.tool("compute", {}), "")) for one in others]
    assert all(one.result(20).timed_out for one in hung)
    assert given(calls, live, lambda: live.tool("number", {"x": 2})).text == '{"x": 2}'
    # The threads of the others have ended: those that are left wait for calls.
    fakes.wait_until(lambda: len(new_threads(before)) <= 4)


def test_who_says_too_much_fails_alone(calls, live):
    assert len(live.tool("flood", {"length": MOST_SAID}).text) == MOST_SAID
    failure = given(calls, live, lambda: live.tool("flood", {"length": MOST_SAID + 1}))
    assert isinstance(failure, Failure)
    assert failure.kind == FailureKind.FLOOD
    assert "flood() said 1,048,577 characters" in failure.what


def test_a_message_without_end_is_cut(calls, live):
    failure = given(calls, live, lambda: live.tool("refuse", {"length": 1 << 22}))
    assert failure.what.startswith("EnvironmentFailedError: xxx")
    assert "4,194,304 characters" in failure.what
    assert len(failure.what) + len(failure.trace) < 1 << 15


def test_a_call_is_timed(calls, live):
    slow = given(calls, live, lambda: (time.sleep(0.05), Said("x"))[1])
    assert 0.05 <= slow.seconds < 0.5


def test_a_reward_that_is_no_number_is_a_failure(live):
    assert "'much' is not a finite number" in live.reward().failure


def test_text_of_reset_is_text_or_nothing():
    live = LiveEnvironment(Several)
    assert live.reset({"text": "Go."}) == Said("Go.")
    assert live.reset({"text": ""}) == live.reset({}) == Said()
    with pytest.raises(TypeError, match="neither text nor images nor None"):
        live.reset({"text": 5})


def test_an_environment_is_closed_with_its_loop(live):
    made = live._made
    live.tool("loop", {})
    live.close()
    assert made.closed
    assert live._loop.is_closed()


def test_what_a_call_gave_is_recorded_without_what_is_as_by_default():
    assert Said("x").record() == {"text": "x"}
    one = Said.failed(Failure("why", "trace", kind=FailureKind.TIMEOUT))
    assert Said(**one.record()) == one
    assert one.record() == {"failure": "why\ntrace", "failure_kind": "timeout"}
