"""Episodes with an environment that shows images, on real servers: drawn, scored and trained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import harness
import numpy as np
import pytest
import torch
from family_models import make_vision_model
from gradients import norm_of
from harness import logprobs
from talking import SPECIAL, image_template, write_chat_tokenizer
from tandem.data.dataset import Example
from tandem.environments.calls import CallsInThreads
from tandem.environments.contract import EnvironmentClass
from tandem.environments.driver import Driver
from tandem.environments.episode import Episode, Rules, StopReason
from tandem.environments.template import Turns
from tandem.environments.tool_calls import ToolCall
from tandem.models.tokenizer import TextCodec
from tandem.rpc.images import VisionInput, pixels_of
from tandem.rpc.requests import PolicySample, Prompt, ScoredTokens, SupervisedSample
from tandem.rpc.wire import from_tensor
from tandem.run_directory.episodes import NoRecord
from tandem.settings.environment import EnvironmentSettings
from tandem.utils.authors import ENVIRONMENT
from vision_reference import VisionReference

# make_vision_model() takes the last but one of the tokenizer's ids for an image.
PAD = SPECIAL[-2]
PARTS = image_template(PAD)
WALK = '''
from PIL import Image

class Walk:
    """A place to look around."""

    def reset(self, start, **row):
        self.steps, self.start = 0, start

    def look(self) -> Image.Image:
        """Shows what is there."""
        self.steps += 1
        return Image.new("RGB", (16, 8 + 8 * (self.steps % 2)), (self.start, self.steps, 0))
'''
LONGEST = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model that takes images, with a tokenizer, a chat template and a processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = tmp_path_factory.mktemp("walk")
    tokenizer = write_chat_tokenizer(folder / "tokenizer", PARTS)
    (tokenizer / "config.json").write_text(json.dumps({"vocab_size": 256 + len(SPECIAL)}))
    make_vision_model(folder / "model", "Qwen2VL", tokenizer)
    (folder / "model" / "chat_template.jinja").write_text(PARTS)
    processor = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=4096)
    processor.save_pretrained(folder / "model")
    return folder / "model"


def episodes_of(rollout, model, tmp_path, count=4):
    """Draws episodes in which every turn is a look around."""
    (tmp_path / "env.py").write_text(WALK)
    settings = EnvironmentSettings(**{"class": f"{tmp_path}/env.py:Walk", "max_turns": 3})
    environment = EnvironmentClass.load(settings)
    codec = TextCodec(model)
    kwargs = {"tools": environment.shown_tools}
    turns = Turns(codec, kwargs)
    rules = Rules(
        settings, environment, codec, turns, lambda text: [ToolCall("look")], kwargs, LONGEST
    )
    messages = [{"role": "user", "content": "Go"}]
    example = Example({"start": 9}, "Go", codec.chat(messages, kwargs), "row 1", messages=messages)
    # Most tokens end a turn, so that a random model has several.
    sampling = {"max_tokens": 8, "temperature": 1.0, "stop_token_ids": list(range(200))}
    request = Prompt(example.token_ids, seed=3, num_samples=count, sampling=sampling)
    request = dataclasses.replace(
        request,
        tandem={"selection_strategy": "word", "prob_senior": 0.5},
        return_other_logprobs=True,
    )
    episodes = [Episode((0, sample), example, request, 5, rules) for sample in range(count)]

    def generate(prompts, on_answer):
        for index, samples in enumerate(rollout.generate(list(prompts))):
            on_answer(index, samples)

    calls = CallsInThreads("test", 2, 30.0)
    ended = []
    Driver(rules, calls, NoRecord(), generate, on_end=ended.append).run(episodes)
    calls.close()
    return sorted(ended, key=lambda one: one.key)


def test_episodes_with_images_are_drawn_scored_and_trained(model, models, tmp_path):
    pair = dataclasses.replace(models, senior=model, junior=model)
    lane = {"max_model_len": LONGEST}
    with (
        harness.cluster(tmp_path / "cluster", pair, rollout=lane, trainer=lane) as cluster,
        harness.rollout_client(cluster) as rollout,
        harness.trainer_client(cluster) as trainer,
    ):
        episodes = episodes_of(rollout, model, tmp_path)
        assert {one.stop for one in episodes} <= {StopReason.TURNS, StopReason.TOKENS}
        assert max(len(one.trajectory.vision_inputs) for one in episodes) == 2
        again = episodes_of(rollout, model, tmp_path)
        assert [one.trajectory for one in again] == [one.trajectory for one in episodes]
        for one in episodes:
            whole = one.trajectory
            drawn = np.array([author != ENVIRONMENT for author in whole.authorship_mask])
            scored = ScoredTokens(
                [*whole.prompt_token_ids, *whole.response_token_ids],
                len(whole.prompt_token_ids),
                whole.vision_inputs,
            )
            [score] = rollout.score([scored]).sequences
            np.testing.assert_array_equal(
                from_tensor(score.senior_logprobs)[drawn], logprobs(whole, "senior")[drawn]
            )
        samples = [
            PolicySample(one.trajectory, "group", reward=float(i)) for i, one in enumerate(episodes)
        ]
        report = trainer.train_step(samples, run_id="run", step=1, expected_version=0).report
        assert report.metrics["mismatch/max_abs_logprob_diff"] < 1e-6
        assert report.metrics["policy/grad_norm"] > 0


def shown_in(trajectory):
    """The images of a trajectory with their pixels."""
    found = []
    for one in trajectory.vision_inputs:
        grid = (one.grid_t, one.grid_h, one.grid_w)
        pixels = np.frombuffer(pixels_of(one.digest), "<f4").reshape(np.prod(grid), -1)
        found.append(VisionInput(pixels, grid))
    return found


def test_a_critic_values_and_learns_episodes_with_images(model, models, tmp_path):
    """Values, loss and gradient are those of `transformers` in float64."""
    pair = dataclasses.replace(models, senior=model, junior=model)
    lane = {"max_model_len": LONGEST}
    critic_section = lane | {"optimizer": {"max_grad_norm": 0.0}}
    with (
        harness.cluster(
            tmp_path / "cluster", pair, rollout=lane, trainer=lane, critic=critic_section
        ) as cluster,
        harness.rollout_client(cluster) as rollout,
        harness.trainer_client(cluster) as trainer,
        harness.critic_client(cluster) as critic,
    ):
        drawn = episodes_of(rollout, model, tmp_path)  # the pixels are known while they live
        episodes = [one.trajectory for one in drawn]
        saved = critic.save_checkpoint(str(tmp_path / "saved"), "base")
        replies = critic.compute_values(
            SupervisedSample(one.prompt_token_ids, one.response_token_ids, one.vision_inputs)
            for one in episodes
        )
        values = [from_tensor(reply.values) for reply in replies]
        rewards = [float(i) - 1 for i in range(len(episodes))]
        samples = [
            PolicySample(one, "group", reward=reward)
            for one, reward in zip(episodes, rewards, strict=True)
        ]
        metrics = trainer.train_step(
            samples,
            run_id="run",
            step=1,
            expected_version=0,
            objective={"advantage_estimator": "gae"},
        ).report.metrics
        assert critic.info().server.weights.version == 1
    reference = VisionReference(model, "Qwen2VL", "float64")
    head = torch.from_numpy(harness.weights(Path(saved))["score.weight"]).double()
    head.requires_grad_()
    errors = []
    for one, own, reward in zip(episodes, values, rewards, strict=True):
        hidden = reference.hidden([*one.prompt_token_ids, *one.response_token_ids], shown_in(one))
        states = (hidden @ head.T)[len(one.prompt_token_ids) - 1 : -1, 0]
        np.testing.assert_allclose(own, states.detach(), rtol=1e-4, atol=2e-5)
        steps = torch.tensor([author != ENVIRONMENT for author in one.authorship_mask])
        # With gamma and lambda 1 the return of every step is the reward.
        errors.append(states[steps] - reward)
    loss = 0.5 * torch.cat(errors).square().mean()
    loss.backward()
    assert metrics["critic/loss"] == pytest.approx(loss.item(), rel=1e-4)
    parameters = dict(reference.model.model.named_parameters())
    assert any(name.startswith("visual.") for name in parameters)
    norm = norm_of([head.grad, *(p.grad for p in parameters.values())])
    assert metrics["critic/grad_norm"] == pytest.approx(norm, rel=1e-4)
