"""Clients against fake servers: errors, retries, deadlines."""

import asyncio
import inspect
import threading
from contextlib import ExitStack

import fakes
import grpc
import pytest
from fakes import wait_until

from tandem import (
    AsyncCriticClient,
    AsyncRolloutClient,
    AsyncTrainerClient,
    CriticClient,
    RetryPolicy,
    RolloutClient,
    TrainerClient,
)
from tandem.errors import (
    ConfigError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotImplementedByServerError,
    ResourceExhaustedError,
    RpcError,
    UnavailableError,
)
from tandem.rpc import requests, retry, transport
from tandem.rpc.requests import Prompt, ResponseSoFar, SupervisedSample
from tandem.rpc.retry import ONCE, Retries
from tandem.rpc.transport import MAX_SEND_BYTES

QUICK = RetryPolicy(initial_seconds=0.01)
SAMPLES = [SupervisedSample([1], [2, 3])]


class Clock:
    """The time of the transport: it passes in waits alone."""

    def __init__(self):
        self.now = 0.0
        self.waits = []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (retry, transport):
        monkeypatch.setattr(module, "time", clock)
    return clock


def prompts(count=3, samples=2):
    return [
        Prompt([1, 2], seed=i, num_samples=samples, sampling={"max_tokens": 5})
        for i in range(count)
    ]


def test_generate_orders_prompts_and_samples(address):
    with RolloutClient(address) as client:
        groups = client.generate(prompts())
    assert [[t.sample_index for t in group] for group in groups] == [[0, 1]] * 3
    assert [group[0].seed for group in groups] == [0, 1, 2]


def test_a_broken_stream_is_taken_up_again_with_the_missing_prompts(world, address):
    with RolloutClient(address) as client:
        whole = client.generate(prompts())
    world.cut_streams = 2
    with RolloutClient(address, retry=QUICK) as client:
        assert client.generate(prompts()) == whole


def test_a_refused_prompt_raises_with_its_field(address):
    bad = Prompt([1], sampling={"max_tokens": 5, "top_k": -1}, request_id="p7")
    with RolloutClient(address) as client, pytest.raises(InvalidArgumentError) as caught:
        client.generate([bad])
    assert caught.value.field == "sampling.top_k"
    assert caught.value.request_id == "p7"


def test_errors_carry_reason_hint_and_request_id(world, address):
    world.failures = [fakes.error_status(9, "version 3, not 2", reason="STALE_POLICY_VERSION")]
    with TrainerClient(address) as client, pytest.raises(FailedPreconditionError) as caught:
        client.info()
    error = caught.value
    [(_, request_id)] = world.calls
    assert (error.reason, error.request_id) == ("STALE_POLICY_VERSION", request_id)
    assert "GetServerInfo" in str(error.hint)
    assert error.describe()["code"] == "FAILED_PRECONDITION"


def test_retries_keep_every_id_and_stop(world, address):
    world.failures = [
        fakes.error_status(14, "busy"),
        fakes.error_status(8, "full", retry_seconds=0.01),
    ]
    with TrainerClient(address, retry=QUICK) as client:
        reply = client.train_step(SAMPLES, run_id="r", step=1, expected_version=0)
    ids = [request_id for method, request_id in world.calls if method == "TrainStep"]
    assert len(ids) == 3
    assert len(set(ids)) == 1
    assert reply.report.weights.version == 1


def test_a_call_waits_for_its_server_as_long_as_the_policy_says(world, address, clock, caplog):
    world.failures = [fakes.error_status(14, "busy")] * 1000
    with TrainerClient(address) as client, pytest.raises(UnavailableError):
        client.info()
    assert sum(clock.waits) == pytest.approx(120)
    assert len(world.calls) == len(clock.waits) + 1
    *waits, last = clock.waits
    bounds = [min(5, 0.2 * 2**n) for n in range(len(waits))]
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))
    assert last <= 5
    assert len(set(clock.waits)) > len(clock.waits) / 2
    # It is said once what the client waits for.
    [said] = caplog.messages
    assert said == "GetServerInfo: busy: trying again, for up to 120 s"
    del world.failures[2:]
    with TrainerClient(address) as client:
        client.info()
    assert caplog.messages[-1] == f"{address} answers again"


def test_the_time_in_which_a_server_works_is_no_time_of_waiting(clock):
    failure = UnavailableError("gone", code=grpc.StatusCode.UNAVAILABLE)
    retries = Retries(RetryPolicy(seconds=10))
    assert retries.wait_after(failure) is not None
    clock.now += 1000
    retries.worked(1000)
    assert retries.wait_after(failure) is not None
    clock.now += 11
    assert retries.wait_after(failure) is None
    retries.progress()
    assert retries.wait_after(failure) is not None


def test_a_hidden_status_is_asked_for_at_once_and_then_with_waits():
    failure = RpcError("Internal error from Core", code=grpc.StatusCode.INTERNAL)
    retries = Retries(RetryPolicy(seconds=10))
    waits = [retries.wait_after(failure) for _ in range(10)]
    assert waits[:8] == [0] * 8
    assert all(waits[8:])
    once = Retries(ONCE)
    assert [once.wait_after(failure) for _ in range(9)] == [0] * 8 + [None]


def test_without_seconds_there_is_one_attempt(world, address, clock):
    world.failures = [fakes.error_status(14, "busy")] * 2
    with TrainerClient(address, retry=ONCE) as client, pytest.raises(UnavailableError):
        client.info()
    assert len(world.calls) == 1
    assert clock.waits == []


def test_a_sample_is_progress_and_starts_the_time_again(world, address, clock):
    # Every attempt brings one sample, and fails; the waits are longer than the policy's seconds.
    world.cut_streams = 9
    policy = RetryPolicy(seconds=1, initial_seconds=0.9)
    with RolloutClient(address, retry=policy) as client:
        groups = client.generate(prompts(count=5, samples=2))
    assert [len(group) for group in groups] == [2] * 5
    assert sum(clock.waits) > 2


def test_a_server_that_cancels_a_call_because_it_ends_is_asked_again(world, address):
    world.failures = [fakes.error_status(1, "the server ends")]
    with TrainerClient(address, retry=QUICK) as client:
        client.info()
    assert len(world.calls) == 2


def test_a_server_that_restarts_is_found_again_by_the_same_client(world, caplog):
    before, answers = ExitStack(), []
    address = before.enter_context(fakes.serve(world))
    with TrainerClient(address, retry=QUICK) as client:
        client.info()
        before.close()
        step = {"run_id": "r", "step": 1, "expected_version": 0}
        work = threading.Thread(target=lambda: answers.append(client.train_step(SAMPLES, **step)))
        work.start()
        wait_until(lambda: any("trying again" in message for message in caplog.messages))
        with fakes.serve(world, address=address):
            work.join()
    assert answers[0].report.weights.version == 1


def test_a_repeated_request_is_answered_from_the_table(address):
    with TrainerClient(address) as client:
        first, second = (
            client.train_step(SAMPLES, run_id="r", step=1, expected_version=0, request_id="x")
            for _ in range(2)
        )
    assert not first.replayed
    assert second.replayed
    assert first.report == second.report


def test_retry_waits_as_long_as_the_server_wishes(world, address, clock):
    world.failures = [fakes.error_status(8, "full", retry_seconds=300)]
    with TrainerClient(address, retry=QUICK) as client:
        client.info()
    assert clock.waits == [300]


def test_other_failures_are_not_tried_again(world, address):
    world.failures = [fakes.error_status(3, "no")]
    with TrainerClient(address, retry=QUICK) as client, pytest.raises(InvalidArgumentError):
        client.info()
    assert len(world.calls) == 1


def test_a_request_that_is_too_large_is_not_tried_again(world, address):
    world.failures = [fakes.error_status(8, "too large")]
    with TrainerClient(address, retry=QUICK) as client, pytest.raises(ResourceExhaustedError):
        client.info()
    assert len(world.calls) == 1


def test_an_export_is_not_tried_again(world, address):
    world.failures = [fakes.error_status(14, "going away")]
    with TrainerClient(address, retry=QUICK) as client, pytest.raises(UnavailableError):
        client.export_model("/tmp/model")
    assert len(world.calls) == 1


def test_an_open_stream_starts_before_its_first_prompt_and_ends_when_left(world, address):
    with RolloutClient(address) as client:
        with client.open_stream():
            wait_until(lambda: world.open_streams == 1)
            assert [method for method, _ in world.calls] == ["Generate"]
        wait_until(lambda: world.open_streams == 0)


@pytest.mark.parametrize("submitted", [0, 1])
def test_a_stream_without_unfinished_prompts_is_not_cancelled_when_left(world, address, submitted):
    with RolloutClient(address) as client:
        for _ in range(5):
            with client.open_stream() as stream:
                stream.submit([prompts()[0].named(0)] * submitted)
                finished = (event for event in stream if event.HasField("finished"))
                for _ in range(2 * submitted):
                    next(finished)
            wait_until(lambda: world.open_streams == 0)
    assert world.cut_calls == 0


def test_letting_go_of_an_open_stream_cancels_the_call_and_ends_its_thread(world, address):
    before = set(threading.enumerate())

    def readers():
        """The threads in which gRPC has served calls of this process since `before`."""
        return [t for t in set(threading.enumerate()) - before if t.name.endswith("(_run)")]

    with RolloutClient(address) as client:
        stream = client.open_stream()
        wait_until(lambda: world.open_streams == 1)
        assert readers()
        del stream
        wait_until(lambda: world.open_streams == 0)
        wait_until(lambda: not readers())


def test_a_call_that_ends_as_soon_as_it_is_open_is_seen_to_end(world, address):
    """The call may end before the fake server registers a callback for its end."""
    world.on_open = lambda context: wait_until(lambda: not context.is_active())
    with RolloutClient(address) as client:
        stream = client.open_stream()
        wait_until(lambda: world.open_streams == 1)
        del stream
        wait_until(lambda: world.open_streams == 0)


def test_events_outlive_the_stream_that_submits(address):
    with RolloutClient(address) as client:
        stream = client.open_stream()
        stream.submit([prompts()[0].named(0)])
        events = iter(stream)
        del stream
        assert sum(event.HasField("finished") for event in events) == 2


def test_leaving_a_stream_in_the_middle_cancels_the_call(world, address):
    with RolloutClient(address) as client:
        messages = iter(lambda: requests.submit([prompts()[0].named(0)])[0], None)
        for _ in client.stream(messages):
            assert world.open_streams == 1
            break
        wait_until(lambda: world.open_streams == 0)


@pytest.mark.parametrize(
    ("client_class", "role"), [(RolloutClient, "rollout"), (TrainerClient, "trainer")]
)
def test_an_unknown_service_asks_for_the_kind_of_server(world, address, client_class, role):
    # The reply of a C++ gRPC server to a call of a service that it does not have.
    world.failures = [fakes.error_status(12, "")]
    with client_class(address) as client, pytest.raises(NotImplementedByServerError) as caught:
        client.info()
    assert f"is this a {role} server" in caught.value.hint
    assert address in caught.value.hint


def test_an_unimplemented_feature_has_the_servers_message_and_no_hint(world, address):
    world.failures = [fakes.error_status(12, "handoff evaluation is not there yet")]
    with TrainerClient(address) as client, pytest.raises(NotImplementedByServerError) as caught:
        client.info()
    assert caught.value.hint is None


@pytest.mark.parametrize("change", [{"num_samples": 2**31}, {"token_ids": [2**31]}])
def test_a_prompt_that_does_not_fit_the_contract_is_refused_before_it_is_sent(
    world, address, change
):
    with RolloutClient(address) as client, pytest.raises(ConfigError, match="out of range"):
        client.generate([Prompt(**({"token_ids": [1]} | change))])
    assert world.calls == []


def test_a_batch_beyond_one_message_travels_in_several_and_is_answered_as_one(
    world, address, monkeypatch
):
    monkeypatch.setattr(requests, "_PROMPT_BYTES", 4000)
    # 3,000 bytes each: an id from 2^21 on takes four.
    large = [
        Prompt([2**21 + i] * 750, seed=i, sampling={"max_tokens": 3}, request_id=f"p{i}")
        for i in range(3)
    ]
    messages = requests.submit([*large, *prompts(1)])
    assert [len(message.submit.prompts) for message in messages] == [1, 1, 2]
    assert [message.submit.more_follow for message in messages] == [True, True, False]
    with RolloutClient(address) as client:
        groups = client.generate(large)
    assert [group[0].seed for group in groups] == [0, 1, 2]
    assert world.batches == [["p0", "p1", "p2"]]


def test_a_message_is_filled_up_to_the_largest_that_a_server_takes():
    small = [Prompt([1] * 5000, request_id=f"{i}") for i in range(1000)]
    sizes = [message.ByteSize() for message in requests.submit(small)]
    assert len(sizes) == 2
    assert MAX_SEND_BYTES - 6000 < sizes[0] <= MAX_SEND_BYTES


def test_a_prompt_that_no_message_holds_is_refused():
    [message] = requests.submit([Prompt([1] * (MAX_SEND_BYTES - 64))])
    assert message.ByteSize() <= MAX_SEND_BYTES
    too_long = Prompt([1] * MAX_SEND_BYTES, request_id="long")
    with pytest.raises(ConfigError, match=r"^prompt 'long': \d+ bytes, but a message holds"):
        requests.submit([too_long])


def test_two_prompts_with_one_request_id_are_refused(world, address):
    twins = [Prompt([1], request_id="a"), Prompt([2], request_id="a")]
    message = r"^prompts\[1\]\.request_id: 'a' is taken"
    with RolloutClient(address) as client, pytest.raises(ConfigError, match=message):
        client.generate(twins)
    assert world.calls == []


@pytest.mark.parametrize("value", ["a", [1.0], {"low": 0.1}])
def test_an_objective_that_does_not_fit_the_contract_is_named(value):
    with pytest.raises(ConfigError, match=r"^objective\.clip_ratio_low: "):
        requests.train_step(
            [], run_id="r", step=1, expected_version=0, objective={"clip_ratio_low": value}
        )


def test_an_unreachable_server_is_told_from_an_unimplemented_method(address):
    with RolloutClient("127.0.0.1:1", retry=ONCE) as client:
        assert client.health() == "UNREACHABLE"
        with pytest.raises(UnavailableError, match="tandem up"):
            client.info()
    with RolloutClient(address) as client:
        assert client.health() == "SERVING"
        with pytest.raises(NotImplementedByServerError):
            client.pause()


def test_a_host_without_an_address_is_named_in_plain_words():
    client = RolloutClient("no.such.host.invalid:7701", retry=ONCE)
    with client, pytest.raises(UnavailableError) as caught:
        client.info()
    assert caught.value.message.startswith("cannot find the host of no.such.host.invalid:7701: ")


async def test_async_clients_resume_streams_and_retry_calls_as_plain_ones_do(world, address):
    with RolloutClient(address) as client:
        expected = client.generate(prompts())
    world.cut_streams = 1
    async with AsyncRolloutClient(address, retry=QUICK) as client:
        assert await client.generate(prompts()) == expected
        assert await client.health() == "SERVING"
    world.failures = [fakes.error_status(14, "busy")]
    async with AsyncTrainerClient(address, retry=QUICK) as client:
        reply = await client.train_step(SAMPLES, run_id="r", step=1, expected_version=0)
        assert reply.report.weights.version == 1
        with pytest.raises(FailedPreconditionError):
            await client.train_step(SAMPLES, run_id="r", step=2, expected_version=0)


@pytest.mark.parametrize(
    ("plain", "asynchronous"),
    [
        (RolloutClient, AsyncRolloutClient),
        (TrainerClient, AsyncTrainerClient),
        (CriticClient, AsyncCriticClient),
    ],
)
def test_what_an_async_client_awaits_a_plain_client_returns(plain, asynchronous):
    awaited = dict(inspect.getmembers(asynchronous, inspect.iscoroutinefunction))
    shared = {name for name in awaited if not name.startswith("_")} - {"close"}
    assert "info" in shared
    assert {name for name in shared if getattr(plain, name).__wrapped__ != awaited[name]} == set()


async def test_an_async_stream_takes_messages_while_it_runs(address):
    async def messages():
        for prompt in prompts():
            [message] = requests.submit([prompt.named(0)])
            yield message
            await asyncio.sleep(0)

    async with AsyncRolloutClient(address, retry=QUICK) as client:
        events = [event async for event in client.stream(messages())]
    assert any(event.HasField("finished") for event in events)


async def test_an_async_stream_starts_at_once_and_ends_when_left(world, address):
    async def messages():
        while True:
            [message] = requests.submit([prompts()[0].named(0)])
            yield message
            await asyncio.sleep(0.01)

    async def happens(condition):
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)

    async with AsyncRolloutClient(address, retry=QUICK) as client:
        events = client.stream(messages())
        await happens(lambda: world.open_streams == 1)
        async for _ in events:
            break
        await events.aclose()
        await happens(lambda: world.open_streams == 0)


def test_a_prompt_continues_a_response_and_names_its_sample(world, address):
    sampling = {"max_tokens": 4}
    with RolloutClient(address) as client:
        [group] = client.generate([Prompt([5], seed=3, num_samples=2, sampling=sampling)])
        so_far = ResponseSoFar.after(group[1], [9])
        asked = []
        world.on_prompt = asked.append
        [[turn]] = client.generate(
            [Prompt([5], seed=3, sampling=sampling, response=so_far, first_sample_index=1)]
        )
    assert (turn.sample_index, turn.response_offset) == (1, len(so_far.token_ids))
    [prompt] = asked
    assert list(prompt.response.token_ids) == so_far.token_ids
    assert list(prompt.response.authorship_mask) == so_far.authorship_mask
    # A response that begins has none.
    assert not Prompt([5]).message().HasField("response")


def test_samples_of_any_first_index_are_in_order(address):
    with RolloutClient(address) as client:
        [group] = client.generate([Prompt([5], num_samples=3, first_sample_index=4)])
    assert [one.sample_index for one in group] == [4, 5, 6]


def test_publish_raises_where_a_server_did_not_get_the_weights(world, address):
    with TrainerClient(address) as trainer, RolloutClient(address) as rollout:
        assert trainer.publish([rollout]).digest == "d"
        world.published = world.version + 1
        with pytest.raises(FailedPreconditionError, match=f"{world.targets[0]}: stale") as caught:
            trainer.publish([rollout])
        assert caught.value.reason == "STALE_WEIGHT_VERSION"
        assert trainer.publish([rollout], allow_rollback=True).version == world.version
        with pytest.raises(ConfigError, match="advertise the same address"):
            trainer.publish([rollout, rollout])

    async def publish():
        async with AsyncTrainerClient(address) as trainer, AsyncRolloutClient(address) as rollout:
            world.published = 0
            assert (await trainer.publish([rollout])).version == world.version
            world.published = world.version + 1
            with pytest.raises(FailedPreconditionError):
                await trainer.publish([rollout])

    asyncio.run(publish())
