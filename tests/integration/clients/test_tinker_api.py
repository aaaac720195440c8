"""`tandem serve-tinker` on real servers, through the unchanged SDK of Tinker."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import harness
import httpx2
import numpy as np
import pytest
import tinker
from tandem.tinker_server.paths import CheckpointPath
from tinker import types

KEY = "tml-any"
ADAM = types.AdamParams(learning_rate=5e-3)
FAST = types.AdamParams(learning_rate=2e-2)
TEXT = [5, 9, 12, 7, 30, 31, 8, 6]


@pytest.fixture(scope="module")
def cluster(models, tmp_path_factory):
    """A trainer whose own optimizer does nothing, and a rollout server of both models."""
    place = tmp_path_factory.mktemp("tinker")
    optimizer = {"learning_rate": 0.0}
    with harness.cluster(place, models, trainer={"optimizer": optimizer}) as running:
        yield running


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def url(cluster, checkpoints):
    with harness.tinker_server(cluster, checkpoints) as url:
        yield url


@contextmanager
def service(url):
    """A client with a session of its own, which ends with it."""
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    try:
        yield client
    finally:
        client.close("success").result(timeout=60)


@pytest.fixture(scope="module")
def adapters_url(models, checkpoints, tmp_path_factory):
    """Servers whose senior has adapters of rank 4."""
    place = tmp_path_factory.mktemp("adapters")
    lora = {"lora": {"rank": 4, "alpha": 8}}
    with (
        harness.cluster(place, models, rollout={"senior": lora}, trainer=lora) as running,
        harness.tinker_server(running, checkpoints) as url,
    ):
        yield url


@contextmanager
def training(url, rank=0):
    """A service client, and a model of all parameters, or of adapters."""
    with service(url) as client:
        model = client.create_lora_training_client("senior", rank=rank, train_unembed=rank == 0)
        yield client, model.result(timeout=60)


def datum(tokens, **inputs):
    """A sequence, each token of which but the first is a target."""
    return types.Datum(
        types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], **inputs}
    )


def step(model, data, loss="cross_entropy", config=None, adam=ADAM):
    """A step on data; returns the output of forward_backward."""
    losses = model.forward_backward(data, loss, config)
    updated = model.optim_step(adam)
    output = losses.result(timeout=60)
    assert updated.result(timeout=60).metrics["policy/learning_rate"] == adam.learning_rate
    return output


def samples(sampler, count=1, prompt=TEXT[:3], **params):
    given = types.SamplingParams(**{"max_tokens": 12, "seed": 3} | params)
    answer = sampler.sample(types.ModelInput.from_ints(prompt), count, given)
    return answer.result(timeout=60).sequences


def policy_datum(prompt, sequence, advantage):
    """A sampled sequence with its advantage; the prompt's tokens have none."""
    before, count = len(prompt) - 1, len(sequence.tokens)
    return datum(
        [*prompt, *sequence.tokens],
        logprobs=[0.0] * before + list(sequence.logprobs),
        advantages=[0.0] * before + [advantage] * count,
    )


def test_the_model_learns_by_cross_entropy(url):
    with training(url) as (_, model):
        losses = [step(model, [datum(TEXT)]).metrics["loss:sum"] for _ in range(20)]
    assert losses[0] > 5
    assert losses[-1] < 0.1 * losses[0]


def test_a_loss_and_its_log_probs_are_those_of_the_weights(url):
    with training(url) as (_, model):
        weights = [0.5] * 3 + [-1.0] * 4
        output = model.forward([datum(TEXT, weights=weights)], "cross_entropy").result(timeout=60)
        logprobs = output.loss_fn_outputs[0]["logprobs"].to_numpy()
        losses = output.loss_fn_outputs[0]["elementwise_loss"].to_numpy()
        assert losses == pytest.approx(-np.array(weights) * logprobs, rel=1e-6)
        assert output.metrics["loss:sum"] == pytest.approx(losses.sum(), rel=1e-6)


@pytest.mark.parametrize("rank", [0, 4])
def test_the_model_learns_by_importance_sampling_and_the_kl_is_zero(request, rank):
    """The reward is the share of even ids. Each step's sampler has the weights of the step."""
    url = request.getfixturevalue("adapters_url" if rank else "url")
    with training(url, rank) as (_, model):
        shares = []
        for number in range(16):
            sampler = model.save_weights_and_get_sampling_client().result(timeout=60)
            drawn = samples(sampler, 32, seed=number)
            rewards = np.array([np.mean(np.array(one.tokens) % 2 == 0) for one in drawn])
            shares.append(rewards.mean())
            data = [
                policy_datum(TEXT[:3], one, reward)
                for one, reward in zip(drawn, rewards - rewards.mean(), strict=True)
            ]
            output = step(model, data, "importance_sampling", adam=FAST)
            for one, trained in zip(drawn, output.loss_fn_outputs, strict=True):
                # To the bit: sampling and training are one computation.
                assert trained["logprobs"].data[2:] == list(one.logprobs)
        assert shares[-1] > shares[0] + 0.2


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("ppo", None),
        ("cispo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
        ("gspo", {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}),
        ("dro", {"beta": 0.05}),
    ],
)
def test_other_losses_raise_what_has_an_advantage(url, loss, config):
    with training(url) as (_, model):
        sampler = model.save_weights_and_get_sampling_client().result(timeout=60)
        [one] = samples(sampler)
        data = [policy_datum(TEXT[:3], one, 1.0)]
        if loss == "gspo":
            mask = [0.0, 0.0] + [1.0] * len(one.tokens)
            data[0].loss_fn_inputs["sequence_ratio_mask"] = types.TensorData(
                data=mask, dtype="float32", shape=[len(mask)]
            )
        before = sum(step(model, data, loss, config).loss_fn_outputs[0]["logprobs"].data[2:])
        after = step(model, data, loss, config).loss_fn_outputs[0]["logprobs"].data[2:]
        assert sum(after) > before


CLIP = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}


def own_loss(name, config):
    """Returns the loss of Tinker's documentation, for autograd, in the form of the SDK."""
    import torch

    def of_datum(given, logprobs):
        old, advantages = given["logprobs"], given["advantages"]
        ratio = (logprobs - old).exp()
        if name == "importance_sampling":
            return -(ratio * advantages).sum()
        if name == "dro":
            quadratic = 0.5 * config["beta"] * (logprobs - old).square()
            return (quadratic - logprobs * advantages).sum()
        if name == "gspo":
            counted = given["sequence_ratio_mask"] > 0
            mean = (logprobs.detach() - old)[counted].mean()
            ratio = mean.exp() * (logprobs - logprobs.detach()).exp()
        cut = ratio.clamp(*config.values())
        if name == "cispo":
            return -(cut.detach() * advantages * logprobs).sum()
        return torch.maximum(-ratio * advantages, -cut * advantages).sum()

    def loss(data, logprobs):
        given = [
            {key: one.to_torch() for key, one in datum.loss_fn_inputs.items()} for datum in data
        ]
        return sum(map(of_datum, given, logprobs)), {}

    return loss


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("importance_sampling", {}),
        ("ppo", CLIP),
        ("cispo", CLIP),
        ("gspo", {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}),
        ("dro", {"beta": 0.3}),
    ],
)
def test_a_loss_is_that_which_the_sdk_computes_itself(url, loss, config):
    """Its value, and what the weights learn from it: forward_backward_custom is the reference."""
    draws = np.random.default_rng(4)
    # A step that follows the gradient's size, in which rounding moves nothing by a whole step.
    smooth = types.AdamParams(learning_rate=5e-2, eps=1.0)
    with training(url) as (_, model):
        texts = [TEXT, TEXT[::-1] + TEXT]
        plain = [datum(text) for text in texts]
        output = model.forward(plain, "cross_entropy").result(timeout=60)
        before = [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]
        data = []
        for text, logprobs in zip(texts, before, strict=True):
            given = {
                # The ratios are on both sides of the bounds, the advantages on both sides of 0.
                "logprobs": logprobs + draws.normal(scale=0.6, size=len(logprobs)),
                "advantages": draws.normal(size=len(logprobs)),
            }
            if loss == "gspo":
                given["sequence_ratio_mask"] = np.arange(len(logprobs)) > 1
            data.append(datum(text, **{key: list(map(float, one)) for key, one in given.items()}))
    results = []
    for custom in (False, True):
        with training(url) as (_, model):
            if custom:
                asked = model.forward_backward_custom(data, own_loss(loss, config))
            else:
                asked = model.forward_backward(data, loss, config)
            value = asked.result(timeout=60).metrics["loss:sum"]
            model.optim_step(smooth).result(timeout=60)
            output = model.forward(plain, "cross_entropy").result(timeout=60)
            after = [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]
            results.append((value, np.concatenate(after)))
    (value, learnt), (expected, reference) = results
    assert value == pytest.approx(expected, rel=1e-5)
    moved = float(np.abs(reference - np.concatenate(before)).max())
    assert moved > 0.05
    assert learnt == pytest.approx(reference, abs=1e-3 * moved)


def test_a_custom_loss_runs_in_the_sdk(url):
    pytest.importorskip("torch")
    with training(url) as (_, model):

        def loss(data, logprobs):
            return -(logprobs[0] ** 2).sum(), {}

        output = model.forward_backward_custom([datum(TEXT)], loss).result(timeout=60)
        model.optim_step(ADAM).result(timeout=60)
        logprobs = output.loss_fn_outputs[0]["logprobs"].to_numpy()
        assert output.metrics["loss:sum"] == pytest.approx(-np.sum(logprobs**2), rel=1e-5)


def test_gradients_of_several_calls_are_one_step(url):
    """Two calls before a step are the step of one call with both data, to the bit."""
    data = [datum(TEXT), datum(TEXT[::-1])]
    after = []
    for calls in ([data], [data[:1], data[1:]]):
        with training(url) as (_, model):
            for one in calls:
                model.forward_backward(one, "cross_entropy")
            model.optim_step(ADAM).result(timeout=60)
            output = model.forward(data, "cross_entropy").result(timeout=60)
            after.append([one["logprobs"].data for one in output.loss_fn_outputs])
    assert after[0] == after[1]


@pytest.mark.parametrize("rank", [0, 4])
def test_a_checkpoint_goes_on_bit_for_bit(request, checkpoints, rank):
    url = request.getfixturevalue("adapters_url" if rank else "url")

    def steps(model, count):
        return [step(model, [datum(TEXT)]).metrics["loss:sum"] for _ in range(count)]

    with training(url, rank) as (_, model):
        steps(model, 2)
        path = model.save_state("two").result(timeout=60).path
        assert path == f"tinker://{model.model_id}/weights/two"
        expected = steps(model, 3)
    written = Path(CheckpointPath.parse(path).directory(str(checkpoints))) / "two"
    assert written.is_dir()
    assert (written / "adapter_config.json").exists() == (rank > 0)
    with service(url) as client:
        goes_on = client.create_training_client_from_state_with_optimizer(path).result(timeout=60)
        assert steps(goes_on, 3) == expected
    with service(url) as client:
        fresh = client.create_training_client_from_state(path).result(timeout=60)
        losses = steps(fresh, 3)
        assert losses[0] == expected[0]
        assert losses[1:] != expected[1:]


def test_a_sampler_of_saved_weights_draws_until_others_are_published(url):
    with training(url) as (client, model):
        step(model, [datum(TEXT)])
        path = model.save_weights_for_sampler("first").result(timeout=60).path
        sampler = client.create_sampling_client(model_path=path).result(timeout=60)
        first = samples(sampler)
        assert first[0].tokens == samples(sampler)[0].tokens
        step(model, [datum(TEXT)])
        model.save_weights_and_get_sampling_client().result(timeout=60)
        with pytest.raises(tinker.RequestFailedError, match="no longer holds"):
            samples(sampler)
        with pytest.raises(tinker.BadRequestError, match="no longer held"):
            client.create_sampling_client(model_path=path).result(timeout=60)


def test_samples_stop_and_have_the_numbers_that_were_asked_for(url):
    with training(url) as (_, model):
        sampler = model.save_weights_and_get_sampling_client().result(timeout=60)
        [free] = samples(sampler, stop=[], max_tokens=20)
        assert (free.stop_reason, len(free.tokens)) == ("length", 20)
        [cut] = samples(sampler, stop=[free.tokens[2]], max_tokens=20)
        assert (cut.stop_reason, cut.tokens) == ("stop", free.tokens[:3])
        prompt = types.ModelInput.from_ints(TEXT)
        answer = sampler.sample(
            prompt,
            1,
            types.SamplingParams(max_tokens=4, seed=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
            topk_sample_logprobs=2,
        ).result(timeout=60)
        trained = model.forward([datum(TEXT)], "cross_entropy").result(timeout=60)
        assert answer.prompt_logprobs[0] is None
        assert answer.prompt_logprobs[1:] == trained.loss_fn_outputs[0]["logprobs"].data
        assert answer.topk_prompt_logprobs[0] is None
        assert [len(place) for place in answer.topk_prompt_logprobs[1:]] == [3] * 7
        [sequence] = answer.sequences
        for token, logprob, top in zip(
            sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True
        ):
            assert len(top) == 2
            assert dict(top).get(token, logprob) == logprob
        assert sampler.compute_logprobs(prompt).result(timeout=60) == answer.prompt_logprobs


def test_a_request_is_done_once_however_often_it_is_sent(url):
    """The same number has the same answer and no second effect, another request is refused."""
    with training(url) as (_, model):
        before = step(model, [datum(TEXT)]).metrics["loss:sum"]

        def post(page, body):
            answer = httpx2.post(f"{url}/api/v1/{page}", json=body, headers={"x-api-key": KEY})
            return answer.status_code, answer.json()

        losses = {
            "model_id": model.model_id,
            "seq_id": 3,
            "forward_backward_input": {
                "loss_fn": "cross_entropy",
                "data": [
                    {
                        "model_input": {"chunks": [{"type": "encoded_text", "tokens": TEXT[:-1]}]},
                        "loss_fn_inputs": {
                            "target_tokens": {"data": TEXT[1:], "dtype": "int64", "shape": [7]}
                        },
                    }
                ],
            },
        }
        update = {"model_id": model.model_id, "seq_id": 4, "adam_params": {"learning_rate": 5e-3}}
        # The later one comes first, and both come twice.
        asked = [
            post(page, body)[1]
            for page, body in 2 * [("optim_step", update), ("forward_backward", losses)]
        ]
        answers = [post("retrieve_future", {"request_id": one["request_id"]})[1] for one in asked]
        assert answers[:2] == answers[2:]
        assert answers[1]["metrics"]["loss:sum"] < before
        status, refused = post("optim_step", update | {"adam_params": {"learning_rate": 1.0}})
        assert status == 400
        assert "seq_id" in refused["error"]["message"]
        # One update since the first: the next loss is that of two steps.
        third = post("forward", losses | {"seq_id": 5})[1]
        loss = post("retrieve_future", {"request_id": third["request_id"]})[1]
    with training(url) as (_, model):
        for _ in range(2):
            step(model, [datum(TEXT)])
        again = model.forward([datum(TEXT)], "cross_entropy").result(timeout=60)
    assert loss["metrics"]["loss:sum"] == again.metrics["loss:sum"]


def test_what_is_not_served_is_refused_by_name(url):
    with service(url) as client:
        with pytest.raises(tinker.BadRequestError, match=r"lora_config\.rank: 32"):
            client.create_lora_training_client("senior").result(timeout=60)
        with pytest.raises(tinker.BadRequestError, match="base_model: 'other'"):
            client.create_lora_training_client("other", rank=0).result(timeout=60)
        model = client.create_lora_training_client("senior", rank=0).result(timeout=60)
        with service(url) as second, pytest.raises(tinker.BadRequestError, match="one model"):
            second.create_lora_training_client("senior", rank=0).result(timeout=60)
        for data, loss, says in [
            ([datum(TEXT)], "stable_reinforce", "loss_fn: 'stable_reinforce'"),
            ([datum(TEXT)], "ppo", "loss_fn_inputs.logprobs: is required"),
            ([datum(TEXT, advantages=[1.0] * 7)], "cross_entropy", "advantages: not an input"),
            ([datum(TEXT, weights=[1.0])], "cross_entropy", "weights: must have 7 numbers"),
            ([datum([*TEXT[:-1], 10**6])], "cross_entropy", "response_token_ids"),
        ]:
            with pytest.raises(tinker.RequestFailedError, match=says):
                model.forward_backward(data, loss).result(timeout=60)
        with pytest.raises(tinker.RequestFailedError, match="no forward_backward"):
            model.optim_step(ADAM).result(timeout=60)
        with pytest.raises(tinker.RequestFailedError, match="is not a name of a checkpoint"):
            model.save_state("../outside").result(timeout=60)
        for outside in ("/etc/passwd", "tinker://../weights/x", "tinker://a/weights/.."):
            with pytest.raises(tinker.BadRequestError, match="path: "):
                client.create_training_client_from_state(outside).result(timeout=60)
        # Nothing of this has changed the model.
        assert step(model, [datum(TEXT)]).metrics["loss:sum"] > 5
    with service(url) as client, pytest.raises(tinker.RequestFailedError, match="no checkpoint"):
        client.create_training_client_from_state("tinker://no/weights/x").result(timeout=60)


def test_updates_of_another_server_are_not_lost(url, cluster, checkpoints):
    """A server that starts anew does not replace weights that nobody has saved."""
    with training(url) as (_, model):
        step(model, [datum(TEXT)])
        with harness.tinker_server(cluster, checkpoints) as other, service(other) as client:
            with pytest.raises(tinker.RequestFailedError, match="that no checkpoint has"):
                client.create_lora_training_client("senior", rank=0).result(timeout=60)
            path = model.save_state("kept").result(timeout=60).path
            goes_on = client.create_training_client_from_state(path).result(timeout=60)
            assert step(goes_on, [datum(TEXT)]).metrics["loss:sum"] > 0


def test_a_junior_that_writes_too_is_known_by_its_spans(fresh_pair, checkpoints):
    """Its tokens have no weight; two sequence ids say who wrote a token."""
    with harness.tinker_server(fresh_pair, checkpoints, "--tandem") as url, training(url) as held:
        _, model = held
        sampler = model.save_weights_and_get_sampling_client().result(timeout=60)
        [one] = samples(sampler, stop=[], max_tokens=32)
        page = f"{url}/api/v1/sequences/{one.sequence_id}"
        spans = httpx2.get(page, headers={"x-api-key": KEY}).json()["spans"]
        authors = {span["sequence_id"].removeprefix(f"{one.sequence_id}/") for span in spans}
        assert authors == {"senior", "junior"}
        assert sum(span["length"] for span in spans) == 32
        data = policy_datum(TEXT[:3], one, 1.0)
        with pytest.raises(tinker.RequestFailedError, match="loss_fn_input_spans: is required"):
            model.forward_backward([data], "importance_sampling").result(timeout=60)
        prompt = types.PromptProvenanceSpan(sequence_id=one.sequence_id, length=2)
        read = [types.PromptProvenanceSpan(sequence_id=one.sequence_id, length=34)]
        whole = [prompt, types.SampledProvenanceSpan(sequence_id=one.sequence_id, length=32)]
        parts = [prompt, *(types.SampledProvenanceSpan(**span) for span in spans)]
        norms = []
        for written in (whole, parts):
            given = data.with_provenance(read, written)
            model.forward_backward([given], "importance_sampling").result(timeout=60)
            still = types.AdamParams(learning_rate=0.0)
            metrics = model.optim_step(still).result(timeout=60).metrics
            senior = sum(s["length"] for s in spans if s["sequence_id"].endswith("/senior"))
            assert metrics["policy/weighted_tokens"] == senior
            norms.append(metrics["policy/grad_norm"])
        assert norms[0] == norms[1]
