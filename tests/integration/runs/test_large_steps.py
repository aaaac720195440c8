"""Steps that do not fit into one message."""

from __future__ import annotations

import harness
from harness import TANDEM, prompts, wait_until
from tandem.errors import from_status
from tandem.rpc import requests
from tandem.rpc.requests import Prompt
from tandem.rpc.transport import MAX_SEND_BYTES


def test_a_step_in_many_messages_gives_the_bits_of_one_message(rollout, monkeypatch):
    step = prompts(4, TANDEM["word"], num_samples=3, return_other_logprobs=True)
    whole = rollout.generate(step)
    monkeypatch.setattr(requests, "_PROMPT_BYTES", 150)
    assert len(requests.submit(p.named(i) for i, p in enumerate(step))) > 1
    assert rollout.generate(step) == whole


def test_more_prompts_than_a_message_holds_are_admitted_together(models, tmp_path):
    step = [
        Prompt([200] * 100, seed=i, sampling={"max_tokens": 1}, request_id=f"{i}")
        for i in range(20_000)
    ]
    sizes = [message.ByteSize() for message in requests.submit(step)]
    assert sum(sizes) > MAX_SEND_BYTES
    with (
        harness.cluster(tmp_path, models, rollout={"max_queue": len(step)}) as running,
        harness.rollout_client(running) as client,
    ):
        [server] = running.rollouts
        client.pause()
        with client.open_stream() as stream:
            stream.submit(step)
            wait_until(lambda: harness.gauge(server, "tandem_sequences_waiting") == len(step))
        client.resume()
        wait_until(lambda: harness.gauge(server, "tandem_sequences_waiting") == 0)


def test_a_batch_that_never_ends_is_refused_as_a_whole(rollout):
    [message] = requests.submit([p.named(i) for i, p in enumerate(prompts(2, TANDEM["word"]))])
    message.submit.more_follow = True
    failures = [from_status(event.failed.status) for event in rollout.stream([message])]
    assert [failure.field for failure in failures] == ["submit.more_follow"] * 2
