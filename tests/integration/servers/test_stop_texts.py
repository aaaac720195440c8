"""Stop texts over several tokens end a response on the server, whoever writes and drafts it."""

from __future__ import annotations

import dataclasses

import pytest
from harness import TANDEM
from tandem._proto.types.v1 import trajectory_pb2
from tandem.models.tokenizer import TextCodec
from tandem.rpc.requests import Prompt

SAMPLING = {"max_tokens": 40, "ignore_eos": True}


def expected(codec: TextCodec, ids: list[int], stop: str) -> list[int]:
    """The response up to the token that completes the text, found by the client's tokenizer."""
    growing, text = codec.growing(special=False), ""
    for count, token in enumerate(ids, start=1):
        text += growing.add(token)
        if stop in text:
            return ids[:count]
    raise AssertionError(f"{stop!r} is not in the response")


@pytest.mark.parametrize("tandem", [{"enabled": False}, *TANDEM.values()])
@pytest.mark.parametrize("method", ["none", "ngram", "junior"])
def test_a_response_ends_with_the_token_that_completes_a_text(rollout, models, tandem, method):
    codec = TextCodec(models.tokenizer)
    drafts = {} if method == "none" else {"method": method, "prompt_lookup_min": 1}
    prompt = Prompt([7, 8, 9, 10] * 4, seed=3, sampling=SAMPLING, tandem=tandem, speculative=drafts)
    [[whole]] = rollout.generate([prompt])
    ids = list(whole.response_token_ids)
    text = codec.decode(ids)
    # A random model also writes bytes that are no characters, which no text has.
    windows = [
        [w for w in (text[i : i + n] for i in range(len(text) - n)) if "\ufffd" not in w]
        for n in (2, 3, 4)
    ]
    stops = [several[len(several) // 2] for several in windows if several]
    assert len(stops) >= 2
    for stop in stops:
        sampling = SAMPLING | {"stop": ["not there", stop]}
        [[ended]] = rollout.generate([dataclasses.replace(prompt, sampling=sampling)])
        assert list(ended.response_token_ids) == expected(codec, ids, stop)
        assert ended.finish_reason == trajectory_pb2.FINISH_REASON_STOP
        assert list(ended.sampling.stop) == ["not there", stop]
