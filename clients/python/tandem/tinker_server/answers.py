"""Answers in the forms in which the SDK reads them: messages of tinker_public, or JSON."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as wire

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Plain:
    """An answer that is only sent as JSON."""

    fields: Mapping[str, Any]

    def proto(self) -> None:
        """The SDK reads it as JSON."""

    def json(self) -> dict[str, Any]:
        """Returns the object."""
        return dict(self.fields)

    def num_bytes(self) -> int:
        """Returns a bound of its memory."""
        return 1024 + sum(map(len, map(str, self.fields.values())))


@dataclass(frozen=True)
class Losses:
    """The answer of forward and forward_backward: numbers of the targets by field, and by datum."""

    fields: Mapping[str, Sequence[Floats]]
    metrics: Mapping[str, float]

    def proto(self) -> bytes:
        """Returns a ForwardBackwardOutput with one record of all data."""
        fields = {name: _batched(data) for name, data in self.fields.items()}
        count = len(next(iter(self.fields.values())))
        record = wire.ArrayRecord(num_datums=count, fields=fields)
        return wire.ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=self.metrics
        ).SerializeToString()

    def json(self) -> dict[str, Any]:
        """Returns the object that SDKs before 0.25 read."""
        return {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": [
                {
                    name: {"data": one.tolist(), "dtype": "float32", "shape": [len(one)]}
                    for name, one in zip(self.fields, datum, strict=True)
                }
                for datum in zip(*self.fields.values(), strict=True)
            ],
            "metrics": dict(self.metrics),
        }

    def num_bytes(self) -> int:
        """Returns about how much memory it takes."""
        return 1024 + sum(one.nbytes for data in self.fields.values() for one in data)


def _batched(data: Sequence[Floats]) -> wire.BatchedTensor:
    ends = list(itertools.accumulate((one.nbytes for one in data), initial=0))
    return wire.BatchedTensor(
        data=b"".join(one.astype("<f4").tobytes() for one in data),
        offsets=np.array(ends, dtype="<i8").tobytes(),
        dtype=wire.DTYPE_FLOAT32,
    )


@dataclass(frozen=True)
class Top:
    """The likeliest tokens at each place, [n, k]; an id of -1 stands for a place without any."""

    ids: Ints
    logprobs: Floats

    def proto(self) -> wire.TopkLogprobs:
        """Returns the message; the SDK's sentinel stands where there is nothing."""
        nothing = self.ids < 0
        return wire.TopkLogprobs(
            token_ids=np.where(nothing, 0, self.ids).astype("<i4").tobytes(),
            logprobs=np.where(nothing, -99999.0, self.logprobs).astype("<f4").tobytes(),
            length=self.ids.shape[0],
            k=self.ids.shape[1],
        )

    def json(self) -> list[Any]:
        """Returns pairs of id and log-probability by place; null for a place without any."""
        return [
            None if (ids < 0).any() else list(zip(ids.tolist(), logprobs.tolist(), strict=True))
            for ids, logprobs in zip(self.ids, self.logprobs, strict=True)
        ]

    def num_bytes(self) -> int:
        """Returns how much memory it takes."""
        return self.ids.nbytes + self.logprobs.nbytes


@dataclass(frozen=True)
class SampledSequence:
    """A sampled sequence."""

    tokens: Ints
    logprobs: Floats
    stopped: bool
    top: Top | None


@dataclass(frozen=True)
class Samples:
    """The answer of asample."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Floats | None  # NaN where none was computed
    prompt_top: Top | None

    def proto(self) -> bytes:
        """Returns a SampleResponse."""
        message = wire.SampleResponse()
        for one in self.sequences:
            sequence = message.sequences.add(
                stop_reason=wire.STOP_REASON_STOP if one.stopped else wire.STOP_REASON_LENGTH,
                tokens=one.tokens.astype("<i4").tobytes(),
                logprobs=one.logprobs.astype("<f4").tobytes(),
            )
            if one.top is not None:
                sequence.topk_sampled_logprobs.CopyFrom(one.top.proto())
        if self.prompt_logprobs is not None:
            message.prompt_logprobs = self.prompt_logprobs.astype("<f4").tobytes()
        if self.prompt_top is not None:
            message.topk_prompt_logprobs.CopyFrom(self.prompt_top.proto())
        return message.SerializeToString()

    def json(self) -> dict[str, Any]:
        """Returns the object that SDKs before 0.25 read."""
        prompt = self.prompt_logprobs
        return {
            "type": "sample",
            "sequences": [
                {
                    "stop_reason": "stop" if one.stopped else "length",
                    "tokens": one.tokens.tolist(),
                    "logprobs": one.logprobs.tolist(),
                    "topk_logprobs": None if one.top is None else one.top.json(),
                }
                for one in self.sequences
            ],
            "prompt_logprobs": None
            if prompt is None
            else [None if np.isnan(number) else float(number) for number in prompt],
            "topk_prompt_logprobs": None if self.prompt_top is None else self.prompt_top.json(),
        }

    def num_bytes(self) -> int:
        """Returns about how much memory it takes."""
        tops = [self.prompt_top, *(one.top for one in self.sequences)]
        arrays = [one.tokens.nbytes + one.logprobs.nbytes for one in self.sequences]
        prompt = 0 if self.prompt_logprobs is None else self.prompt_logprobs.nbytes
        return 1024 + prompt + sum(arrays) + sum(top.num_bytes() for top in tops if top is not None)
