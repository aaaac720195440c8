"""A speculator travels with the weights of its senior, and changes no response."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import harness
import pytest
from drafts import ACCEPTED, DRAFTS, HEADS, batch, total, write_speculator
from harness import assert_same_bits, flat
from lanes import section
from layouts import ranked
from safetensors.torch import load_file
from tandem._proto.trainer.v1 import trainer_pb2
from tandem.errors import from_status
from tandem.rpc.client import RolloutClient
from tandem.rpc.requests import SupervisedSample

# The lanes of the rollout server, and the section of the trainer.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one-rank": ("float32", {}),
    "bfloat16": ("bfloat16-int8", {"compute": {"weight_dtype": "bfloat16", "num_threads": 1}}),
    "two-ranks-zero": ("two-ranks", ranked("zero")),
    "two-ranks-tensor": ("float32", ranked("tensor")),
    "two-ranks-pipeline": ("float32", ranked("pipeline")),
}
VERSION = "tandem_speculator_version"
SENT = "tandem_weight_bytes_sent_total"


def trained(speculator: Path) -> dict[str, Any]:
    """The section of a trainer that goes on with this speculator, but hardly moves it."""
    optimizer = {"learning_rate": 1e-6}
    return {"speculator": {"adapter": "mlp", "path": str(speculator), "optimizer": optimizer}}


def weight_bytes(speculator: Path) -> int:
    """The bytes of the values of a speculator in float32."""
    return sum(
        4 * tensor.numel() for tensor in load_file(speculator / "model.safetensors").values()
    )


def successors(client: RolloutClient) -> dict[int, int]:
    """The token that followed each one in the responses of a server, as a table of heads."""
    follows = {}
    for response in map(harness.tokens, flat(client.generate(batch()))):
        follows |= dict(itertools.pairwise(response))
    return follows


def supervised_step(trainer: Any, number: int = 1) -> None:
    samples = [SupervisedSample([5, 6, 7], [8, 9, 10 + i]) for i in range(4)]
    trainer.train_step(samples, run_id="r", step=number, expected_version=number - 1)


def assert_drafts_change_nothing(client: RolloutClient) -> None:
    """Compares responses with drafts of the heads and without."""
    plain = flat(client.generate(batch()))
    drafted = [
        client.generate([dataclasses.replace(prompt, speculative=HEADS)])[0][0]
        for prompt in batch()
    ]
    assert_same_bits(drafted, plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_heads_draft_and_change_no_response(models, tmp_path, layout):
    """The rollout server has heads that know nothing until the trainer's arrive, which do."""
    lanes, trainer_section = LAYOUTS[layout]
    with (
        harness.cluster(tmp_path / "plain", models, rollout=section(lanes)) as running,
        harness.rollout_client(running) as client,
    ):
        follows = successors(client)
    ignorant = write_speculator(tmp_path / "ignorant", models.senior, {})
    knowing = write_speculator(tmp_path / "knowing", models.senior, follows)
    with (
        harness.cluster(
            tmp_path / "cluster",
            models,
            rollout=section(lanes, senior_speculator=str(ignorant)),
            trainer=trainer_section | trained(knowing),
        ) as running,
        harness.rollout_client(running) as client,
        harness.trainer_client(running) as trainer,
    ):
        [server] = running.rollouts
        assert trainer.info().has_speculator
        assert_drafts_change_nothing(client)
        before = client.info()
        assert before.speculator_weights.version == 0
        missed = total(running, ACCEPTED, "heads")
        tried = total(running, DRAFTS, "heads")

        # The senior is the one that is served, the heads are others.
        reply = trainer.publish_weights([server.address])
        assert reply.results[0].speculator == trainer_pb2.SPECULATOR_DELIVERY_SERVED
        assert harness.gauge(running.trainer, SENT) == weight_bytes(knowing), "the heads alone"
        served = client.info()
        assert served.server.weights == before.server.weights == reply.weights
        assert served.speculator_weights.version == 0
        assert served.speculator_weights.digest != before.speculator_weights.digest
        assert_drafts_change_nothing(client)
        accepted = total(running, ACCEPTED, "heads") - missed
        drafted = total(running, DRAFTS, "heads") - tried
        assert accepted / drafted > 2 * missed / tried

        supervised_step(trainer)
        reply = trainer.publish_weights([server.address])
        served = client.info()
        assert served.server.weights == reply.weights
        assert served.speculator_weights.version == reply.weights.version == 1
        assert harness.gauge(server, VERSION) == 1
        assert_drafts_change_nothing(client)

        # The digest says that nothing is left to send.
        sent = harness.gauge(running.trainer, SENT)
        assert sent > 2 * weight_bytes(knowing)
        reply = trainer.publish_weights([server.address])
        assert reply.results[0].speculator == trainer_pb2.SPECULATOR_DELIVERY_SERVED
        assert harness.gauge(running.trainer, SENT) == sent


@pytest.mark.parametrize("has_speculator", [True, False])
def test_a_frozen_senior_is_not_sent_again(models, tmp_path, has_speculator):
    """A publication brings the heads, and the version alone to a server that has no heads."""
    heads = write_speculator(tmp_path / "heads", models.senior)
    speculator = trained(heads)["speculator"] | {"freeze_base_model": True}
    served = {"senior_speculator": str(heads)} if has_speculator else {}
    with (
        harness.cluster(
            tmp_path / "cluster",
            models,
            rollout=section("float32", **served),
            trainer={"speculator": speculator},
        ) as running,
        harness.rollout_client(running) as client,
        harness.trainer_client(running) as trainer,
    ):
        [server] = running.rollouts
        before = client.info().server.weights
        for step in (1, 2):
            supervised_step(trainer, step)
            reply = trainer.publish_weights([server.address])
            info = client.info()
            assert info.server.weights == reply.weights
            assert (info.server.weights.version, info.server.weights.digest) == (
                step,
                before.digest,
            )
            assert info.speculator_weights.version == (step if has_speculator else 0)
            sent = harness.gauge(running.trainer, SENT)
            assert sent == (step * weight_bytes(heads) if has_speculator else 0)
        if has_speculator:
            assert_drafts_change_nothing(client)


def test_heads_that_no_update_brings_stay_and_draft(models, tmp_path):
    speculator = write_speculator(tmp_path / "heads", models.senior)
    config = section("float32", senior_speculator=str(speculator))
    with (
        harness.cluster(tmp_path / "cluster", models, rollout=config, trainer={}) as running,
        harness.rollout_client(running) as client,
        harness.trainer_client(running) as trainer,
    ):
        assert not trainer.info().has_speculator
        before = client.info().speculator_weights
        supervised_step(trainer)
        reply = trainer.publish_weights([running.rollouts[0].address])
        assert reply.results[0].speculator == trainer_pb2.SPECULATOR_DELIVERY_UNSPECIFIED
        assert client.info().server.weights.version == 1
        assert client.info().speculator_weights == before
        assert harness.gauge(running.rollouts[0], VERSION) == 0
        assert_drafts_change_nothing(client)
        assert total(running, DRAFTS, "heads") > 0


def test_a_server_without_senior_speculator_gets_the_weights_and_the_trainer_says_so(
    models, tmp_path
):
    speculator = write_speculator(tmp_path / "heads", models.senior)
    digests = {}
    for name, change in {"with": trained(speculator), "without": {}}.items():
        with (
            harness.cluster(tmp_path / name, models, rollout={}, trainer=change) as running,
            harness.rollout_client(running) as client,
            harness.trainer_client(running) as trainer,
        ):
            supervised_step(trainer)
            reply = trainer.publish_weights([running.rollouts[0].address])
            assert client.info().server.weights == reply.weights
            assert not client.info().HasField("speculator_weights")
            digests[name] = reply.weights.digest
            if name == "with":
                unused = trainer_pb2.SPECULATOR_DELIVERY_UNUSED
                assert reply.results[0].speculator == unused
                assert "speculator_unused" in running.trainer.log.read_text()
                # The speculator is no part of the model that is exported.
                trainer.export_model(str(tmp_path / "exported"))
                assert not any(
                    "speculator" in tensor for tensor in harness.weights(tmp_path / "exported")
                )
    assert digests["with"] == digests["without"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"n_predict": 2}, '"n_predict":2'), ({"scale_input": True}, '"scale_input":true')],
)
def test_another_speculator_is_refused_and_the_old_weights_serve(models, tmp_path, changes, says):
    ours = write_speculator(tmp_path / "ours", models.senior)
    theirs = write_speculator(tmp_path / "theirs", models.senior, **changes)
    config = section("float32", senior_speculator=str(ours))
    with (
        harness.cluster(
            tmp_path / "cluster", models, rollout=config, trainer=trained(theirs)
        ) as running,
        harness.rollout_client(running) as client,
        harness.trainer_client(running) as trainer,
    ):
        before = client.info()
        supervised_step(trainer)
        [result] = trainer.publish_weights([running.rollouts[0].address]).results
        refused = from_status(result.status, method="PublishWeights")
        assert refused.field == "manifest.components[0].config"
        assert says in refused.message
        assert result.speculator == trainer_pb2.SPECULATOR_DELIVERY_UNSPECIFIED
        served = client.info()
        assert served.server.weights == before.server.weights
        assert served.speculator_weights == before.speculator_weights
        assert_drafts_change_nothing(client)
