"""The description of a run on its page: model, method and the curve of its reward."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.errors import RunDirectoryError
from tandem.metrics import eval_prefix
from tandem.settings.values import read_mapping
from tandem.utils.atomic_files import IDENTITY, kind_of_run, read_json, step_lines

# Longer side of an image on a page, and most pixels of one that is read.
_SIDE = 256
_MOST_PIXELS = 64_000_000
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


@dataclass(frozen=True)
class About:
    """The description of a run on its page.

    Attributes:
        name: of the run.
        facts: (name, value) of model, method and steps.
        curves: by name [[step, value], …] of the mean reward, or the loss, of the staleness of an
            asynchronous run, and of the evaluations.
        images: column of the rows that names images, and the folder where relative paths begin;
            None for a run without images.
    """

    name: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    images: tuple[str, Path] | None = None

    def images_of(self, row: Mapping[str, Any] | None) -> list[str]:
        """Returns small copies of a row's images as data: URLs, of those that can be read."""
        if self.images is None or not row:
            return []
        column, folder = self.images
        value = row.get(column) or []
        paths = value if isinstance(value, list) else [value]
        found = (_data_url(folder / path) for path in paths if isinstance(path, str))
        return [url for url in found if url]


def about(run_dir: Path, *, evaluation: bool = False) -> About:
    """Reads what a run directory says about itself; a file of trajectories has only its name.

    `evaluation`: the images are those of its held-out rows.
    """
    name = run_dir.resolve().name
    if run_dir.is_file():
        return About(name)
    identity = read_json(run_dir / IDENTITY)
    try:
        config = read_mapping(run_dir / "config.yaml", RunDirectoryError)
    except RunDirectoryError:
        # The trajectories are there without it.
        config = {}
    models = (identity.get("servers") or {}).get("models") or {}
    facts = [
        (role, _model(models[role]))
        for role in ("trainer", "senior", "junior", "critic")
        if role in models
    ]
    if len(facts) > 1 and facts[0][1] == facts[1][1]:
        facts[:2] = [("model", facts[0][1])]
    if (kind := kind_of_run(run_dir)) is not None and config:
        facts.append(("method", _method(kind, config)))
    curves: dict[str, list[tuple[int, float]]] = {}
    lines = step_lines(run_dir / "metrics.jsonl")
    if lines:
        facts.append(("steps", f"{lines[-1]['step']} of {config.get('steps', '?')}"))
    for line in lines:
        for key in ("reward/mean", "loss/total", "staleness/mean"):
            if isinstance(line.get(key), int | float):
                curves.setdefault(key, []).append((line["step"], line[key]))
    if "reward/mean" in curves:
        curves.pop("loss/total", None)
    for line in step_lines(run_dir / "evals.jsonl"):
        if isinstance(line.get("accuracy"), int | float):
            key = f"{eval_prefix(line)}accuracy"
            curves.setdefault(key, []).append((line["step"], line["accuracy"]))
    return About(name, facts, curves, _images(config, evaluation=evaluation))


def _model(record: Mapping[str, Any]) -> str:
    name = Path(str(record.get("path", ""))).name
    size = record.get("parameters")
    details = [str(record["model_type"])] if record.get("model_type") else []
    if isinstance(size, int | float):
        details.append(f"{size / 1e6:,.1f} M parameters")
    return f"{name} ({', '.join(details)})" if details else name


def _method(kind: str, config: Mapping[str, Any]) -> str:
    """Returns how the run trains, in words."""
    if kind == "sft":
        own = (config.get("sft") or {}).get("responses") == "senior"
        return "supervised, on its own responses" if own else "supervised, on the rows' answers"
    if kind == "dpo":
        loss = (config.get("dpo") or {}).get("loss_type") or "sigmoid"
        return f"on pairs of a chosen and a rejected response, {loss}"
    if kind == "reward-model":
        return "a reward model, on pairs of a chosen and a rejected response"
    objective = config.get("objective") or {}
    batch = config.get("batch") or {}
    said = [str(objective.get("advantage_estimator") or "group-relative advantages")]
    if objective.get("loss_type"):
        said.append(str(objective["loss_type"]))
    if objective.get("kl_coefficient"):
        said.append(f"KL {objective['kl_coefficient']:g}")
    if {"prompts_per_step", "samples_per_prompt"} <= set(batch):
        said.append(f"{batch['prompts_per_step']} × {batch['samples_per_prompt']} responses a step")
    if staleness := (config.get("async") or {}).get("max_staleness"):
        said.append(f"rollouts up to {staleness} steps old")
    if (config.get("tandem") or {}).get("enabled") is False:
        said.append("the senior alone")
    return ", ".join(said)


def _images(config: Mapping[str, Any], *, evaluation: bool) -> tuple[str, Path]:
    """Returns the column of images, that of conversations by default, and the rows' folder."""
    data = config.get("data") or {}
    held_out = (config.get("eval") or {}).get("data") if evaluation else None
    column = (held_out or {}).get("images") or data.get("images") or "images"
    source = held_out or data
    rows = Path(str(source.get("jsonl") or source.get("parquet") or "rows"))
    return column, rows if rows.is_dir() else rows.parent


@functools.lru_cache(maxsize=512)
def _data_url(path: Path) -> str:
    """Returns a small copy of an image; "" if there is no such image."""
    from PIL import Image

    try:
        with Image.open(path, formats=_FORMATS) as image:
            if image.width * image.height > _MOST_PIXELS:
                return ""
            image.draft("RGB", (_SIDE, _SIDE))
            small = image.convert("RGB")
            small.thumbnail((_SIDE, _SIDE))
            file = io.BytesIO()
            small.save(file, "PNG")
    # Pillow raises many kinds for files that are damaged; a page does without the picture.
    except Exception:
        return ""
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
