"""Authors of the tokens that a datum is trained on, by the spans of its provenance.

A sequence that senior and junior wrote together is named SEQUENCE. SEQUENCE/senior and
SEQUENCE/junior name the tokens of each: two sequence ids, which tile the sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as wire

from tandem.openai_server.errors import RequestError
from tandem.tinker_server import limits
from tandem.utils.authors import AUTHOR_NAMES, JUNIOR, SENIOR

_BY_SUFFIX = {f"/{AUTHOR_NAMES[author]}": author for author in (SENIOR, JUNIOR)}

Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Authors:
    """The authors of the sequences that were sampled last."""

    def __init__(self) -> None:
        self._masks: dict[str, bytes] = {}
        self._tokens = 0

    def remember(self, sequence_id: str, mask: bytes) -> None:
        """Keeps who wrote each token of a sequence; the oldest make room for it."""
        self._masks[sequence_id] = mask
        self._tokens += len(mask)
        while len(self._masks) > limits.MAX_SEQUENCES or self._tokens > limits.MAX_SEQUENCES_TOKENS:
            self._tokens -= len(self._masks.pop(next(iter(self._masks))))

    def spans(self, sequence_id: str) -> list[dict[str, Any]]:
        """Returns the spans of a sequence, with the id of their author; they tile it."""
        spans, offset = [], 0
        for author, run in itertools.groupby(self._find(sequence_id, "sequence_id")):
            length = len(list(run))
            name = f"{sequence_id}/{AUTHOR_NAMES[author]}"
            spans.append({"sequence_id": name, "offset": offset, "length": length})
            offset += length
        return spans

    def junior_tokens(self, spans: Iterable[wire.ProvenanceSpan], length: int, place: str) -> Mask:
        """Returns which of `length` targets the junior wrote, as the spans that tile them say.

        Raises RequestError, whose field begins with `place`, for spans that do not tile the
        targets, and for a sequence whose authors are not known.
        """
        junior = np.zeros(length, dtype=bool)
        at = 0
        for index, span in enumerate(spans):
            field = f"{place}[{index}]"
            sampled = span.WhichOneof("span") == "sampled_tokens"
            run = span.sampled_tokens if sampled else span.prompt_tokens
            if run.length < 0 or run.offset < 0 or at + run.length > length:
                raise RequestError(f"{field}: does not fit into {length} targets", field)
            if sampled:
                junior[at : at + run.length] = self._written_by_junior(run, field)
            at += run.length
        if at != length:
            raise RequestError(f"{place}: covers {at} of {length} targets", place)
        return junior

    def _written_by_junior(self, run: wire.SampledProvenanceSpan, field: str) -> Sequence[bool]:
        for suffix, author in _BY_SUFFIX.items():
            if run.sequence_id.endswith(suffix):
                return [author == JUNIOR] * run.length
        mask = self._find(run.sequence_id, f"{field}.sequence_id")
        if run.offset + run.length > len(mask):
            raise RequestError(
                f"{field}: goes beyond the {len(mask)} tokens of its sequence", field
            )
        return [author == JUNIOR for author in mask[run.offset : run.offset + run.length]]

    def _find(self, sequence_id: str, field: str) -> bytes:
        if sequence_id not in self._masks:
            raise RequestError(
                f"{field}: {sequence_id!r} is not a sequence whose authors this server knows", field
            )
        return self._masks[sequence_id]
