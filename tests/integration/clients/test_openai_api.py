"""`tandem serve-openai` on real servers, seen through OpenAI's own client."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import harness
import numpy as np
import openai
import pytest
from tandem.models.tokenizer import TextCodec
from tandem.rpc.requests import Prompt
from tandem.rpc.seeds import prompt_seed
from tandem.rpc.wire import from_tensor

TEXT = "the sum of two and three is"
CHAT = [{"role": "user", "content": "one two three"}]


@pytest.fixture(scope="module")
def cluster(models, tmp_path_factory):
    """A rollout server whose tokenizer has a chat template."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}answer:"
    (models.senior / "chat_template.jinja").write_text(template)
    with harness.cluster(tmp_path_factory.mktemp("openai"), models) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the command's server."""
    with (
        harness.openai_server(cluster.rollouts[0].address) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


@pytest.fixture
def rollout(cluster):
    with harness.rollout_client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def codec(models):
    return TextCodec(models.tokenizer)


def complete(client, prompt=TEXT, **fields):
    values = {"model": "senior", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    return client.completions.create(**values | fields)


def chat(client, **fields):
    values = {"model": "senior", "messages": CHAT, "max_completion_tokens": 12, "seed": 3}
    return client.chat.completions.create(**values | fields)


def senior_logprobs(rollout, ids, temperature=1.0):
    reply = rollout.score([(ids, 1)], temperature=temperature)
    return from_tensor(reply.sequences[0].senior_logprobs)


def test_the_model_is_listed_with_its_length(client):
    [model] = client.models.list().data
    assert (model.id, model.max_model_len) == ("senior", 128)
    assert client.models.retrieve("senior").id == "senior"


def test_the_example_of_the_page_prints_an_answer(client, capsys):
    page = (harness.REPOSITORY / "docs/guides/apis/openai.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    here = {"http://127.0.0.1:8000/v1": str(client.base_url), "SmolLM2-135M-Instruct": "senior"}
    for place, own in here.items():
        program = program.replace(place, own)
    exec(program, {})
    assert capsys.readouterr().out.strip()


def test_a_completion_is_that_of_tandem_generate(client, rollout, codec):
    for temperature in (0, 1):
        prompt = Prompt(
            codec.encode(TEXT),
            seed=prompt_seed(5, 0, 0, "generate"),
            sampling={"max_tokens": 12, "temperature": temperature},
            tandem={"enabled": False},
        )
        [[trajectory]] = rollout.generate([prompt])
        answer = complete(client, temperature=temperature, seed=5)
        assert answer.choices[0].text == codec.decode(trajectory.response_token_ids)
        assert answer.usage.completion_tokens == len(trajectory.response_token_ids)
        assert answer.usage.prompt_tokens == len(prompt.token_ids)


def test_texts_and_ids_are_the_same_prompt(client, codec):
    texts = [TEXT, "one two"]
    by_text = [choice.text for choice in complete(client, texts).choices]
    assert [choice.text for choice in complete(client, list(map(codec.encode, texts))).choices] == (
        by_text
    )
    assert complete(client, codec.encode(TEXT)).choices[0].text == by_text[0]


def test_chat_goes_through_the_template(client, codec):
    text = complete(client, codec.chat(CHAT)).choices[0].text
    answer = chat(client, temperature=0)
    assert answer.choices[0].message.content == text
    assert answer.usage.prompt_tokens == len(codec.chat(CHAT))


def test_samples_differ_and_a_seed_repeats_them(client):
    first, second = (
        [choice.message.content for choice in chat(client, n=3).choices] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 3


@pytest.mark.parametrize("fields", [{}, {"stop": "e"}, {"n": 3}, {"n": 2, "logprobs": True}])
def test_a_stream_of_chat_holds_the_whole_answer(client, fields):
    whole = chat(client, **fields)
    texts, ends, numbers = {}, {}, {}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in chat(client, **fields, **options):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            ends[choice.index] = choice.finish_reason
            numbers[choice.index] = choice.logprobs
    assert usage == whole.usage
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    for choice in whole.choices:
        assert (numbers[choice.index] is None) == (choice.logprobs is None)
        if choice.logprobs is not None:
            streamed = [token.model_dump() for token in numbers[choice.index].content]
            assert streamed == [token.model_dump() for token in choice.logprobs.content]


def test_a_stream_of_a_completion_holds_the_whole_text(client):
    parts = [chunk.choices[0].text for chunk in complete(client, echo=True, stream=True)]
    assert "".join(parts) == complete(client, echo=True).choices[0].text


def test_a_stop_text_of_several_tokens_ends_the_response(client, codec):
    whole = complete(client, temperature=1, seed=1, max_tokens=40).choices[0].text
    stop = whole[11:16]
    assert len(codec.encode(stop)) > 1
    cut = complete(client, temperature=1, seed=1, max_tokens=40, stop=["never this", stop])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 40


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echoed_logprobs_are_those_of_score(client, rollout, codec, max_tokens):
    ids = codec.encode(TEXT)
    answer = complete(client, [ids], max_tokens=max_tokens, echo=True, logprobs=1)
    numbers = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith(TEXT)
    assert len(numbers.token_logprobs) == len(ids) + max_tokens
    assert numbers.token_logprobs[0] is numbers.top_logprobs[0] is None
    expected = senior_logprobs(rollout, ids)
    np.testing.assert_array_equal(np.float32(numbers.token_logprobs[1 : len(ids)]), expected)
    for offset, token in zip(numbers.text_offset, numbers.tokens, strict=True):
        assert answer.choices[0].text[offset:].startswith(token)


def test_alternatives_are_those_of_transformers(client, models, codec):
    import torch
    from transformers import AutoModelForCausalLM

    ids = codec.encode(harness.CORPUS[1])
    numbers = complete(client, ids, max_tokens=0, echo=True, logprobs=5).choices[0].logprobs
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(models.senior)(torch.tensor([ids])).logits
    best, places = torch.log_softmax(logits[0, :-1].float(), -1).topk(5)
    written = zip(numbers.top_logprobs[1:], ids[1:], numbers.tokens[1:], strict=True)
    for (top, own, text), values, likely in zip(
        written, best.tolist(), places.tolist(), strict=True
    ):
        names = [text if one == own else codec.token_texts([one])[0] for one in likely]
        # The likeliest of several ids with one text.
        expected = dict(zip(names[::-1], values[::-1], strict=True))
        assert top.keys() == expected.keys() | {text}
        for name, value in expected.items():
            assert top[name] == pytest.approx(value, abs=1e-4)


def test_greedy_tokens_are_the_likeliest(client):
    tokens = chat(client, temperature=0, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert len(tokens) == 12
    for token in tokens:
        [top] = token.top_logprobs
        assert (top.token, top.logprob) == (token.token, token.logprob)
        assert bytes(token.bytes).decode() == token.token


def test_logprobs_are_those_at_temperature_1(client, rollout, codec):
    ids = codec.encode(TEXT)
    answer = complete(client, ids, temperature=0.5, seed=2, logprobs=0).choices[0]
    # The text of a tiny random model need not be encoded as it was written.
    reference = rollout.generate(
        [
            Prompt(
                ids,
                seed=prompt_seed(2, 0, 0, "generate"),
                sampling={"max_tokens": 12, "temperature": 0.5},
                tandem={"enabled": False},
            )
        ]
    )[0][0].response_token_ids
    expected = senior_logprobs(rollout, [*ids, *reference])[len(ids) - 1 :]
    np.testing.assert_array_equal(np.float32(answer.logprobs.token_logprobs), expected)
    assert answer.logprobs.top_logprobs is None


def test_the_junior_writes_where_a_request_asks_for_it(client, rollout, codec):
    alone = complete(client).choices[0].text
    junior = {"selection_strategy": "bernoulli", "prob_senior": 0.0}
    answer = complete(client, extra_body={"tandem": junior}).choices[0].text
    prompt = Prompt(
        codec.encode(TEXT), sampling={"max_tokens": 12, "temperature": 0}, tandem=junior
    )
    [[trajectory]] = rollout.generate([prompt])
    assert answer == codec.decode(trajectory.response_token_ids) != alone


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logprobs": 50}, "logprobs"),
        ({"extra_body": {"best": 1}}, "best"),
        ({"temperature": 500}, "temperature"),
        ({"prompt": [[1, 100_000]]}, "prompt"),
        ({"prompt": "one " * 200}, "prompt"),
        ({"extra_body": {"tandem": {"prob_senior": 2}}}, "tandem.prob_senior"),
    ],
)
def test_a_wrong_field_is_named(client, fields, param):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, **fields, stream=stream)
        assert caught.value.param.startswith(param)
        assert caught.value.type == "invalid_request_error"


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        complete(client, model="junior")
    assert caught.value.code == "model_not_found"


def test_the_request_id_comes_back(client):
    raw = client.completions.with_raw_response.create(
        model="senior", prompt=TEXT, max_tokens=1, extra_headers={"x-request-id": "mine-7"}
    )
    assert raw.headers["x-request-id"] == "mine-7"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_sequences(client, cluster, rollout, stream):
    server = cluster.rollouts[0]

    def streams():
        return harness.gauge(server, "tandem_generate_streams")

    rollout.pause()
    try:
        with ThreadPoolExecutor(1) as thread:
            fields = {"n": 2, "max_tokens": 100, "stream": stream, "timeout": 3}
            answer = thread.submit(complete, client, **fields)
            harness.wait_until(lambda: streams() == 1)
            with pytest.raises(openai.APITimeoutError):
                answer.result()
            harness.wait_until(lambda: streams() == 0)
    finally:
        rollout.resume()


async def test_more_streams_with_logprobs_than_a_connection_carries_all_end(client):
    """A connection carries 128 calls; every stream has its tokens scored while it is open."""
    options = {"base_url": client.base_url, "api_key": "none", "max_retries": 0, "timeout": 300}
    async with openai.AsyncOpenAI(**options) as many:

        async def ends(seed):
            chunks = await many.completions.create(
                model="senior", prompt=TEXT, max_tokens=8, logprobs=1, n=2, seed=seed, stream=True
            )
            choices = [choice async for chunk in chunks for choice in chunk.choices]
            assert all(choice.logprobs.tokens for choice in choices)
            return sum(choice.finish_reason is not None for choice in choices)

        assert await asyncio.gather(*map(ends, range(150))) == [2] * 150


async def test_many_short_requests_cut_nobody_off(client, rollout):
    """More calls end than the rollout server would let a client reset in that time."""
    long = Prompt([1, 2, 3], sampling={"max_tokens": 120, "ignore_eos": True}, stream_tokens=True)
    options = {"base_url": client.base_url, "api_key": "none", "max_retries": 0, "timeout": 300}
    with rollout.open_stream() as bystander, ThreadPoolExecutor(1) as threads:
        reading = threads.submit(list, bystander)
        bystander.submit([long.named(0)])
        async with openai.AsyncOpenAI(**options) as many:

            async def request(seed):
                stop = ["zz"] if seed % 2 else None
                answer = await many.completions.create(
                    model="senior", prompt=TEXT, max_tokens=1, seed=seed, stop=stop
                )
                return answer.usage.completion_tokens

            for _ in range(6):
                assert await asyncio.gather(*map(request, range(100))) == [1] * 100
        bystander.half_close()
        events = reading.result()
    [end] = [event.finished for event in events if event.HasField("finished")]
    assert len(end.trajectory.response_token_ids) == 120
