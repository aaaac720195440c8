"""Rollouts that were drawn ahead of a checkpoint, as files of the run directory.

A file has the rollouts of one step: a line of JSON, and behind it the trajectories, each a message
of the contract, and the pixels of the images that environments showed, each with its length (8
bytes, little-endian) in front. A checkpoint names its files with
their digests, so that a run continues with exactly these rollouts or not at all.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from google.protobuf.message import DecodeError

from tandem._proto.types.v1 import trajectory_pb2
from tandem.data.dataset import Dataset
from tandem.errors import RunDirectoryError
from tandem.rpc.images import VisionInput
from tandem.run_directory.directory import ROLLOUTS
from tandem.training.groups import Drawn, Group
from tandem.utils.atomic_files import replacing

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class StepRollouts:
    """The rollouts of a step, drawn and judged.

    Attributes:
        step: the step that trains them.
        first: number of examples of the data that were drawn before its own.
        drawn: its groups.
    """

    step: int
    first: int
    drawn: Drawn

    @property
    def end(self) -> int:
        """The number of examples of the data that are drawn after the step."""
        return self.first + len(self.drawn.groups)


def rollouts_file(run_dir: Path, step: int) -> Path:
    """Returns the file of the rollouts of a step."""
    return run_dir / ROLLOUTS / f"step_{step}.rollouts"


def write_rollouts(run_dir: Path, rollouts: StepRollouts) -> str:
    """Writes the file of a step; returns its digest.

    Raises StorageError when it cannot be written.
    """
    path = rollouts_file(run_dir, rollouts.step)
    path.parent.mkdir(exist_ok=True)
    digest = xxhash.xxh3_128()
    with replacing(path) as file:
        for part in _parts(rollouts):
            file.write(part)
            digest.update(part)
    return digest.hexdigest()


def read_rollouts(run_dir: Path, step: int, digest: str, data: Dataset) -> StepRollouts:
    """Reads the file of a step; `data` has the rows that it was drawn from.

    Raises RunDirectoryError for a file that is missing or does not have the digest.
    """
    path = rollouts_file(run_dir, step)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunDirectoryError(f"{path}: {error.strerror}") from None
    found = xxhash.xxh3_128_hexdigest(content)
    if found != digest:
        raise RunDirectoryError(f"{path}: has the digest {found}, the checkpoint names {digest}")
    try:
        return _rollouts_in(content, data)
    except (ValueError, KeyError, struct.error, StopIteration, DecodeError) as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error!r}") from None


def remove_rollouts(run_dir: Path, kept: frozenset[int] = frozenset()) -> None:
    """Removes the files of all steps but those that are `kept`."""
    keep = {rollouts_file(run_dir, step) for step in kept}
    for file in (run_dir / ROLLOUTS).glob("step_*.rollouts"):
        if file not in keep:
            file.unlink()


def _parts(rollouts: StepRollouts) -> Iterator[bytes]:
    drawn = rollouts.drawn
    kept = {group.id for group in drawn.kept}
    images = {image.digest: image for group in drawn.groups for image in group.images}
    head = {
        "step": rollouts.step,
        "first": rollouts.first,
        "groups": [
            {
                "id": group.id,
                "kept": group.id in kept,
                "texts": group.texts,
                "rewards": group.rewards,
                "scores": group.scores,
                "punishments": group.punishments,
            }
            for group in drawn.groups
        ],
        "failures": drawn.failures,
        "num_gen_batches": drawn.num_gen_batches,
        "timed_out": drawn.timed_out,
        "episode_metrics": drawn.episode_metrics,
        "images": [image.grid for image in images.values()],
    }
    yield json.dumps(head).encode() + b"\n"
    for group in drawn.groups:
        for trajectory in group.trajectories:
            yield from _item(trajectory.SerializeToString(deterministic=True))
    for image in images.values():
        yield from _item(image.pixels.tobytes())


def _item(content: bytes) -> Iterator[bytes]:
    yield _LENGTH.pack(len(content))
    yield content


def _rollouts_in(content: bytes, data: Dataset) -> StepRollouts:
    line, _, rest = content.partition(b"\n")
    head = json.loads(line)
    items = _items_in(memoryview(rest))
    examples = data.batch(head["first"], len(head["groups"]))
    drawn = [
        [trajectory_pb2.Trajectory.FromString(bytes(next(items))) for _ in one["texts"]]
        for one in head["groups"]
    ]
    # Requests name pixels by their digest: every group keeps all of them.
    images = [
        VisionInput(np.frombuffer(next(items), "<f4").reshape(math.prod(grid), -1), grid)
        for grid in head.get("images", [])
    ]
    groups = []
    kept = []
    for example, trajectories, one in zip(examples, drawn, head["groups"], strict=True):
        is_kept = one.pop("kept")
        group = Group(example=example, trajectories=trajectories, images=images, **one)
        groups.append(group)
        kept += [group] if is_kept else []
    return StepRollouts(
        head["step"],
        head["first"],
        Drawn(
            groups,
            kept,
            head["failures"],
            head["num_gen_batches"],
            head["timed_out"],
            head["episode_metrics"],
        ),
    )


def _items_in(content: memoryview) -> Iterator[memoryview]:
    place = 0
    while place < len(content):
        (length,) = _LENGTH.unpack_from(content, place)
        place += _LENGTH.size
        yield content[place : place + length]
        place += length
