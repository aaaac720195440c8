"""The model that the rollout server serves now: the server may restart at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.models.tokenizer import TextCodec
from tandem.openai_server.errors import RequestError
from tandem.preflight.server_facts import RolloutFacts
from tandem.rpc.aio import AsyncRolloutClient


@dataclass(frozen=True)
class Served:
    """The model of a rollout server.

    Attributes:
        codec: its tokenizer.
        model: the name of the model that requests must give.
        max_model_len: most tokens of prompt and response.
        max_samples: most samples that it takes at once.
        fingerprint: names the weights.
        vocabulary: digest of the model's vocabulary.
        junior: digest of the junior's weights; "" without one.
    """

    codec: TextCodec
    model: str
    max_model_len: int
    max_samples: int
    fingerprint: str
    vocabulary: str
    junior: str


class Source:
    """Asks a rollout server what it serves, and reads its tokenizer when its model changes."""

    def __init__(
        self,
        codec: TextCodec | None,
        model: str | None,
        tandem: bool,
        speculative: Mapping[str, Any],
    ) -> None:
        """Arguments as in app.Settings."""
        self._codec = codec
        self._name = model
        self._reads_with_junior = tandem or speculative.get("method") == "junior"
        self._read: tuple[tuple[str, str], TextCodec] | None = None
        self._lock = asyncio.Lock()

    async def served(self, client: AsyncRolloutClient) -> Served:
        """Returns what the server serves now; raises RpcError if it does not answer."""
        info = await client.info()
        model, weights = info.server.model, info.server.weights
        facts = RolloutFacts.of(client.address, info)
        return Served(
            codec=self._codec or await self._codec_of(model.path, model.vocabulary_digest),
            model=self._name or Path(model.path).name,
            max_model_len=facts.longest_sequence(junior=self._reads_with_junior),
            max_samples=info.max_queue,
            fingerprint=f"{weights.version}-{weights.digest}",
            vocabulary=model.vocabulary_digest,
            junior=info.junior_version,
        )

    async def _codec_of(self, path: str, digest: str) -> TextCodec:
        async with self._lock:
            if self._read is None or self._read[0] != (path, digest):
                try:
                    codec = await asyncio.to_thread(TextCodec, Path(path))
                except ConfigError as error:
                    raise RequestError(
                        f"the tokenizer of the rollout server's model: {error.message}",
                        status=HTTPStatus.SERVICE_UNAVAILABLE,
                    ) from None
                self._read = (path, digest), codec
            return self._read[1]
