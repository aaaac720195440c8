"""Weights of a publication go from GPU to GPU, where both servers have one of the same machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import pytest
from harness import TANDEM, assert_same_bits, flat, prompts
from layouts import ranked, ranked_rollout
from tandem.cluster.local import LocalCluster, find_binary
from tandem.recording import files
from tandem.recording.proxy import RecordingProxy
from tandem.rpc.client import RolloutClient, TrainerClient
from tandem.rpc.requests import SupervisedSample
from tandem.rpc.retry import RetryPolicy
from tandem.rpc.wire import from_tensor

pytestmark = pytest.mark.skipif(
    os.environ.get("TANDEM_TEST_DEVICE") != "cuda", reason="servers on GPUs"
)

RECEIVED = 'tandem_weight_bytes_received_total{{transport="{}"}}'
LORA = {"lora": {"rank": 4, "alpha": 8, "target_modules": ["all-linear"]}}


def received(running: LocalCluster, transport: str) -> float:
    """The bytes of updates that the rollout server got in one way."""
    return harness.gauge(running.rollouts[0], RECEIVED.format(transport))


def train(trainer: TrainerClient, number: int = 1) -> None:
    samples = [SupervisedSample([5, 6, 7], [8, 9, 10])] * 2
    trainer.train_step(samples, run_id="r", step=number, expected_version=number - 1)


def answers(client: RolloutClient) -> tuple[list[Any], np.ndarray]:
    """Responses of both models, and the senior's log-probs of a text."""
    responses = flat(client.generate(prompts(3, TANDEM["word"], num_samples=2)))
    [scored] = client.score([(list(range(5, 35)), 1)]).sequences
    return responses, from_tensor(scored.senior_logprobs)


# Settings of the rollout server and the trainer beside the defaults.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one-rank": ({}, {}),
    "adapters": ({"senior": LORA}, LORA),
    "zero": ({}, ranked("zero")),
    "pipeline": ({}, ranked("pipeline")),
    "sharded": (ranked_rollout(), {}),
    "sharded-both": (ranked_rollout(), ranked("tensor")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_from_gpu_to_gpu_are_those_of_messages(numerics, models, tmp_path, layout):
    """Two servers get every version: one from GPU to GPU, and one through a proxy in messages."""
    rollout, trainer_section = LAYOUTS[layout]
    path = tmp_path / "calls.rec"
    files.create(path)
    with (
        harness.cluster(
            tmp_path / "near",
            models,
            rollout=numerics.settings(**rollout),
            trainer=numerics.settings(**trainer_section),
        ) as near,
        harness.cluster(tmp_path / "far", models, rollout=numerics.settings(**rollout)) as far,
        harness.trainer_client(near) as trainer,
        harness.rollout_client(near) as client,
        harness.rollout_client(far) as other,
        RecordingProxy(other.address, 0, files.Recorder(path)) as proxy,
    ):
        sent = 0
        for number in (1, 2):
            train(trainer, number)
            reply = trainer.publish_weights([client.address, f"127.0.0.1:{proxy.port}"])
            assert [result.digest for result in reply.results] == [reply.weights.digest] * 2
            assert reply.weights.digest == trainer.info().server.weights.digest
            sent += reply.results[0].bytes
        assert (received(near, "gpu"), received(near, "stream")) == (sent, 0)
        assert (received(far, "gpu"), received(far, "stream")) == (0, sent)
        ours, theirs = answers(client), answers(other)
    assert_same_bits(ours[0], theirs[0])
    assert np.array_equal(ours[1], theirs[1])


def kill_during(call: Callable[[], Any], process: subprocess.Popen[Any], seconds: float) -> None:
    """Kills a process some time after a call has begun; waits for the end of the call."""
    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(seconds)
    process.kill()
    thread.join()


@pytest.mark.parametrize("layout", ["one-rank", "sharded-both"])
@pytest.mark.parametrize("seconds", [0.005, 0.05])
def test_a_trainer_that_dies_leaves_one_version_in_force(
    numerics, models, tmp_path, layout, seconds
):
    rollout, trainer_section = (numerics.settings(**section) for section in LAYOUTS[layout])
    with (
        harness.cluster(
            tmp_path / "a", models, rollout=rollout, trainer=trainer_section
        ) as running,
        harness.rollout_client(running) as client,
    ):
        versions = []
        once = RetryPolicy(seconds=0)
        with TrainerClient(running.trainer.address, retry=once) as trainer:
            for number in (1, 2):
                train(trainer, number)
                versions.append(trainer.info().server.weights)
                if number == 1:
                    trainer.publish_weights([client.address])

            def publish() -> None:
                with contextlib.suppress(Exception):  # the trainer may be gone
                    trainer.publish_weights([client.address])

            kill_during(publish, running.trainer.process, seconds)
        # The same weights as before or, whole, the next ones.
        serving = client.info().server.weights
        assert serving in versions
        assert len(answers(client)[0]) == 6
        # Another trainer takes over.
        with (
            harness.cluster(
                tmp_path / "b", models, rollout=rollout, trainer=trainer_section
            ) as next_,
            harness.trainer_client(next_) as trainer,
        ):
            for number in (1, 2, 3):
                train(trainer, number)
            reply = trainer.publish_weights([client.address])
            assert not reply.results[0].status.code, reply.results[0].status.message
            assert client.info().server.weights == reply.weights


@pytest.mark.parametrize("layout", ["one-rank", "sharded-both"])
def test_a_rollout_server_that_dies_does_not_keep_the_trainer(numerics, models, tmp_path, layout):
    rollout, trainer_section = (numerics.settings(**section) for section in LAYOUTS[layout])
    with (
        harness.cluster(
            tmp_path / "a", models, rollout=rollout, trainer=trainer_section
        ) as running,
        harness.cluster(tmp_path / "b", models, rollout=rollout) as other,
        harness.trainer_client(running) as trainer,
    ):
        dead, alive = running.rollouts[0], other.rollouts[0]
        train(trainer)
        replies: list[Any] = []
        kill_during(
            lambda: replies.append(trainer.publish_weights([dead.address, alive.address])),
            dead.process,
            0.005,
        )
        served = replies[0].results[1]
        assert served.digest == replies[0].weights.digest
        train(trainer, 2)
        lost, result = trainer.publish_weights([dead.address, alive.address]).results
        assert lost.status.code
        assert not result.status.code
        assert received(other, "gpu") == 2 * result.bytes


def test_the_copy_is_planned_where_the_gpu_has_room(numerics, models, tmp_path):
    config = tmp_path / "trainer.yaml"
    config.write_text(
        f"model: {models.senior}\ncompute: {{device: cuda, dtype: {numerics.dtype}}}\n"
    )

    def plan(gpu: float, *settings: str, **world: int) -> str:
        """The plan for a GPU of so many bytes."""
        command = [str(find_binary("tandem-trainer-server")), "--config", str(config)]
        options = ["--check-config", f"--assume-gpu-memory={int(gpu)}"]
        environment = {name: str(value) for name, value in world.items()}
        if world:
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        return subprocess.run(
            [*command, *settings, *options],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | environment,
        ).stdout

    [line] = [line for line in plan(8 << 30).splitlines() if "GPU of a rank" in line]
    needed = float(line.split()[5]) * 1e9  # with the copy, to the nearest million
    # A tenth stays free.
    assert "weights_copy" in plan(needed / 0.9 + 2e6)
    assert "weights_copy" not in plan(needed + 2e6)
    # Every rank of several has a part.
    for rank in (0, 1):
        world = {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": rank}
        assert "weights_copy" in plan(8 << 30, "strategy.name=zero", **world)
