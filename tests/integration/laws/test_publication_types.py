"""Weights travel in the type that a rollout server keeps, and its bits are those of the file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from harness import TANDEM, assert_same_bits, flat, prompts
from layouts import ranked, ranked_rollout
from tandem.recording import files
from tandem.recording.proxy import RecordingProxy
from tandem.rpc.client import RolloutClient, TrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.rpc.wire import from_tensor

SENT = "tandem_weight_bytes_sent_total"
# On one machine the receiver reads them in the sender's file.
RECEIVED = 'tandem_weight_bytes_received_total{transport="file"}'
STREAMED = 'tandem_weight_bytes_received_total{transport="stream"}'
ROUNDED = {"senior_dtype": "bfloat16"}
# The sections of the rollout server and of the trainer.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one-rank": ({}, {}),
    "rounded-trainer": ({}, {"compute": {"weight_dtype": "bfloat16", "num_threads": 1}}),
    "zero": ({}, ranked("zero")),
    "tensor": ({}, ranked("tensor")),
    "pipeline": ({}, ranked("pipeline")),
    "ranked-rollout": (ranked_rollout(), {}),
}


def train(trainer: TrainerClient, number: int = 1) -> None:
    samples = [SupervisedSample([5, 6, 7], [8, 9, 10])] * 2
    trainer.train_step(samples, run_id="r", step=number, expected_version=number - 1)


def export(trainer: TrainerClient, models: harness.Models, path: Path) -> tuple[int, int]:
    """Exports the weights; returns the number of values of matrices, and of norms and biases."""
    trainer.export_model(str(path))
    shutil.copy(models.tokenizer / "tokenizer.json", path / "tokenizer.json")
    sizes = [(value.ndim, value.size) for value in harness.weights(path).values()]
    return sum(n for dims, n in sizes if dims == 2), sum(n for dims, n in sizes if dims != 2)


def answers(client: RolloutClient) -> tuple[list[Any], np.ndarray]:
    """Responses of both models, and the senior's log-probs of a text."""
    responses = flat(client.generate(prompts(3, TANDEM["word"], num_samples=2)))
    [scored] = client.score([(list(range(5, 35)), 1)]).sequences
    return responses, from_tensor(scored.senior_logprobs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_of_the_bytes_make_the_bits_of_the_file(models, tmp_path, layout):
    lanes, trainer_section = LAYOUTS[layout]
    with (
        harness.cluster(
            tmp_path / "published", models, rollout=lanes | ROUNDED, trainer=trainer_section
        ) as running,
        harness.rollout_client(running) as client,
        harness.trainer_client(running) as trainer,
    ):
        train(trainer)
        reply = trainer.publish_weights([client.address])
        [result] = reply.results
        assert result.digest == reply.weights.digest == trainer.info().server.weights.digest
        assert client.info().server.weights == reply.weights
        matrices, others = export(trainer, models, tmp_path / "model")
        assert reply.bytes == 4 * matrices + 4 * others
        assert result.bytes == 2 * matrices + 4 * others
        assert harness.gauge(running.trainer, SENT) == result.bytes
        assert harness.gauge(running.rollouts[0], RECEIVED) == result.bytes
        published, scores = answers(client)
    section = lanes | ROUNDED | {"senior_model": str(tmp_path / "model")}
    with (
        harness.cluster(tmp_path / "loaded", models, rollout=section) as running,
        harness.rollout_client(running) as client,
    ):
        assert client.info().server.weights.digest == reply.weights.digest
        loaded, loaded_scores = answers(client)
    assert_same_bits(published, loaded)
    assert np.array_equal(scores, loaded_scores)


def test_one_publication_reaches_servers_that_keep_different_types(models, tmp_path):
    with (
        harness.cluster(tmp_path / "wide", models, trainer={}) as wide,
        harness.cluster(tmp_path / "rounded", models, rollout=ROUNDED) as rounded,
        harness.cluster(
            tmp_path / "quantised", models, rollout={"senior_quantization": "int8"}
        ) as quantised,
        harness.trainer_client(wide) as trainer,
    ):
        servers = [running.rollouts[0] for running in (wide, rounded, quantised)]
        for number in (1, 2):
            train(trainer, number)
            reply = trainer.publish_weights([server.address for server in servers])
            assert [result.digest for result in reply.results] == [reply.weights.digest] * 3
            sizes = [result.bytes for result in reply.results]
            assert sizes[0] == sizes[2] == reply.bytes
            assert reply.bytes / 2 <= sizes[1] < 0.6 * reply.bytes
        assert harness.gauge(wide.trainer, SENT) == 2 * sum(sizes)


def test_a_publication_through_a_recording_proxy_travels_as_bytes(models, tmp_path):
    """A recording has the weights, so the receiver does not read them in the sender's file."""
    path = tmp_path / "calls.rec"
    files.create(path)
    with (
        harness.cluster(tmp_path / "cluster", models, trainer={}) as running,
        harness.trainer_client(running) as trainer,
    ):
        [rollout] = running.rollouts
        train(trainer)
        with RecordingProxy(rollout.address, 0, files.Recorder(path)) as proxy:
            [result] = trainer.publish_weights([f"127.0.0.1:{proxy.port}"]).results
        assert not result.status.code
        assert harness.gauge(rollout, STREAMED) == result.bytes
        assert harness.gauge(rollout, RECEIVED) == 0
    assert path.stat().st_size > result.bytes / 2, "the recording is compressed"
