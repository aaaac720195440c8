"""Exports of a checkpoint, or of its speculator: a directory in a number format of choice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import xxhash

from tandem.checkpoints import MANIFEST
from tandem.errors import ConfigError
from tandem.new_directory import new_directory
from tandem.number_formats import torch_name
from tandem.run_files import read_json

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
# Files of a checkpoint that only training reads.
_TRAINING_FILES = ("tandem_state.json", "optimizer*", "speculator_optimizer*")
# Ends the names of buffers, which stay in float32: the biases of DeepSeek-V3's routers.
_KEPT_IN_FLOAT32 = ".e_score_correction_bias"
# Begins the names of a speculator's files in the manifest.
_SPECULATOR = "speculator/"


def export_checkpoint(checkpoint: Path, destination: Path, dtype: str) -> Path:
    """Writes `destination` as config.json, model.safetensors and the tokenizer's files.

    No server is needed. `dtype` is a name of number_formats; the checkpoint itself holds float32.
    `destination` must not exist, or be empty. Returns its absolute path.

    Raises ConfigError for a checkpoint that is damaged, a weight that the format cannot hold, and a
    destination that cannot be written.
    """
    wanted = torch_name(dtype, "--dtype")
    with new_directory(destination) as folder:
        for file in _verified_files(checkpoint):
            # Folders hold what is not the model: the speculator.
            if file.parent == checkpoint and not any(map(file.match, _TRAINING_FILES)):
                _export_file(file, folder / file.name, wanted)
    return destination.absolute()


def export_speculator(checkpoint: Path, destination: Path, dtype: str) -> Path:
    """Writes `destination` as config.json and model.safetensors of the checkpoint's speculator.

    A rollout server and a trainer load such a directory, like a published one. The rest is as in
    export_checkpoint(), but for the checkpoint's other files, which are not read.

    Raises ConfigError also for a checkpoint without a speculator.
    """
    wanted = torch_name(dtype, "--dtype")
    files = _verified_files(checkpoint, _SPECULATOR)
    if not files:
        raise ConfigError(
            f"{checkpoint} has no speculator",
            hint="a trainer whose configuration has the section `speculator` trains one",
        )
    with new_directory(destination) as folder:
        for file in files:
            _export_file(file, folder / file.name, wanted)
    return destination.absolute()


def _verified_files(checkpoint: Path, prefix: str = "") -> list[Path]:
    """Compares files with the digests in the manifest; returns their paths.

    The files are those whose names begin with `prefix`.
    """
    files = []
    for entry in read_json(checkpoint / MANIFEST)["files"]:
        if not entry["name"].startswith(prefix):
            continue
        file = checkpoint / entry["name"]
        if not file.is_file():
            raise ConfigError(f"{file}: is missing")
        if _digest(file) != entry["xxh3_128"]:
            raise ConfigError(f"{file}: its digest is not the manifest's: the file is damaged")
        files.append(file)
    return files


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _export_file(source: Path, target: Path, dtype: str) -> None:
    if source.name == _WEIGHTS and dtype != "float32":
        _convert(source, target, dtype)
    elif source.name == _CONFIG:
        config = read_json(source)
        config[_dtype_key(config)] = dtype
        target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    else:
        shutil.copyfile(source, target)


def _dtype_key(config: dict[str, Any]) -> str:
    """Returns the key of the dtype: that of earlier versions of transformers if the file has it."""
    return "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"


def _convert(source: Path, target: Path, dtype: str) -> None:
    # The import takes a second.
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors = {}
    with safe_open(source, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            tensor = opened.get_tensor(name)
            if name.endswith(_KEPT_IN_FLOAT32):
                tensors[name] = tensor
                continue
            tensor = tensor.to(getattr(torch, dtype))
            if not torch.isfinite(tensor).all():
                raise ConfigError(
                    f"--dtype: the tensor {name!r} holds numbers that {dtype} cannot hold",
                    hint="bf16 has the range of fp32",
                )
            tensors[name] = tensor
        metadata = opened.metadata()
    save_file(tensors, target, metadata)
