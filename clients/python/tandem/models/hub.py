"""Models and data sets of the Hugging Face Hub: fetched into its cache, or found there.

A model is named as everywhere else, ORG/NAME, where a directory could stand. Authentication,
mirrors and the place of the cache are those of `huggingface_hub` (HF_TOKEN, HF_ENDPOINT, HF_HOME).
Without a network, or with HF_HUB_OFFLINE=1, what the cache holds is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tandem.errors import ConfigError
from tandem.stores.manifest import MANIFEST, TRAINING_STATE
from tandem.stores.store import Store, is_url
from tandem.stores.transfers import fetch, matching

# The files that a server and the tokenizer read; repositories often hold the weights in other
# formats too.
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_MODEL_FILES = (*_TOKENIZER_FILES, "*.safetensors")
# Files of those patterns that nobody reads: folders of other formats (original/, onnx/), the same
# weights under the names of another program, adapters.
_UNREAD_FILES = ("*/*", "consolidated*", "adapter_*")
# The same in a checkpoint at a URL: what only training reads.
_UNREAD_STORED = ("optimizer*", "speculator_optimizer*", MANIFEST, TRAINING_STATE)
# Most seconds in which the Hub says which files a data set has.
_ANSWER_SECONDS = 20.0


class ModelName(str):
    """The name of a model in a settings file: a path as seen from `base`, a Hub name or a URL.

    Models are looked up when all settings are known, so that one that is overridden is not fetched.
    """

    base: Path

    def __new__(cls, name: str, base: Path) -> ModelName:
        """Names a model; a ModelName stays as it is."""
        if isinstance(name, ModelName):
            return name
        named = super().__new__(cls, name)
        named.base = base
        return named


def is_snapshot(directory: Path) -> bool:
    """Whether a directory lies in the Hub's cache, where a file of a model may not be yet."""
    return directory.parent.name == "snapshots" and directory.parent.parent.name.startswith("model")


def local_model(
    name: str, base: Path, field: str, *, weights: bool = True, revision: str | None = None
) -> Path:
    """Returns the directory of a model: the path `name` as seen from `base`, or a fetched copy.

    ORG/NAME names a model of the Hub unless there is a directory ORG: then it is a path. Without
    `weights` only the tokenizer and the configuration are fetched. `revision` selects a commit of
    the Hub, and changes nothing for a path. Raises ConfigError, which begins
    with `field` and hints at the command that fetches the model, for ORG/NAME that is not there.
    A URL is fetched into the cache of stores.transfers.
    """
    if is_url(name):
        patterns = _MODEL_FILES if weights else _TOKENIZER_FILES
        return fetch(Store(name, field), field, matching(patterns, _UNREAD_FILES + _UNREAD_STORED))
    path = Path(os.path.normpath(base / name))
    if path.exists() or not is_hub_name(name):
        return path
    if path.parent.is_dir():
        raise ConfigError(
            f"{field}: {path} does not exist",
            hint=f"{name} is a path, not a model of the Hugging Face Hub, because {path.parent} is "
            f"a directory; `hf download {name} --local-dir {path}` puts such a model there",
        )
    try:
        files = _MODEL_FILES if weights else _TOKENIZER_FILES
        return snapshot(name, "model", field, files, revision, _UNREAD_FILES)
    except ConfigError as error:
        raise ConfigError(f"{error.message}; {path} does not exist", hint=error.hint) from None


def is_hub_name(name: str) -> bool:
    """Whether a name has the form ORG/NAME."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def snapshot(
    name: str,
    kind: Literal["model", "dataset"],
    field: str,
    files: Sequence[str] | None = None,
    revision: str | None = None,
    unread: Sequence[str] = (),
) -> Path:
    """Returns the folder with the files of a Hub repository; fetches files that the cache lacks.

    `files` are patterns of names, all files by default, without those of `unread`. Raises
    ConfigError as local_model() does.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    command = ["hf download", name]
    command += ["--repo-type dataset"] if kind == "dataset" else []
    command += [f"--revision {revision}"] if revision else []
    try:
        return Path(
            snapshot_download(
                name,
                repo_type=kind,
                revision=revision,
                allow_patterns=None if files is None else list(files),
                ignore_patterns=list(unread) or None,
            )
        )
    # No network, nothing in the cache, a name or a revision that is not there, no access.
    except (OSError, HfHubHTTPError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{field}: the {kind} {name} cannot be fetched from the Hugging Face Hub, and is not "
            f"in its cache: {type(error).__name__}: {reason}",
            hint=f"`{' '.join(command)}` fetches it on a machine with a network; HF_HOME points "
            "to a copied cache",
        ) from None


def repository_files(name: str, revision: str | None) -> list[str] | None:
    """Returns the names of the files of a data set on the Hub; None if the Hub cannot be asked."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(name, revision=revision, timeout=_ANSWER_SECONDS)
    # No network, offline mode, no such name: the HTTP library's errors; fetching says which.
    except Exception:
        return None
    return [file.rfilename for file in info.siblings or ()]
