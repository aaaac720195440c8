"""Images and videos in requests: Generate, Score, TrainStep, ComputeLogProbs and ComputeValues."""

from __future__ import annotations

import base64
import dataclasses
import json
import subprocess
import sys
from collections import Counter

import grpc
import harness
import numpy as np
import pytest
import tandem
from family_models import VISION_FAMILIES, make_vision_model
from harness import flat, logprobs
from PIL import Image
from starlette.testclient import TestClient
from tandem._proto.types.v1 import vision_pb2
from tandem.errors import FailedPreconditionError, InvalidArgumentError
from tandem.models.tokenizer import TextCodec
from tandem.openai_server.app import Settings, application
from tandem.rpc.images import VisionInput
from tandem.rpc.requests import (
    PolicySample,
    Prompt,
    ResponseSoFar,
    ScoredTokens,
    SupervisedSample,
)
from tandem.rpc.seeds import prompt_seed
from tandem.rpc.wire import from_tensor
from tandem.settings.run import DpoSettings
from tandem.training.preferences import log_prob_sums, step_of_pairs
from tandem.utils.authors import ENVIRONMENT
from vision_reference import VisionReference

PATCH_VALUES = 3 * 2 * 4 * 4
MERGED = 4  # patches that become one token
TOLERANCE = 2e-4  # of a log-prob of float32 `transformers`; numerics.reference_atol
WORD = {"selection_strategy": "word", "prob_senior": 0.5, "max_gap_tokens": 4}


def pixels(grid, seed, kind="image", seconds=1.0):
    patches = int(np.prod(grid))
    values = np.random.default_rng(seed).standard_normal((patches, PATCH_VALUES), np.float32)
    return VisionInput(values, grid, kind, seconds)


SMALL, WIDE, TALL = pixels((1, 4, 4), 1), pixels((1, 2, 14), 2), pixels((1, 10, 6), 3)
CLIP = pixels((3, 4, 6), 4, "video", 0.75)


class Vision:
    """A running cluster of one family, its prompts and the same model in `transformers`."""

    def __init__(self, cluster, family, senior, models):
        self.cluster, self.family, self.senior, self.models = cluster, family, senior, models
        config = json.loads((senior / "config.json").read_text())
        self.tokens = {"image": config["image_token_id"], "video": config["video_token_id"]}
        self.reference = VisionReference(senior, family)

    def prompt(self, *parts, **rest):
        """A prompt of images between runs of text, whose lengths are given."""
        rng = np.random.default_rng(len(parts))
        ids, images = [], []
        for part in parts:
            if isinstance(part, VisionInput):
                images.append(part)
                ids += [self.tokens[part.kind]] * (len(part.pixels) // MERGED)
            else:
                ids += rng.integers(2, 280, size=part).tolist()
        rest = {"sampling": {"max_tokens": 12, "temperature": 1.0}} | rest
        return Prompt(token_ids=ids, vision_inputs=images, seed=len(ids), **rest)

    def text(self, response):
        """The tokens before the first that stands for an image, which transformers cannot read."""
        ids = list(response)
        return ids[: next((i for i, id in enumerate(ids) if id in self.tokens.values()), len(ids))]

    def prompts(self, **rest):
        """Prompts with one image, with none, with several, with a video; two share an image."""
        return [
            self.prompt(5, SMALL, 4, **rest),
            self.prompt(9, **rest),
            self.prompt(1, WIDE, 3, TALL, 2, SMALL, 3, **rest),
            self.prompt(3, CLIP, 6, **rest),
        ]


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def vision(request, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_vision_model(folder / "senior", request.param, models.senior)
    make_vision_model(folder / "junior", request.param, models.senior, seed=8)
    pair = dataclasses.replace(models, senior=folder / "senior", junior=folder / "junior")
    optimizer = {"learning_rate": 1e-2, "weight_decay": 0.0}
    with harness.cluster(
        folder / "cluster", pair, trainer={"optimizer": optimizer}, critic={}
    ) as cluster:
        yield Vision(cluster, request.param, folder / "senior", pair)


def uploads(client):
    """Counts the messages of UploadBlob that a client sends, by call."""
    sent = Counter()
    original = client._send

    async def send(method, messages, timeout_seconds=None):
        sent[method] += 1
        return await original(method, messages, timeout_seconds)

    client._send = send
    return sent


def test_greedy_tokens_are_those_of_transformers(vision):
    greedy = vision.prompts(
        tandem={"enabled": False}, sampling={"max_tokens": 8, "temperature": 0.0}
    )
    with harness.rollout_client(vision.cluster) as rollout:
        assert rollout.info().server.model.takes_images
        for prompt, [trajectory] in zip(greedy, rollout.generate(greedy), strict=True):
            response = vision.text(harness.tokens(trajectory))
            expected = vision.reference.greedy(
                prompt.token_ids, prompt.vision_inputs, len(response)
            )
            assert response == expected
            reference = vision.reference.logprobs(prompt.token_ids, response, prompt.vision_inputs)
            ours = logprobs(trajectory, "author")[: len(response)]
            np.testing.assert_allclose(ours, reference, rtol=0, atol=TOLERANCE)
            assert [image.digest for image in trajectory.vision_inputs] == [
                image.digest for image in prompt.vision_inputs
            ]


def test_every_server_has_the_same_bits_alone_and_in_a_batch(vision):
    prompts = vision.prompts(tandem=WORD, num_samples=3, return_other_logprobs=True)
    with (
        harness.rollout_client(vision.cluster) as rollout,
        harness.trainer_client(vision.cluster) as trainer,
        harness.critic_client(vision.cluster) as critic,
    ):
        together = flat(rollout.generate(prompts))
        alone = [t for prompt in prompts for t in rollout.generate([prompt])[0]]
        assert [harness.response_bytes(t) for t in together] == [
            harness.response_bytes(t) for t in alone
        ]
        sequences = [
            SupervisedSample(t.prompt_token_ids, t.response_token_ids, t.vision_inputs)
            for t in together
        ]
        computed = trainer.compute_log_probs(sequences)
        scored = rollout.score(
            [
                ScoredTokens(
                    [*t.prompt_token_ids, *t.response_token_ids],
                    len(t.prompt_token_ids),
                    t.vision_inputs,
                )
                for t in together
            ]
        ).sequences
        for t, ours, score in zip(together, computed, scored, strict=True):
            senior = logprobs(t, "senior")
            np.testing.assert_array_equal(from_tensor(ours.logprobs), senior)
            np.testing.assert_array_equal(from_tensor(score.senior_logprobs), senior)
        values = critic.compute_values(sequences)
        for sequence, value in zip(sequences, values, strict=True):
            [single] = critic.compute_values([sequence])
            np.testing.assert_array_equal(from_tensor(single.values), from_tensor(value.values))
        [other] = critic.compute_values(
            [dataclasses.replace(sequences[0], vision_inputs=[pixels((1, 4, 4), 9)])]
        )
        assert (from_tensor(other.values) != from_tensor(values[0].values)).all()


def test_images_of_turns_have_the_bits_of_every_server(vision):
    """An image between two turns is read as if it stood in the prompt."""
    first = vision.prompt(4, SMALL, 3, tandem=WORD, return_other_logprobs=True)
    image = vision.tokens["image"]
    with (
        harness.rollout_client(vision.cluster) as rollout,
        harness.trainer_client(vision.cluster) as trainer,
        harness.critic_client(vision.cluster) as critic,
    ):
        [[turn]] = rollout.generate([first])
        said, images = [5, 6], []
        start = len(first.token_ids) + len(turn.response_token_ids)
        for one in (WIDE, TALL):
            images.append(dataclasses.replace(one, first_token=start + len(said)))
            said += [image] * (len(one.pixels) // MERGED) + [7]
        second = dataclasses.replace(
            first,
            response=ResponseSoFar.after(turn, said),
            vision_inputs=[*first.vision_inputs, *images],
        )
        [[next_turn]] = rollout.generate([second])
        whole = tandem.join(turn, said, next_turn)
        assert list(whole.vision_inputs) == [one.message() for one in second.vision_inputs]
        drawn = np.array([author != ENVIRONMENT for author in whole.authorship_mask])
        senior = logprobs(whole, "senior")[drawn]
        sequence = SupervisedSample(
            whole.prompt_token_ids, whole.response_token_ids, whole.vision_inputs
        )
        [computed] = trainer.compute_log_probs([sequence])
        np.testing.assert_array_equal(from_tensor(computed.logprobs)[drawn], senior)
        ids = [*whole.prompt_token_ids, *whole.response_token_ids]
        scored = ScoredTokens(ids, len(whole.prompt_token_ids), whole.vision_inputs)
        [score] = rollout.score([scored]).sequences
        np.testing.assert_array_equal(from_tensor(score.senior_logprobs)[drawn], senior)
        # As a prompt of everything before the last turn.
        before = len(ids) - len(next_turn.response_token_ids)
        prompt = dataclasses.replace(second, token_ids=ids[:before], response=ResponseSoFar())
        plain = [*first.vision_inputs, WIDE, TALL]
        written = vision.text(next_turn.response_token_ids)
        expected = vision.reference.logprobs(prompt.token_ids, written, plain)
        ours = logprobs(next_turn, "senior")[: len(written)]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE)
        of_prompt = SupervisedSample(ids[:before], next_turn.response_token_ids, plain)
        for compute, field in (
            (trainer.compute_log_probs, "logprobs"),
            (critic.compute_values, "values"),
        ):
            [a], [b] = compute([sequence]), compute([of_prompt])
            count = len(next_turn.response_token_ids)
            np.testing.assert_array_equal(
                from_tensor(getattr(a, field))[-count:], from_tensor(getattr(b, field))[-count:]
            )
        refusals = {
            "vision_inputs[1].first_token": [SMALL, dataclasses.replace(WIDE, first_token=2)],
            "vision_inputs[1]": [SMALL, dataclasses.replace(WIDE, first_token=start)],
            f"response.token_ids[{len(turn.response_token_ids) + 2}]": [SMALL],
        }
        for field, given in refusals.items():
            with pytest.raises(InvalidArgumentError) as caught:
                rollout.generate([dataclasses.replace(second, vision_inputs=given)])
            assert caught.value.field == field


def test_pixels_travel_once_and_come_back_after_they_were_dropped(vision, models, tmp_path):
    images = [pixels((1, 4, 4), seed) for seed in (21, 22, 23)]
    prompts = [vision.prompt(4, image, 3, tandem={"enabled": False}) for image in images]
    pair = dataclasses.replace(models, senior=vision.senior)
    room = {"server": {"blob_cache_bytes": 2 * images[0].pixels.nbytes}}
    with (
        harness.cluster(tmp_path / "cluster", pair, rollout=room) as small,
        harness.rollout_client(small) as rollout,
    ):
        sent = uploads(rollout)
        expected = [rollout.generate([prompt]) for prompt in prompts]
        assert sent["UploadBlob"] == 3
        again = [rollout.generate([prompts[2]]), rollout.generate([prompts[1]])]
        assert sent["UploadBlob"] == 3, "they are held"
        assert rollout.generate([prompts[0]]) == expected[0]
        assert sent["UploadBlob"] == 4, "it was dropped"
        assert again == [expected[2], expected[1]]
        size = images[0].pixels.nbytes
        for metric, value in {
            "tandem_blob_capacity_bytes": 2 * size,
            "tandem_blob_bytes": 2 * size,
            "tandem_blob_bytes_received_total": 4 * size,
            "tandem_blobs_dropped_total": 2,
        }.items():
            assert harness.gauge(small.rollouts[0], metric) == value
        with pytest.raises(Exception, match="blob_cache_bytes") as caught:
            rollout.upload_images([pixels((1, 8, 8), 1)])
        assert caught.value.code == grpc.StatusCode.OUT_OF_RANGE
        # Without the pixels the client cannot help.
        unknown = vision_pb2.VisionInput(kind=1, digest="0" * 64, grid_t=1, grid_h=4, grid_w=4)
        scored = ScoredTokens([*prompts[0].token_ids, 5], len(prompts[0].token_ids), [unknown])
        with pytest.raises(FailedPreconditionError) as missing:
            rollout.score([scored])
        assert missing.value.reason == "BLOB_MISSING"
        assert missing.value.field == "sequences[0].vision_inputs[0].digest"


def test_what_does_not_fit_is_refused_by_name(vision):
    good = vision.prompt(5, SMALL, 4)
    cases = {
        "vision_inputs": dataclasses.replace(good, vision_inputs=[]),
        "vision_inputs[1]": dataclasses.replace(good, vision_inputs=[SMALL, SMALL]),
        "vision_inputs[0]": dataclasses.replace(good, vision_inputs=[WIDE]),
        "vision_inputs[0].digest": dataclasses.replace(
            good, vision_inputs=[VisionInput(SMALL.pixels[:, :-1], SMALL.grid)]
        ),
    }
    with (
        harness.rollout_client(vision.cluster) as rollout,
        harness.trainer_client(vision.cluster) as trainer,
        harness.critic_client(vision.cluster) as critic,
    ):
        for field, prompt in cases.items():
            sample = SupervisedSample(prompt.token_ids, [5, 6], prompt.vision_inputs)
            with pytest.raises(InvalidArgumentError) as caught:
                rollout.generate([dataclasses.replace(prompt, tandem={"enabled": False})])
            assert caught.value.field == field
            with pytest.raises(InvalidArgumentError) as caught:
                trainer.train_step([sample], run_id="bad", step=1, expected_version=0)
            assert caught.value.field == f"samples[0].{field}"
            for compute in (trainer.compute_log_probs, critic.compute_values):
                with pytest.raises(InvalidArgumentError) as caught:
                    compute([sample])
                assert caught.value.field == f"requests[0].{field}"


def test_a_model_without_a_tower_takes_no_images(models, tmp_path):
    with (
        harness.cluster(tmp_path / "cluster", models) as cluster,
        harness.rollout_client(cluster) as rollout,
    ):
        assert not rollout.info().server.model.takes_images
        with pytest.raises(FailedPreconditionError) as caught:
            rollout.generate([Prompt(token_ids=[5, 6, 7], vision_inputs=[SMALL])])
        assert caught.value.reason == "NO_IMAGES"
        unknown = vision_pb2.VisionInput(kind=1, digest="0" * 64)
        with pytest.raises(InvalidArgumentError) as caught:
            rollout.score([ScoredTokens([5, 6], 1, [unknown])])
        assert caught.value.field == "sequences[0].vision_inputs"


def step(trainer, samples, number, **rest):
    version = trainer.info().server.weights.version
    return trainer.train_step(
        samples, run_id="run", step=number, expected_version=version, **rest
    ).report


def test_steps_train_the_tower_and_every_server_agrees_afterwards(vision, tmp_path):
    prompts = vision.prompts(tandem={"enabled": False})
    with (
        harness.rollout_client(vision.cluster) as rollout,
        harness.trainer_client(vision.cluster) as trainer,
    ):
        trainer.load_base_model()
        address = rollout.info().server.advertised_address
        trainer.publish_weights([address], allow_rollback=True)
        samples = [
            SupervisedSample(prompt.token_ids, [7, 9, 11, 13], prompt.vision_inputs)
            for prompt in prompts
        ]
        report = step(trainer, samples, 1)
        loss, norm = vision_loss_and_norm(vision, samples)
        assert report.metrics["loss/total"] == pytest.approx(loss, rel=1e-5)
        assert report.metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)

        trainer.publish_weights([address])
        groups = rollout.generate([dataclasses.replace(one, num_samples=4) for one in prompts])
        policy = [
            PolicySample(t, f"g{g}", reward=float(i % 2))
            for g, group in enumerate(groups)
            for i, t in enumerate(group)
        ]
        report = step(trainer, policy, 2)
        # The same weights: no mismatch beyond the rounding of the recorded float32.
        assert report.metrics["mismatch/max_abs_logprob_diff"] < 1e-6
        trainer.publish_weights([address])
        trainer.export_model(str(tmp_path / "exported"))
        [trajectory] = rollout.generate([prompts[2]])[0]
        exported = VisionReference(tmp_path / "exported", vision.family)
        response = vision.text(harness.tokens(trajectory))
        expected = exported.logprobs(prompts[2].token_ids, response, prompts[2].vision_inputs)
        ours = logprobs(trajectory, "author")[: len(response)]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE)
        # A repeat is answered from the table; another image makes it another step.
        again = dataclasses.replace(samples[0], vision_inputs=[pixels((1, 4, 4), 33)])
        first = step(trainer, samples[:1], 3, request_id="three")
        assert trainer.train_step(
            samples[:1], run_id="run", step=3, expected_version=2, request_id="three"
        ).replayed
        with pytest.raises(Exception, match="REQUEST_ID_REUSED"):
            trainer.train_step(
                [again], run_id="run", step=3, expected_version=2, request_id="three"
            )
        assert first.weights.version == 3


def vision_loss_and_norm(vision, samples):
    """The mean cross-entropy of the responses, and the norm of its gradient, by transformers."""
    import torch

    model = vision.reference.model
    model.zero_grad()
    count = sum(len(sample.response_token_ids) for sample in samples)
    total = 0.0
    for sample in samples:
        prompt, response = list(sample.prompt_token_ids), list(sample.response_token_ids)
        logits = vision.reference.logits([*prompt, *response], sample.vision_inputs)
        rows = logits[len(prompt) - 1 : -1]
        loss = torch.nn.functional.cross_entropy(rows, torch.tensor(response), reduction="sum")
        (loss / count).backward()
        total += loss.item() / count
    squares = sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None)
    assert any("visual" in name for name, p in model.named_parameters() if p.grad is not None)
    return total, float(squares.sqrt())


def test_a_pair_may_ask_about_an_image(vision):
    prompt = vision.prompts()[0]
    assert prompt.vision_inputs
    pair = [
        SupervisedSample(prompt.token_ids, response, prompt.vision_inputs)
        for response in ([7, 9, 11, 13], [8, 10])
    ]
    with harness.trainer_client(vision.cluster) as trainer:
        trainer.load_base_model()
        sums = log_prob_sums(trainer, pair)
        expected = [
            vision.reference.logprobs(
                one.prompt_token_ids, one.response_token_ids, one.vision_inputs
            ).sum()
            for one in pair
        ]
        np.testing.assert_allclose(sums, expected, rtol=1e-5)
        gaps = []
        for step_number in (1, 2, 3):
            loss, _ = step_of_pairs(
                trainer,
                pair,
                np.array(expected),
                DpoSettings(beta=1.0),
                run_id="pairs",
                step=step_number,
                expected_version=step_number - 1,
            )
            gaps.append(loss.metrics["rewards/margins"])
        assert abs(gaps[0]) < 1e-3
        assert gaps[0] < gaps[1] < gaps[2]


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "zero", "stage": 3},
        {"name": "megatron", "tensor_model_parallel_size": 2},
        {"name": "megatron", "pipeline_model_parallel_size": 2},
        {"name": "megatron", "context_parallel_size": 2},
    ],
    ids=["zero", "tensor", "pipeline", "context"],
)
def test_two_ranks_learn_from_images_as_one_process_does(vision, strategy, tmp_path):
    samples = [
        SupervisedSample(prompt.token_ids, [7, 9, 11, 13], prompt.vision_inputs)
        for prompt in vision.prompts()
    ]
    # Adam would make steps of gradients that are rounding errors.
    optimizer = {"learning_rate": 1e-3, "epsilon": 1e-5}
    one, two = {"optimizer": optimizer}, {"ranks": 2, "strategy": strategy, "optimizer": optimizer}
    reports, values = [], []
    for name, section in {"one": one, "two": two}.items():
        with (
            harness.cluster(
                tmp_path / name, vision.models, trainer=section, critic=section
            ) as cluster,
            harness.trainer_client(cluster) as trainer,
            harness.critic_client(cluster) as critic,
        ):
            reports.append([step(trainer, samples, number).metrics for number in (1, 2)])
            values.append([from_tensor(one.values) for one in critic.compute_values(samples)])
    for single, ranked in zip(*reports, strict=True):
        for name in ("loss/total", "policy/grad_norm"):
            assert ranked[name] == pytest.approx(single[name], rel=1e-5)
    np.testing.assert_allclose(np.concatenate(values[1]), np.concatenate(values[0]), atol=1e-5)


def test_a_step_with_a_critic_sends_it_the_images(vision):
    with (
        harness.rollout_client(vision.cluster) as rollout,
        harness.trainer_client(vision.cluster) as trainer,
    ):
        trainer.load_base_model()
        trainer.publish_weights([rollout.info().server.advertised_address], allow_rollback=True)
        image = pixels((1, 6, 4), 77)  # which the critic has never seen
        prompts = [
            vision.prompt(4, image, 3, tandem=WORD, num_samples=2, return_other_logprobs=True)
        ]
        samples = [
            PolicySample(t, "g", reward=float(i))
            for i, t in enumerate(flat(rollout.generate(prompts)))
        ]
        report = step(trainer, samples, 1, objective={"advantage_estimator": "gae"})
        assert report.metrics["critic/grad_norm"] > 0


@pytest.fixture
def picture(tmp_path):
    """A file with an image."""
    colours = np.random.default_rng(3).integers(0, 255, (16, 24, 3), np.uint8)
    file = tmp_path / "picture.png"
    Image.fromarray(colours).save(file)
    return file


@pytest.fixture
def codec(vision):
    """The tokenizer of the senior, with an image processor and a chat template."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = vision.senior
    processor = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=256, max_pixels=4096)
    processor.save_pretrained(folder)
    image = TextCodec(folder).decode([vision.tokens["image"]])
    template = "{% for part in messages[0].content %}{% if part.type == 'image' %}IMAGE"
    template += "{% else %}{{ part.text }}{% endif %}{% endfor %}:"
    (folder / "chat_template.jinja").write_text(template.replace("IMAGE", image))
    return TextCodec(folder)


def test_openais_api_and_the_command_show_images(vision, codec, picture):
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": " two three"}]
    ids, images = codec.chat_with_images([{"role": "user", "content": parts}])
    prompt = Prompt(
        ids,
        vision_inputs=images,
        seed=prompt_seed(3, 0, 0, "generate"),
        sampling={"max_tokens": 6},
        tandem={"enabled": False},
    )
    address = vision.cluster.rollouts[0].address
    with harness.rollout_client(vision.cluster) as rollout:
        [[expected]] = rollout.generate([prompt])
    written = codec.decode(expected.response_token_ids)

    url = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
    parts[0] = {"type": "image_url", "image_url": {"url": url}}
    with TestClient(application(Settings(address, codec, "senior"))) as http:
        request = {"messages": [{"role": "user", "content": parts}], "model": "senior", "seed": 3}
        reply = http.post(
            "/v1/chat/completions", json=request | {"max_tokens": 6, "logprobs": True}
        )
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    assert choice["message"]["content"] == written
    np.testing.assert_allclose(
        [token["logprob"] for token in choice["logprobs"]["content"]],
        logprobs(expected, "author")[: len(choice["logprobs"]["content"])],
        rtol=0,
        atol=1e-6,
    )
    command = [sys.executable, "-m", "tandem", "generate", " two three", "--rollout", address]
    options = ["--chat", "--image", picture, "--solo", "--json", "--seed", "3"]
    done = subprocess.run(
        [*command, *options, "--tokenizer", vision.senior, "--max-tokens", "6"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == written
