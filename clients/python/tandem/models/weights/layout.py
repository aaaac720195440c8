"""Which files of a model directory hold its weights, by the rule of servers and transformers."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.errors import ConfigError
from tandem.utils.text_files import json_object, read_text

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The same of checkpoints that torch.save wrote.
PICKLED_WEIGHTS = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
# Ends the names of constants that old versions of transformers saved with the weights.
OLD_BUFFER = ".rotary_emb.inv_freq"


def weight_files(directory: Path) -> list[Path]:
    """Returns the safetensors files that hold the weights, in the order of their names.

    They are model.safetensors, else the files that its index names. Others, such as
    consolidated.safetensors or an adapter's, are not read. Empty where there are none. Raises
    ConfigError for an index that cannot be read.
    """
    return _files(directory, WEIGHTS, INDEX)


def pickled_weight_files(directory: Path) -> list[Path]:
    """Returns the files of weights that torch.save wrote, as weight_files() does."""
    return _files(directory, PICKLED_WEIGHTS, PICKLED_INDEX)


def weight_map(directory: Path, index: str = INDEX) -> dict[str, str]:
    """Returns the file name of every tensor by an index; raises ConfigError for a damaged one."""
    file = directory / index
    names = json_object(read_text(file, str(file)), str(file)).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"{file}: weight_map: must be an object with a file for every tensor")
    for tensor, name in names.items():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise ConfigError(
                f"{file}: weight_map: the file of {tensor!r} must be one next to the index, not "
                f"{name!r}"
            )
    return names


def index_of(files: dict[str, str], total_bytes: int) -> str:
    """Returns the content of an index: the file name of every tensor."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _files(directory: Path, single: str, index: str) -> list[Path]:
    if (directory / single).exists():
        return [directory / single]
    if not (directory / index).exists():
        return []
    return [directory / name for name in sorted(set(weight_map(directory, index).values()))]
