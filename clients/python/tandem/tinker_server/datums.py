"""Data of forward_backward: a sequence, its targets and the numbers of its loss."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as wire

from tandem.openai_server.errors import RequestError
from tandem.rpc.requests import SupervisedSample
from tandem.tinker_server.losses import Numbers

_TYPES = {
    wire.DTYPE_FLOAT32: "<f4",
    wire.DTYPE_INT64: "<i8",
    wire.DTYPE_INT32: "<i4",
}
_NAMES = {"float32": wire.DTYPE_FLOAT32, "int64": wire.DTYPE_INT64}


@dataclass(frozen=True)
class Example:
    """One datum.

    Attributes:
        tokens: [N], what the model reads.
        targets: [T], T being N or N - 1; targets[i] is the token behind tokens[i].
        inputs: the other numbers of the loss, [T] each.
        spans: the provenance of the targets; empty without one.
    """

    tokens: Sequence[int]
    targets: Sequence[int]
    inputs: Mapping[str, Numbers]
    spans: Sequence[wire.ProvenanceSpan]

    def sample(self, weights: Sequence[float] | None = None) -> SupervisedSample:
        """Returns the datum as a sample of the trainer: the first token, then all targets."""
        return SupervisedSample(self.tokens[:1], self.targets, weights=weights)


def example(datum: wire.Datum, place: str) -> Example:
    """Returns a datum; raises RequestError, whose field begins with `place`, for one at fault."""
    tokens = ids_of_chunks(datum.model_input, f"{place}.model_input")
    field = f"{place}.loss_fn_inputs.target_tokens"
    if "target_tokens" not in datum.loss_fn_inputs:
        raise RequestError(f"{field}: is required", field)
    lengths = (len(tokens), len(tokens) - 1)
    given = _numbers(datum.loss_fn_inputs["target_tokens"], lengths, field)
    targets = array("q", given.astype("<i8").tobytes())
    inputs = {
        name: _numbers(tensor, (len(targets),), f"{place}.loss_fn_inputs.{name}")
        for name, tensor in datum.loss_fn_inputs.items()
        if name != "target_tokens"
    }
    if not all(np.isfinite(one).all() for one in inputs.values()):
        raise RequestError(f"{place}.loss_fn_inputs: holds a number that is not finite", place)
    # The trainer reads a text and predicts its own tokens.
    behind = tokens[1 : len(targets) + 1]
    if behind != targets[: len(behind)]:
        at = next(i for i, token in enumerate(behind) if token != targets[i])
        raise RequestError(
            f"{field}[{at}]: is {targets[at]}, but the next token of model_input is {behind[at]}; "
            "other targets are not supported",
            field,
            code="unsupported_parameter",
        )
    return Example(tokens, targets, inputs, datum.loss_fn_input_spans)


def ids_of_chunks(chunks: Iterable[wire.Chunk], place: str) -> array[int]:
    """Returns the ids of a model input; raises RequestError for images, sounds, and no ids."""
    ids = array("q")
    for index, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise RequestError(
                f"{place}[{index}]: {kind} is not supported", place, code="unsupported_parameter"
            )
        if len(chunk.encoded_text.tokens) % 4:
            raise RequestError(f"{place}[{index}].tokens: are not int32", place)
        ids.extend(np.frombuffer(chunk.encoded_text.tokens, dtype="<i4").tolist())
    if not ids:
        raise RequestError(f"{place}: holds no token", place)
    return ids


def _numbers(tensor: wire.Tensor, lengths: Sequence[int], place: str) -> Numbers:
    """Returns the numbers of a tensor, of which there must be one of `lengths`, and not none."""
    if tensor.WhichOneof("encoding") == "sparse_csr":
        raise RequestError(
            f"{place}: sparse tensors are not supported", place, code="unsupported_parameter"
        )
    if tensor.dtype not in _TYPES:
        raise RequestError(f"{place}.dtype: must be float32 or int64", place)
    if len(tensor.shape) > 1:
        raise RequestError(
            f"{place}: has {len(tensor.shape)} dimensions; several targets of one place are not "
            "supported",
            place,
            code="unsupported_parameter",
        )
    kind = np.dtype(_TYPES[tensor.dtype])
    count, rest = divmod(len(tensor.dense), kind.itemsize)
    if rest or count not in lengths or not count or list(tensor.shape) not in ([], [count]):
        wanted = " or ".join(str(one) for one in lengths if one)
        raise RequestError(f"{place}: must have {wanted} numbers, one for each target", place)
    return np.frombuffer(tensor.dense, dtype=kind).astype(np.float64)


def request_of_bytes(body: bytes) -> wire.ForwardBackwardRequest:
    """Returns the message in a body; raises RequestError for anything else."""
    try:
        return wire.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise RequestError(f"the body is not a ForwardBackwardRequest: {error}") from None


def request_of_json(body: Any) -> wire.ForwardBackwardRequest:
    """Returns the message of a request that SDKs before 0.25 send as JSON.

    Raises RequestError for anything else.
    """
    message = wire.ForwardBackwardRequest()
    try:
        given = body.get("forward_backward_input", body.get("forward_input"))
        message.model_id = body["model_id"]
        message.seq_id = body.get("seq_id") or 0
        message.loss_fn = given["loss_fn"]
        for name, value in (given.get("loss_fn_config") or {}).items():
            message.loss_fn_config[name] = value
        for datum in given["data"]:
            _read_datum(datum, message.data.add())
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise RequestError(f"the body is not a forward_backward request: {error!r}") from None
    return message


def _read_datum(given: Mapping[str, Any], datum: wire.Datum) -> None:
    for chunk in given["model_input"]["chunks"]:
        tokens = np.array(chunk["tokens"], dtype="<i4")
        datum.model_input.add().encoded_text.tokens = tokens.tobytes()
    for name, tensor in given["loss_fn_inputs"].items():
        target = datum.loss_fn_inputs[name]
        target.dtype = _NAMES[tensor["dtype"]]
        numbers = np.array(tensor["data"], dtype=_TYPES[target.dtype])
        target.dense = numbers.tobytes()
        target.shape.extend(tensor.get("shape") or numbers.shape)
