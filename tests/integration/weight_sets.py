"""Weights of a model with small changes, and their upload to a rollout server."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import harness
import numpy as np
import xxhash
from tandem._proto.types.v1 import tensor_pb2
from tandem._proto.weights.v1 import weights_pb2, weights_pb2_grpc
from weights_digest import weights_digest

_CHUNK_BYTES = 64 << 10
# Standard deviation of the changes: enough for other tokens, little beside the weights.
_NOISE = 0.02


class WeightSet:
    """The weights of a model, changed as `number` says; number 0 is the model itself.

    Attributes:
        digest: digest under which a server that holds these weights labels its tokens.
    """

    def __init__(self, directory: Path, number: int) -> None:
        rng = np.random.default_rng(number)
        specs, data = [], []
        layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
        for name, values in harness.weights(directory).items():
            if name.startswith(f"model.layers.{layers}."):
                continue  # a layer for multi-token prediction, which no server reads
            changed = values + (_NOISE * rng.standard_normal(values.shape) if number else 0)
            specs.append(
                weights_pb2.TensorSpec(
                    name=name, dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=values.shape
                )
            )
            data.append(changed.astype("<f4").tobytes())
        self._specs = specs
        self._bytes = b"".join(data)
        names = (spec.name for spec in specs)
        self.digest = weights_digest(dict(zip(names, data, strict=True)))

    def install(self, channel: grpc.Channel, version: int, num_token_ids: int) -> None:
        """Uploads the weights and lets the server serve them as `version`."""
        service = weights_pb2_grpc.WeightServiceStub(channel)
        update = self._begin(service, version, num_token_ids)
        service.UploadWeights(self._chunks(update), timeout=60)
        commit = weights_pb2.CommitUpdateRequest(update_id=update)
        served = service.CommitUpdate(commit, timeout=60).weights
        assert (served.version, served.digest) == (version, self.digest)

    def upload_half(
        self, channel: grpc.Channel, version: int, num_token_ids: int, *, abort: bool
    ) -> None:
        """Begins an update, uploads a half of it, and aborts it or leaves it open."""
        service = weights_pb2_grpc.WeightServiceStub(channel)
        update = self._begin(service, version, num_token_ids)
        chunks = list(self._chunks(update))
        service.UploadWeights(iter(chunks[: len(chunks) // 2]), timeout=60)
        if abort:
            service.AbortUpdate(weights_pb2.AbortUpdateRequest(update_id=update), timeout=60)

    def _begin(
        self, service: weights_pb2_grpc.WeightServiceStub, version: int, num_token_ids: int
    ) -> str:
        manifest = weights_pb2.WeightManifest(
            version=version,
            tensors=self._specs,
            total_bytes=len(self._bytes),
            chunk_bytes=_CHUNK_BYTES,
            digest=self.digest,
            num_token_ids=num_token_ids,
        )
        begin = weights_pb2.BeginUpdateRequest(update_id=uuid.uuid4().hex, manifest=manifest)
        service.BeginUpdate(begin, timeout=60)
        return begin.update_id

    def _chunks(self, update: str) -> Iterator[weights_pb2.UploadWeightsRequest]:
        for index, start in enumerate(range(0, len(self._bytes), _CHUNK_BYTES)):
            data = self._bytes[start : start + _CHUNK_BYTES]
            yield weights_pb2.UploadWeightsRequest(
                update_id=update,
                chunk_index=index,
                data=data,
                checksum=xxhash.xxh3_64_intdigest(data),
            )


def weight_sets(directory: Path, count: int) -> Sequence[WeightSet]:
    """Returns the weights of a model, and count - 1 changes of them."""
    return [WeightSet(directory, number) for number in range(count)]
