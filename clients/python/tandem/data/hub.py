"""Data sets of the Hugging Face Hub: only the files of the wanted split are fetched."""

from __future__ import annotations

import itertools
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.models.hub import repository_files, snapshot
from tandem.settings.run import HubDataSettings
from tandem.utils.optional import optional_module

# Says which files a data set consists of, where its folders and names do not.
_CARD = "README.md"


def hub_rows(spec: HubDataSettings, field: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a split.

    Raises ConfigError, which begins with `field`, for a data set that cannot be fetched or read.
    """
    # The import takes seconds.
    datasets = optional_module("datasets", field)
    names = repository_files(spec.name, spec.revision)
    # Without a network the cache has what an earlier run, or `hf download`, fetched.
    wanted = None if names is None else _files_of_split(datasets, spec, field, names)
    patterns = None if wanted is None else [_CARD, *itertools.chain(*wanted.values())]
    folder = snapshot(spec.name, "dataset", f"{field}.name", patterns, spec.revision)
    if names is None and _lacks_files(datasets, folder, spec):
        wanted = _patterns_of_split(folder, spec)
    try:
        # The snapshot's files are read: by the Hub's name `datasets` would ask the Hub again.
        rows = datasets.load_dataset(str(folder), spec.config, split=spec.split, data_files=wanted)
    # Each reader of `datasets` raises errors of its own.
    except Exception as error:
        raise _unreadable(spec, field, error) from None
    for row in rows:
        yield dict(row)


def hub_source(name: str, config: str | None, field: str) -> dict[str, str]:
    """Returns `data.hub` for a data set: with its configuration and split where these are needed.

    Of several configurations main or default is taken, and the split train, else the first. Raises
    ConfigError, which lists the configurations, where none is named and neither is there.
    """
    datasets = optional_module("datasets", field)
    spec = HubDataSettings(name=name)
    names = repository_files(name, None)
    if names is None:
        return _source_in(datasets, snapshot(name, "dataset", field), spec, config, field)
    with _Skeleton(spec, field, names) as folder:
        return _source_in(datasets, folder, spec, config, field)


def _source_in(
    datasets: Any, folder: Path, spec: HubDataSettings, config: str | None, field: str
) -> dict[str, str]:
    try:
        configs = list(datasets.get_dataset_config_names(str(folder)))
        if config is None and len(configs) > 1:
            config = next((one for one in ("main", "default") if one in configs), None)
            if config is None:
                raise ConfigError(
                    f"{field}: {spec.name} has the configurations {', '.join(configs)}",
                    hint=f"{spec.name}:CONFIG chooses one",
                )
        builder = datasets.load_dataset_builder(str(folder), config)
    except ConfigError:
        raise
    except Exception as error:
        raise _unreadable(spec, field, error) from None
    splits = list(builder.config.data_files or {})
    split = {"split": splits[0]} if splits and "train" not in splits else {}
    return {"name": spec.name} | ({"config": config} if config else {}) | split


class _Skeleton:
    """A folder with the card of a data set and its other files, empty; a context manager.

    From their names alone `datasets` knows which files belong to which split.
    """

    def __init__(self, spec: HubDataSettings, field: str, names: Sequence[str]) -> None:
        self._names = names
        cards = [_CARD] if _CARD in names else []
        card = snapshot(spec.name, "dataset", f"{field}.name", cards, spec.revision) / _CARD
        self._card = card if cards else None
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-data-")

    def __enter__(self) -> Path:
        folder = Path(self._folder.name)
        for name in self._names:
            file = folder / name
            # Names come from the Hub.
            if folder in file.resolve().parents:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
        if self._card is not None:
            shutil.copyfile(self._card, folder / _CARD)
        return folder.resolve()

    def __exit__(self, *exc: object) -> None:
        self._folder.cleanup()


def _files_of_split(
    datasets: Any, spec: HubDataSettings, field: str, names: Sequence[str]
) -> dict[str, list[str]]:
    """Returns the names of the files of each split that `spec.split` names."""
    with _Skeleton(spec, field, names) as folder:
        try:
            builder = datasets.load_dataset_builder(str(folder), spec.config)
        except Exception as error:
            raise _unreadable(spec, field, error) from None
        files: Mapping[str, Sequence[str]] = builder.config.data_files or {}
        splits = _splits(spec.split, files)
        if unknown := [split for split in splits if split not in files]:
            raise ConfigError(
                f"{field}.split: {spec.name} has no split {unknown[0]!r}; it has {', '.join(files)}"
            )
        return {
            split: [str(Path(file).relative_to(folder)) for file in files[split]]
            for split in splits
        }


def _splits(asked: str, known: Mapping[str, Any]) -> list[str]:
    """Returns the names of the splits in "train[:100]+test"."""
    names = [re.sub(r"\[.*", "", part).strip() for part in asked.split("+")]
    return list(known) if "all" in names else list(dict.fromkeys(names))


def _lacks_files(datasets: Any, folder: Path, spec: HubDataSettings) -> bool:
    """Whether `datasets` refuses the cached files: the card may name others, of other splits."""
    try:
        datasets.load_dataset_builder(str(folder), spec.config)
    # Files that are not there, or formats that cannot be told without them.
    except Exception:
        return True
    return False


def _patterns_of_split(folder: Path, spec: HubDataSettings) -> dict[str, Any] | None:
    """Returns what the card says of the files of the splits; None where it says nothing."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    try:
        card = DatasetCard.load(folder / _CARD)
        configs = MetadataConfigs.from_dataset_card_data(card.data)
    except (OSError, ValueError):
        return None
    name = spec.config or next(iter(configs), "")
    files = {one["split"]: one["path"] for one in configs.get(name, {}).get("data_files", ())}
    return {split: files[split] for split in _splits(spec.split, files) if split in files} or None


def _unreadable(spec: HubDataSettings, field: str, error: Exception) -> ConfigError:
    return ConfigError(f"{field}: {spec.name}: {type(error).__name__}: {error}")
