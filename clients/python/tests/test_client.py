"""Clients against fake servers: errors, retries, deadlines."""

import asyncio
import time

import fakes
import pytest

from tandem import (
    AsyncCriticClient,
    AsyncRolloutClient,
    AsyncTrainerClient,
    CriticClient,
    RetryPolicy,
    RolloutClient,
    TrainerClient,
    requests,
)
from tandem.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotImplementedByServerError,
    UnavailableError,
)
from tandem.requests import Prompt, SupervisedSample

QUICK = RetryPolicy(attempts=3, initial_seconds=0.01)
SAMPLES = [SupervisedSample([1], [2, 3])]


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
    world.failures = [
        fakes.error_status(9, "version 3, not 2", reason="STALE_POLICY_VERSION", request_id="abc")
    ]
    with TrainerClient(address) as client, pytest.raises(FailedPreconditionError) as caught:
        client.info()
    error = caught.value
    assert (error.reason, error.request_id) == ("STALE_POLICY_VERSION", "abc")
    assert "GetServerInfo" in str(error.hint)
    assert error.describe()["code"] == "FAILED_PRECONDITION"


def test_retries_keep_every_id_and_stop(world, address):
    world.failures = [fakes.error_status(14, "busy"), fakes.error_status(8, "full")]
    with TrainerClient(address, retry=QUICK) as client:
        reply = client.train_step(SAMPLES, run_id="r", step=1, expected_version=0)
    ids = [request_id for method, request_id in world.calls if method == "TrainStep"]
    assert len(ids) == 3
    assert len(set(ids)) == 1
    assert reply.report.policy_version == 1

    world.failures = [fakes.error_status(14, "busy")] * 3
    with TrainerClient(address, retry=QUICK) as client, pytest.raises(UnavailableError):
        client.train_step(SAMPLES, run_id="r", step=2, expected_version=1)


def test_a_repeated_request_is_answered_from_the_table(address):
    with TrainerClient(address) as client:
        first, second = (
            client.train_step(SAMPLES, run_id="r", step=1, expected_version=0, request_id="x")
            for _ in range(2)
        )
    assert not first.replayed
    assert second.replayed
    assert first.report == second.report


def test_retry_waits_as_long_as_the_server_wishes(world, address):
    world.failures = [fakes.error_status(8, "full", retry_seconds=0.3)]
    start = time.monotonic()
    with TrainerClient(address, retry=QUICK) as client:
        client.info()
    assert time.monotonic() - start >= 0.3


def test_other_failures_are_not_tried_again(world, address):
    world.failures = [fakes.error_status(3, "no")]
    with TrainerClient(address, retry=QUICK) as client, pytest.raises(InvalidArgumentError):
        client.info()
    assert len(world.calls) == 1


def test_unreachable_and_unimplemented(address):
    with RolloutClient("127.0.0.1:1", retry=QUICK) as client:
        assert client.health() == "UNREACHABLE"
        with pytest.raises(UnavailableError, match="tandem up"):
            client.info()
    with RolloutClient(address) as client:
        assert client.health() == "SERVING"
        with pytest.raises(NotImplementedByServerError):
            client.pause()


async def test_async_clients_do_the_same(world, address):
    with RolloutClient(address) as client:
        expected = client.generate(prompts())
    world.cut_streams = 1
    async with AsyncRolloutClient(address, retry=QUICK) as client:
        assert await client.generate(prompts()) == expected
        assert await client.health() == "SERVING"
    world.failures = [fakes.error_status(14, "busy")]
    async with AsyncTrainerClient(address, retry=QUICK) as client:
        reply = await client.train_step(SAMPLES, run_id="r", step=1, expected_version=0)
        assert reply.report.policy_version == 1
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
def test_async_clients_have_the_same_methods(plain, asynchronous):
    def methods(client):
        return {name for name in vars(client) if not name.startswith("_")} - {"open_stream"}

    assert methods(asynchronous) == methods(plain)


async def test_an_async_stream_takes_messages_while_it_runs(address):
    async def messages():
        for prompt in prompts():
            yield requests.submit([prompt.named(0)])
            await asyncio.sleep(0)

    async with AsyncRolloutClient(address, retry=QUICK) as client:
        events = [event async for event in client.stream(messages())]
    assert any(event.HasField("finished") for event in events)
