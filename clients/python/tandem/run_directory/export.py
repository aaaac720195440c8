"""Exports of a checkpoint, or of its speculator: a directory in a number format of choice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from tandem.errors import ConfigError
from tandem.models.weights.reading import safetensors_of
from tandem.models.weights.writing import (
    OutputTensor,
    cast_all,
    dtype_key,
    stored_dtype,
    write_file,
)
from tandem.run_directory.checkpoints import MANIFEST
from tandem.run_directory.merged_export import ADAPTER_CONFIG, write_merged
from tandem.utils.atomic_files import read_json
from tandem.utils.byte_progress import ByteCount, OnBytes
from tandem.utils.new_directory import new_directory
from tandem.utils.number_formats import torch_name

_CONFIG = "config.json"
# Ends the names of files of weights, of which a checkpoint may have several with an index.
_WEIGHTS = ".safetensors"
_BLOCK_BYTES = 1 << 22
# Files of a checkpoint that only training reads.
_TRAINING_FILES = (
    "tandem_state.json",
    "kept_values.bin",
    "optimizer*",
    "speculator_optimizer*",
)
# Begins the names of a speculator's files in the manifest.
_SPECULATOR = "speculator/"


def export_checkpoint(
    checkpoint: Path, destination: Path, dtype: str, progress: OnBytes | None = None
) -> Path:
    """Writes `destination` as config.json, model.safetensors and the tokenizer's files.

    No server is needed. `dtype` is a name of number_formats; the checkpoint itself holds float32.
    Of adapters the merged model is written (merged_export.py). `destination` must not exist, or be
    empty. `progress` is told the bytes that are done, of how many. Takes the memory of one tensor.
    Returns its absolute path.

    Raises ConfigError for a checkpoint that is damaged, a weight that the format cannot hold, and a
    destination that cannot be written.
    """
    # Folders hold what is not the model: the speculator.
    names = [
        name
        for name in _digests(checkpoint)
        if "/" not in name and not any(map(Path(name).match, _TRAINING_FILES))
    ]
    return _export(checkpoint, names, destination, dtype, progress)


def export_speculator(
    checkpoint: Path, destination: Path, dtype: str, progress: OnBytes | None = None
) -> Path:
    """Writes `destination` as config.json and model.safetensors of the checkpoint's speculator.

    A rollout server and a trainer load such a directory, like a published one. The rest is as in
    export_checkpoint(), but for the checkpoint's other files, which are not read.

    Raises ConfigError also for a checkpoint without a speculator.
    """
    names = [name for name in _digests(checkpoint) if name.startswith(_SPECULATOR)]
    if not names:
        raise ConfigError(
            f"{checkpoint} has no speculator",
            hint="a trainer whose configuration has the section `speculator` trains one",
        )
    return _export(checkpoint, names, destination, dtype, progress)


def _digests(checkpoint: Path) -> dict[str, str]:
    """Returns the digests in the manifest by the names of the files."""
    files = read_json(checkpoint / MANIFEST)["files"]
    return {entry["name"]: entry["xxh3_128"] for entry in files}


def _export(
    checkpoint: Path, names: Sequence[str], destination: Path, dtype: str, progress: OnBytes | None
) -> Path:
    """Verifies the files `names` of a checkpoint, and exports them."""
    wanted = torch_name(dtype, "--dtype")
    digests = _digests(checkpoint)
    files = {name: checkpoint / name for name in names}
    for file in files.values():
        if not file.is_file():
            raise ConfigError(f"{file}: is missing")
    # Every byte is read twice: for the digest and for the export.
    count = ByteCount(2 * sum(file.stat().st_size for file in files.values()), progress)
    with new_directory(destination) as folder:
        for name, file in files.items():
            if _digest(file, count) != digests[name]:
                raise ConfigError(
                    f"{file}: its digest differs from the manifest's: the file is damaged"
                )
        if ADAPTER_CONFIG in files:
            write_merged(checkpoint, folder, wanted, progress)
        else:
            for file in files.values():
                _export_file(file, folder / file.name, wanted, count)
    return destination.absolute()


def _digest(file: Path, count: ByteCount) -> str:
    digest = xxhash.xxh3_128()
    for block in _blocks(file, count):
        digest.update(block)
    return digest.hexdigest()


def _blocks(file: Path, count: ByteCount) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            yield block
            count.add(len(block))


def _export_file(source: Path, target: Path, dtype: str, count: ByteCount) -> None:
    if source.suffix == _WEIGHTS and dtype != "float32":
        _convert(source, target, dtype, count)
    elif source.name == _CONFIG:
        config = read_json(source)
        config[dtype_key(config)] = dtype
        target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    else:
        with target.open("wb") as stream:
            for block in _blocks(source, count):
                stream.write(block)


def _convert(source: Path, target: Path, dtype: str, count: ByteCount) -> None:
    # The import takes a second.
    from safetensors import safe_open

    with safe_open(source, framework="pt") as opened:
        metadata = opened.metadata()
    stored = safetensors_of(source)
    tensors = [OutputTensor(one.name, one.shape, stored_dtype(one.name, dtype)) for one in stored]
    write_file(target, tensors, cast_all(tensors, (one.read() for one in stored), count), metadata)
