"""Tinker's API in front of fake servers: order, repeats, sessions, refusals, bounds."""

from __future__ import annotations

import asyncio
import itertools
import re
from contextlib import asynccontextmanager

import fakes
import httpx2
import numpy as np
import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as wire

from tandem._proto.types.v1 import server_pb2
from tandem.openai_server import limits as body_limits
from tandem.openai_server.errors import RequestError
from tandem.rpc.credentials import watched_tokens
from tandem.rpc.wire import from_tensor
from tandem.tinker_server import limits, refused
from tandem.tinker_server.app import Settings, application
from tandem.tinker_server.authors import Authors
from tandem.tinker_server.paths import CheckpointPath

TOKENS = [3, 4, 5, 6]
PROTO = {"content-type": "application/x-protobuf"}
ACCEPTS = {"accept": "application/x-protobuf"}


class Client:
    """Calls pages, and waits for answers."""

    def __init__(self, http):
        self.http = http
        self.session = self.model = ""

    async def post(self, page, body=None, **fields):
        given = {"json": body} if isinstance(body, dict) else {"content": body}
        answer = await self.http.post(f"/api/v1/{page}", **given, **fields)
        return answer.status_code, answer.json() if answer.content else {}

    async def accepted(self, page, body, **fields):
        status, answer = await self.post(page, body, **fields)
        assert status == 200, answer
        return answer["request_id"]

    async def answer(self, request_id):
        status, answer = await self.post("retrieve_future", {"request_id": request_id})
        assert status == 200, answer
        return answer

    async def begin(self, **fields):
        """Begins a session and a model in it; returns the answer of create_model."""
        body = {"tags": [], "user_metadata": None, "sdk_version": "0"}
        self.session = (await self.post("create_session", body))[1]["session_id"]
        status, answer = await self.create(**fields)
        if status == 200:
            answer = await self.answer(answer["request_id"])
            self.model = answer.get("model_id", "")
        return status, answer

    async def create(self, **fields):
        body = {
            "session_id": self.session,
            "model_seq_id": 0,
            "base_model": "model",
            "lora_config": {"rank": 0},
        }
        return await self.post("create_model", body | fields)

    def losses(self, seq_id, loss="cross_entropy", tokens=TOKENS, forward_only=False, **inputs):
        """A forward_backward request."""
        message = wire.ForwardBackwardRequest(
            model_id=self.model, seq_id=seq_id, loss_fn=loss, forward_only=forward_only
        )
        datum = message.data.add()
        ids = np.array(tokens[:-1], dtype="<i4").tobytes()
        datum.model_input.add().encoded_text.tokens = ids
        target = datum.loss_fn_inputs["target_tokens"]
        target.dense = np.array(tokens[1:], dtype="<i8").tobytes()
        target.dtype = wire.DTYPE_INT64
        for name, numbers in inputs.items():
            datum.loss_fn_inputs[name].dense = np.array(numbers, dtype="<f4").tobytes()
            datum.loss_fn_inputs[name].dtype = wire.DTYPE_FLOAT32
        return message.SerializeToString()

    def step(self, seq_id, **adam):
        return {"model_id": self.model, "seq_id": seq_id, "adam_params": adam}


@asynccontextmanager
async def serving(world, tmp_path, **settings):
    """A client of the application in front of fake servers."""
    with fakes.serve(world, "/models/model") as address:
        app = application(Settings(address, address, str(tmp_path), **settings))
        transport = httpx2.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://server", timeout=60) as http,
        ):
            yield Client(http)


async def test_a_step_has_the_data_since_the_last_one_and_its_own_optimizer(world, tmp_path):
    steps = []
    world.on_samples = steps.append
    async with serving(world, tmp_path) as client:
        await client.begin()
        await client.accepted(
            "forward_backward", client.losses(1, weights=[1, -2, 0]), headers=PROTO
        )
        await client.accepted(
            "forward_backward", client.losses(2, forward_only=True), headers=PROTO
        )
        await client.accepted("forward_backward", client.losses(3, tokens=[7, 8]), headers=PROTO)
        update = client.step(
            4,
            learning_rate=0.1,
            beta1=0.2,
            beta2=0.3,
            eps=0.4,
            weight_decay=0.5,
            grad_clip_norm=0.6,
        )
        first = await client.answer(await client.accepted("optim_step", update))
        assert first["metrics"]["tokens/response"] == 4
        await client.accepted("forward_backward", client.losses(5), headers=PROTO)
        await client.answer(await client.accepted("optim_step", client.step(6)))
    header, second = world.headers
    assert [list(one.response_token_ids) for one in steps[0]] == [TOKENS[1:], [8]]
    assert [from_tensor(one.weights).tolist() for one in steps[0]] == [[1, -2, 0], [1]]
    assert [list(one.response_token_ids) for one in steps[1]] == [TOKENS[1:]]
    assert header.run_id == client.model
    assert (header.step, second.step) == (1, 2)
    assert (header.expected_version, second.expected_version) == (0, 1)
    assert header.supervised.aggregation == 2
    optimizer = header.optimizer
    numbers = [optimizer.learning_rate, optimizer.beta1, optimizer.beta2, optimizer.epsilon]
    assert numbers == [0.1, 0.2, 0.3, 0.4]
    assert [optimizer.weight_decay, optimizer.max_grad_norm] == [0.5, 0.6]
    # The SDK's defaults.
    assert [second.optimizer.learning_rate, second.optimizer.beta2] == [1e-4, 0.95]
    assert [second.optimizer.epsilon, second.optimizer.max_grad_norm] == [1e-12, 0]


async def test_outputs_have_numbers_of_each_target_in_both_forms(world, tmp_path):
    async with serving(world, tmp_path) as client:
        await client.begin()
        message = wire.ForwardBackwardRequest.FromString(client.losses(1, weights=[1, -2, 0.5]))
        short = wire.ForwardBackwardRequest.FromString(client.losses(1, tokens=[7, 8]))
        message.data.append(short.data[0])
        body = {
            "request_id": await client.accepted(
                "forward", message.SerializeToString(), headers=PROTO
            )
        }
        plain = (await client.post("retrieve_future", body))[1]
        answer = await client.http.post("/api/v1/retrieve_future", json=body, headers=ACCEPTS)
    # The fake's log-probability of every token is -1.
    expected = [
        {"logprobs": [-1, -1, -1], "elementwise_loss": [1, -2, 0.5]},
        {"logprobs": [-1], "elementwise_loss": [1]},
    ]
    assert plain["metrics"] == {"loss:sum": 0.5}
    assert [
        {name: one["data"] for name, one in datum.items()} for datum in plain["loss_fn_outputs"]
    ] == expected
    [record] = wire.ForwardBackwardOutput.FromString(answer.content).loss_fn_outputs
    assert record.num_datums == 2
    for name, field in record.fields.items():
        ends = np.frombuffer(field.offsets, "<i8")
        numbers = [
            np.frombuffer(field.data[begin:end], "<f4").tolist()
            for begin, end in itertools.pairwise(ends)
        ]
        assert numbers == [datum[name] for datum in expected]


async def test_requests_run_in_the_order_of_their_numbers_and_once(world, tmp_path):
    async with serving(world, tmp_path) as client:
        await client.begin()
        update, losses = client.step(2), client.losses(1)
        later = await client.accepted("optim_step", update)
        assert later == await client.accepted("optim_step", update)
        await asyncio.sleep(0.1)
        assert not world.headers
        first = await client.accepted("forward_backward", losses, headers=PROTO)
        answers = [await client.answer(name) for name in (first, later)]
        assert await client.accepted("forward_backward", losses, headers=PROTO) == first
        assert await client.accepted("optim_step", update) == later
        assert [await client.answer(name) for name in (first, later)] == answers
        assert len(world.headers) == 1
        status, refused = await client.post("optim_step", client.step(2, learning_rate=1.0))
        assert (status, refused["error"]["param"]) == (400, "seq_id")
        assert "another request" in refused["error"]["message"]


async def test_an_answer_that_is_gone_is_not_made_again(world, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_ANSWERS_BYTES", 1)
    async with serving(world, tmp_path) as client:
        await client.begin()
        for number in (1, 2):
            name = await client.accepted("forward_backward", client.losses(number), headers=PROTO)
            await client.answer(name)
        status, gone = await client.post("forward_backward", client.losses(1), headers=PROTO)
        assert (status, gone["error"]["param"]) == (400, "seq_id")
        assert (await client.post("retrieve_future", {"request_id": f"{client.model}:1"}))[0] == 404


async def test_a_request_that_fails_does_not_hold_up_the_next(world, tmp_path):
    async with serving(world, tmp_path) as client:
        await client.begin()
        bad = client.losses(1, loss="other")
        failed = await client.answer(await client.accepted("forward_backward", bad, headers=PROTO))
        assert failed["category"] == "user"
        assert failed["error"].startswith("loss_fn: 'other'")
        good = await client.accepted("forward_backward", client.losses(2), headers=PROTO)
        # The fake's log-probability of every token is -1.
        assert (await client.answer(good))["metrics"]["loss:sum"] == 3


async def test_a_trainer_that_someone_else_trains_is_noticed(world, tmp_path):
    async with serving(world, tmp_path) as client:
        await client.begin()
        world.version = 5
        name = await client.accepted("forward_backward", client.losses(1), headers=PROTO)
        failed = await client.answer(name)
        assert failed["category"] == "server"
        assert "is at version 5 of its weights, the model at 0" in failed["error"]


async def test_a_step_that_is_left_out_says_so(world, tmp_path):
    class Skips(fakes.FakeTrainer):
        def TrainStep(self, requests, context):  # noqa: N802
            reply = super().TrainStep(requests, context)
            reply.report.skipped = True
            reply.report.skip_reason = "the gradient norm is not finite"
            return reply

    with fakes.serve(world, "/models/model", trainer=Skips(world)) as address:
        app = application(Settings(address, address, str(tmp_path)))
        transport = httpx2.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://server") as http,
        ):
            client = Client(http)
            await client.begin()
            await client.accepted("forward_backward", client.losses(1), headers=PROTO)
            failed = await client.answer(await client.accepted("optim_step", client.step(2)))
    assert failed["error"] == "the step was left out: the gradient norm is not finite"


async def test_one_model_trains_until_its_client_is_gone(world, tmp_path, monkeypatch):
    async with serving(world, tmp_path) as client:
        await client.begin()
        second = Client(client.http)
        status, refused = await second.begin()
        assert (status, refused["error"]["code"]) == (400, "one_model_at_a_time")
        assert client.model in refused["error"]["message"]
        # The same request again is answered, not refused.
        assert (await client.create())[0] == 200
        await client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}})
        assert (await second.begin())[0] == 200
        monkeypatch.setattr(limits, "SESSION_SECONDS", 0)
        third = Client(client.http)
        assert (await third.begin())[0] == 200
        ended = {"model_id": third.model}
        await third.answer(await third.accepted("unload_model", ended))
        assert (await third.post("get_info", ended))[0] == 404
    assert world.loads == [""] * 3


async def test_what_waits_for_its_turn_ends_with_its_model(world, tmp_path):
    async with serving(world, tmp_path) as client:
        await client.begin()
        waits = await client.accepted("optim_step", client.step(2))
        await client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}})
        await Client(client.http).begin()
        assert (await client.answer(waits))["error"] == f"model_id: {client.model} has ended"
    assert not world.headers


async def test_updates_of_another_client_are_not_lost(world, tmp_path):
    world.unsaved = True
    async with serving(world, tmp_path) as client:
        _, failed = await client.begin()
        assert "holds updates that no checkpoint has" in failed["error"]
        assert not world.loads


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"lora_config": {"rank": 8}},
            "lora_config.rank: 8: the trainer's `lora` makes it train all parameters",
        ),
        ({"lora_config": None}, "lora_config.rank: is required"),
        ({"lora_config": {"rank": 0, "train_mlp": False}}, "lora_config.train_mlp: must be true"),
        ({"base_model": "other"}, "base_model: 'other' is not served, 'model' is"),
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type: 'dimuon'"),
        ({"session_id": "none"}, "session_id: 'none' is not known"),
        ({"base_model": 3}, "base_model: "),
        ({"unknown": 3}, "unknown: "),
    ],
)
async def test_a_model_that_is_not_served_is_refused_by_name(world, tmp_path, fields, says):
    async with serving(world, tmp_path) as client:
        status, refused = await client.begin(**fields)
    text = refused["error"] if status == 200 else refused["error"]["message"]
    assert text.startswith(says)


@pytest.mark.parametrize(
    ("maps", "config", "says"),
    [
        (["all-linear"], {}, "train_unembed: must be false: adapters of the output layer"),
        (["all-linear"], {"train_unembed": False}, None),
        (["all-linear"], {"train_unembed": False, "seed": 3}, None),
        (["all-linear"], {"train_unembed": False, "seed": 0}, "seed: 0: the trainer's"),
        (["all-linear"], {"train_unembed": False, "rank": 0}, "rank: 0: the trainer's"),
        (["q_proj"], {"train_unembed": False}, "train_mlp: must be false"),
        (["q_proj"], {"train_unembed": False, "train_mlp": False}, None),
        (["up_proj"], {"train_unembed": False}, "train_attn: must be false"),
        (["up_proj"], {"train_unembed": False, "train_attn": False}, None),
        (["up_proj", "o_proj"], {"train_unembed": False}, None),
    ],
)
async def test_adapters_are_those_of_the_trainer(world, tmp_path, maps, config, says):
    world.adapter = server_pb2.AdapterInfo(rank=8, alpha=16, target_modules=maps, seed=3)
    async with serving(world, tmp_path) as client:
        status, answer = await client.begin(lora_config={"rank": 8} | config)
        if says is not None:
            assert answer["error"]["message"].startswith(f"lora_config.{says}")
            return
        assert status == 200
        _, info = await client.post("get_info", {"model_id": client.model})
        assert (info["is_lora"], info["lora_rank"]) == (True, 8)
        _, weights = await client.post("weights_info", {"tinker_path": "tinker://a/weights/b"})
        assert (weights["is_lora"], weights["lora_rank"]) == (True, 8)
        asked = {"train_attn": True, "train_mlp": True} | config
        assert {name: weights[name] for name in asked if name.startswith("train")} == {
            name: value for name, value in asked.items() if name.startswith("train")
        }
        run = (await client.http.get(f"/api/v1/training_runs/{client.model}")).json()
        assert (run["is_lora"], run["lora_rank"]) == (True, 8)


async def test_clients_that_ask_for_the_output_layer_can_get_the_other_adapters(world, tmp_path):
    world.adapter = server_pb2.AdapterInfo(rank=8, target_modules=["all-linear"])
    async with serving(world, tmp_path, unembed_optional=True) as client:
        status, _ = await client.begin(lora_config={"rank": 8})
        assert status == 200


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda m: m.data[0].model_input[0].image.SetInParent(), "data[0].model_input[0]: image"),
        (lambda m: m.data[0].ClearField("model_input"), "data[0].model_input: holds no token"),
        (lambda m: m.ClearField("data"), "data: holds no datum"),
        (
            lambda m: m.data[0].loss_fn_inputs.pop("target_tokens"),
            "data[0].loss_fn_inputs.target_tokens: is required",
        ),
        (
            lambda m: m.data[0].loss_fn_inputs["target_tokens"].shape.extend([3, 1]),
            "data[0].loss_fn_inputs.target_tokens: has 2 dimensions",
        ),
        (
            lambda m: m.data[0].loss_fn_inputs["target_tokens"].sparse_csr.SetInParent(),
            "data[0].loss_fn_inputs.target_tokens: sparse",
        ),
        (
            lambda m: (
                m.data[0]
                .model_input.add()
                .encoded_text.CopyFrom(wire.EncodedTextChunk(tokens=bytes(8)))
            ),
            "data[0].loss_fn_inputs.target_tokens: must have 5 or 4 numbers",
        ),
        (
            lambda m: (
                m.data[0]
                .loss_fn_inputs["weights"]
                .CopyFrom(wire.Tensor(dense=bytes(8), dtype=wire.DTYPE_FLOAT32))
            ),
            "data[0].loss_fn_inputs.weights: must have 3 numbers, one for each target",
        ),
        (
            lambda m: m.data[0].loss_fn_inputs["target_tokens"].ClearField("dense"),
            "data[0].loss_fn_inputs.target_tokens: must have 3 or 2 numbers",
        ),
    ],
)
async def test_a_datum_at_fault_is_named(world, tmp_path, spoil, says):
    async with serving(world, tmp_path) as client:
        await client.begin()
        message = wire.ForwardBackwardRequest.FromString(client.losses(1))
        spoil(message)
        body = message.SerializeToString()
        failed = await client.answer(await client.accepted("forward_backward", body, headers=PROTO))
    assert failed["error"].startswith(says)


async def test_the_last_token_needs_no_target(world, tmp_path):
    """A whole text, of which all tokens but the first are targets."""
    steps = []
    world.on_samples = steps.append
    async with serving(world, tmp_path) as client:
        await client.begin()
        for number, targets in ((1, [4, 5, 6]), (3, [4, 5, 7])):
            message = wire.ForwardBackwardRequest.FromString(client.losses(number))
            chunk = message.data[0].model_input[0].encoded_text
            chunk.tokens = np.array([3, 4, 5, 6], dtype="<i4").tobytes()
            message.data[0].loss_fn_inputs["target_tokens"].dense = np.array(
                targets, dtype="<i8"
            ).tobytes()
            body = message.SerializeToString()
            answer = await client.answer(
                await client.accepted("forward_backward", body, headers=PROTO)
            )
            if number == 1:
                assert len(answer["loss_fn_outputs"][0]["logprobs"]["data"]) == 3
                await client.answer(await client.accepted("optim_step", client.step(2)))
    assert answer["error"].startswith("data[0].loss_fn_inputs.target_tokens[2]: is 7")
    [[sample]] = steps
    assert (list(sample.prompt_token_ids), list(sample.response_token_ids)) == ([3], [4, 5, 6])


async def test_targets_that_are_not_the_next_token_are_refused(world, tmp_path):
    async with serving(world, tmp_path) as client:
        await client.begin()
        message = wire.ForwardBackwardRequest.FromString(client.losses(1))
        targets = np.array([4, 9, 6], dtype="<i8").tobytes()
        message.data[0].loss_fn_inputs["target_tokens"].dense = targets
        body = message.SerializeToString()
        failed = await client.answer(await client.accepted("forward_backward", body, headers=PROTO))
    assert failed["error"].startswith("data[0].loss_fn_inputs.target_tokens[1]: is 9")


async def test_bodies_may_be_compressed_and_are_bounded(world, tmp_path, monkeypatch):
    monkeypatch.setattr(body_limits, "MAX_BODY_BYTES", 1 << 20)
    packed = PROTO | {"content-encoding": "zstd"}
    async with serving(world, tmp_path) as client:
        await client.begin()
        compress = zstandard.ZstdCompressor().compress
        name = await client.accepted("forward_backward", compress(client.losses(1)), headers=packed)
        assert (await client.answer(name))["metrics"]["loss:sum"] == 3
        for body, headers, says in [
            (compress(bytes(2 << 20)), packed, "once it is decompressed"),
            (b"nothing", packed, "not zstd"),
            (b"nothing", PROTO | {"content-encoding": "br"}, "content-encoding: 'br'"),
            (b"\xff\xff", PROTO, "not a ForwardBackwardRequest"),
            (b"{}", {}, "not a forward_backward request"),
            (b"[", {}, "not JSON"),
        ]:
            status, refused = await client.post("forward_backward", body, headers=headers)
            assert status == 400
            assert says in refused["error"]["message"]


async def test_numbers_of_requests_and_data_are_bounded(world, tmp_path, monkeypatch):
    world.max_samples = 2
    monkeypatch.setattr(limits, "MAX_WAITING", 3)
    async with serving(world, tmp_path) as client:
        await client.begin()
        for number in (0, 5):
            status, refused = await client.post("optim_step", client.step(number))
            assert (status, refused["error"]["param"]) == (400, "seq_id")
        for number in (1, 2, 3):
            name = await client.accepted("forward_backward", client.losses(number), headers=PROTO)
            answer = await client.answer(name)
        assert "at most 2 (max_samples of the trainer)" in answer["error"]


async def test_an_answer_that_takes_long_is_asked_for_again(world, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "WAIT_SECONDS", 0.05)
    async with serving(world, tmp_path) as client:
        await client.begin()
        name = await client.accepted("optim_step", client.step(2))
        status, waits = await client.post("retrieve_future", {"request_id": name})
        assert (status, waits["queue_state"]) == (408, "active")
        # A request that trains is not cancelled.
        assert (await client.post("cancel_future", {"request_id": name}))[0] == 204
        await client.accepted("forward_backward", client.losses(1), headers=PROTO)
        monkeypatch.setattr(limits, "WAIT_SECONDS", 30)
        assert "metrics" in await client.answer(name)


async def sampler(client):
    body = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "model"}
    return (await client.post("create_sampling_session", body))[1]["sampling_session_id"]


def sample(session, seq_id=1, **fields):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
    return {
        "sampling_session_id": session,
        "seq_id": seq_id,
        "prompt": prompt,
        "sampling_params": {"max_tokens": 5},
    } | fields


async def test_samples_have_ids_and_are_functions_of_their_request(world, tmp_path):
    prompts = []
    world.on_prompt = prompts.append
    world.rollout_weights = fakes.weights(0)
    async with serving(world, tmp_path) as client:
        await client.begin()
        session = await sampler(client)
        body = sample(session, num_samples=2)
        status, promise = await client.post("asample", body)
        assert status == 200
        assert len(set(promise["sample_sequence_ids"])) == 2
        answer = await client.answer(promise["request_id"])
        assert len(answer["sequences"]) == 2
        assert (await client.post("asample", body))[1] == promise
        assert len(prompts) == 1
        for number, params in enumerate(
            ({"stop": []}, {"stop": "w1"}, {"stop": [7]}, {"seed": -1}, {"max_tokens": None}), 2
        ):
            given = {"max_tokens": 5} | params
            more = sample(session, number, sampling_params=given)
            await client.answer(await client.accepted("asample", more))
    assert not prompts[0].tandem.enabled
    assert prompts[1].sampling.ignore_eos
    assert list(prompts[2].sampling.stop) == ["w1"]
    assert list(prompts[3].sampling.stop_token_ids) == [7]
    assert prompts[4].seed == 2**64 - 1
    assert prompts[5].sampling.max_tokens == world.max_model_len - len(TOKENS)
    assert len({one.seed for one in prompts}) == 6


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k: is not supported"),
        ({"record_stability_info": True}, "record_stability_info: is not supported"),
        ({"num_samples": 0}, "num_samples: must be 1 to"),
        ({"topk_sample_logprobs": 129}, "topk_sample_logprobs: must be 0 to 128"),
        ({"prompt": {"chunks": []}}, "prompt: holds no token"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n: must be"),
        ({"sampling_session_id": "none"}, "sampling_session_id: 'none' is not known"),
        ({"seq_id": None}, "sampling_session_id: is required"),
        ({"num_samples": "a"}, "num_samples: "),
    ],
)
async def test_a_sample_that_is_not_served_is_refused_by_name(world, tmp_path, fields, says):
    async with serving(world, tmp_path) as client:
        await client.begin()
        status, refused = await client.post("asample", sample(await sampler(client), **fields))
    assert status == 400
    assert refused["error"]["message"].startswith(says)


async def test_a_sample_that_nobody_waits_for_is_cancelled(world, tmp_path):
    drawing, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold():
        loop.call_soon_threadsafe(drawing.set)
        fakes.wait_until(go_on.is_set)

    world.on_batch = hold
    async with serving(world, tmp_path) as client:
        await client.begin()
        name = await client.accepted("asample", sample(await sampler(client)))
        await drawing.wait()
        assert (await client.post("cancel_future", {"request_id": name}))[0] == 204
        assert "was cancelled" in (await client.answer(name))["error"]
        go_on.set()
        await asyncio.to_thread(fakes.wait_until, lambda: not world.open_streams)


async def test_pages_without_a_meaning_say_so(world, tmp_path):
    names = {"run": "a:train:0", "checkpoint": "weights/b", "session": "c"}
    async with serving(world, tmp_path) as client:
        for (method, page), why in refused.PAGES.items():
            path = re.sub(r"\{(\w+)(:path)?\}", lambda match: names[match[1]], page)
            answer = await client.http.request(method, f"/api/v1/{path}")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "unsupported_parameter"), path
            assert error["message"].endswith(f": is not served: {why}")


async def test_keys_are_checked(world, tmp_path):
    (tmp_path / "keys").write_text("tml-right\n")
    keys = watched_tokens(tmp_path / "keys", "keys")
    async with serving(world, tmp_path, api_keys=keys) as client:
        for key, expected in (("tml-wrong", 401), ("", 401), ("tml-right", 200)):
            headers = {"x-api-key": key}
            answer = await client.http.get("/api/v1/get_server_capabilities", headers=headers)
            assert answer.status_code == expected
        assert (await client.http.get("/api/v1/healthz")).json() == {"status": "ok"}
        assert (await client.http.get("/api/v1/none")).status_code == 404


async def test_a_checkpoint_is_saved_and_listed_by_its_name(world, tmp_path):
    async with serving(world, tmp_path) as client:
        await client.begin()
        body = {"model_id": client.model, "path": "a", "user_metadata": {"k": "v"}}
        saved = await client.answer(await client.accepted("save_weights", body | {"seq_id": 1}))
        assert saved["path"] == f"tinker://{client.model}/weights/a"
        again = await client.answer(await client.accepted("save_weights", body | {"seq_id": 2}))
        assert again["error"].endswith("exists; overwrite replaces it")
        replaced = body | {"seq_id": 3, "overwrite": True}
        assert "path" in await client.answer(await client.accepted("save_weights", replaced))
        page = f"/api/v1/training_runs/{client.model}"
        [listed] = (await client.http.get(f"{page}/checkpoints")).json()["checkpoints"]
        assert listed["tinker_path"] == saved["path"]
        whole = (await client.http.get("/api/v1/checkpoints")).json()
        assert whole["checkpoints"] == [listed]
        assert whole["cursor"]["total_count"] == 1
        assert listed["user_metadata"] == {"k": "v"}
        run = (await client.http.get(page)).json()
        assert run["last_checkpoint"] == listed
        load = {"model_id": client.model, "seq_id": 4, "path": saved["path"], "optimizer": False}
        await client.answer(await client.accepted("load_weights", load))
    [place] = set(world.saved)
    assert place == f"{tmp_path}/{client.model.replace(':', '_')}/weights/a"
    assert world.fresh_loads == [place]


@pytest.mark.parametrize(
    "text",
    [
        "tinker://run/weights/..",
        "tinker://run/weights/a/b",
        "tinker://../weights/a",
        "tinker://run/other/a",
        "tinker:///weights/a",
        "/etc/passwd",
        "",
        "tinker://run/weights/" + "a" * 129,
    ],
)
def test_a_path_leads_nowhere_else(text):
    with pytest.raises(RequestError, match="path: "):
        CheckpointPath.parse(text)


def span(sequence_id, length, offset=0, sampled=True):
    kind = wire.SampledProvenanceSpan if sampled else wire.PromptProvenanceSpan
    run = kind(sequence_id=sequence_id, length=length, offset=offset)
    name = "sampled_tokens" if sampled else "prompt_tokens"
    return wire.ProvenanceSpan(**{name: run})


def test_spans_say_who_wrote_a_target():
    authors = Authors()
    authors.remember("s", bytes([1, 0, 0, 1]))
    spans = authors.spans("s")
    assert [one["sequence_id"] for one in spans] == ["s/senior", "s/junior", "s/senior"]
    expected = [False, True, True]
    read = span("s", 1, sampled=False)
    assert authors.junior_tokens([read, span("s", 2, 1)], 3, "p").tolist() == expected
    assert authors.junior_tokens([read, span("t/junior", 2)], 3, "p").tolist() == expected
    assert authors.junior_tokens([span("t/senior", 3)], 3, "p").tolist() == [False] * 3
    for wrong, says in (
        ([span("s", 2)], r"p: covers 2 of 3"),
        ([span("s", 4)], r"p\[0\]: does not fit"),
        ([span("s", 3, 2)], r"p\[0\]: goes beyond the 4 tokens"),
        ([span("t", 3)], r"p\[0\]\.sequence_id: 't' is not a sequence"),
    ):
        with pytest.raises(RequestError, match=says):
            authors.junior_tokens(wrong, 3, "p")


def test_the_oldest_authors_are_forgotten(monkeypatch):
    monkeypatch.setattr(limits, "MAX_SEQUENCES", 2)
    authors = Authors()
    for name in "abc":
        authors.remember(name, b"\1")
    with pytest.raises(RequestError, match="'a' is not a sequence"):
        authors.spans("a")
    assert authors.spans("c")
