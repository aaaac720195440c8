"""Pictures of runs: their numbers as curves over the steps."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tandem.errors import ConfigError, RunDirectoryError
from tandem.metrics import eval_prefix, numbers
from tandem.rpc import renamed
from tandem.utils.atomic_files import kind_of_run, step_lines, writing

# The numbers that are drawn by default, in this order, as far as a run has them.
DEFAULTS = (
    "reward/mean",
    "eval/solo/accuracy",
    "eval/solo/reward/mean",
    "eval/handoff/accuracy",
    "eval/handoff/reward/mean",
    "eval/junior_takeover/accuracy",
    "eval/legibility/junior/nats_per_token",
    "loss/total",
    "policy/kl_to_ref",
    "policy/entropy",
    "policy/grad_norm",
    "policy/learning_rate",
    "tandem/senior_token_fraction",
    "staleness/mean",
    "time/generate_seconds",
    "time/train_seconds",
)
FORMATS = ("png", "svg", "pdf")
# Line styles, so that runs differ without colours too.
_LINES = ("-", "--", "-.", ":")
# Largest number of points of a curve that are marked one by one.
_FEW = 50


@dataclass
class Curve:
    """A number over the steps: the steps at which it is known, and its values there."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def smoothed(self, weight: float) -> Curve:
        """Returns the exponential moving average of TensorBoard; `weight` of the past in [0, 1)."""
        average, known = 0.0, []
        for count, value in enumerate(self.values, start=1):
            average = weight * average + (1 - weight) * value
            # The division removes the zero that the average started from.
            known.append(average / (1 - weight**count))
        return Curve(self.steps, known)


def read_curves(run_dir: Path) -> dict[str, Curve]:
    """Returns every number of metrics.jsonl by its key, and of evals.jsonl under eval/<mode>/.

    Raises RunDirectoryError when it is not a run directory, holds no step, or a file is damaged.
    """
    if kind_of_run(run_dir) is None:
        raise RunDirectoryError(f"{run_dir} holds no run")
    curves: dict[str, Curve] = {}
    lines = [(line, "") for line in step_lines(run_dir / "metrics.jsonl")]
    lines += [(line, eval_prefix(line)) for line in step_lines(run_dir / "evals.jsonl")]
    for line, prefix in lines:
        for name, value in numbers(line, prefix):
            curve = curves.setdefault(name, Curve())
            curve.steps.append(line["step"])
            curve.values.append(value)
    if not curves:
        raise RunDirectoryError(f"{run_dir}: no step has finished yet")
    return curves


def choose(wanted: Sequence[str], known: Iterable[str]) -> list[str]:
    """Returns the known names that `wanted`, names and patterns such as "time/*", match.

    Without wanted names these are the DEFAULTS that a run has, or all names if it has none of them.

    Raises ConfigError, with the nearest known name, for a name or pattern that matches nothing.
    """
    known = list(dict.fromkeys(known))
    if not wanted:
        return [name for name in DEFAULTS if name in known] or known
    chosen = []
    for pattern in wanted:
        found = [name for name in known if fnmatchcase(name, pattern)]
        if not found:
            close = difflib.get_close_matches(pattern, known, n=1)
            advice = renamed.advice(pattern) or (
                f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
            )
            raise ConfigError(f"--metric {pattern!r}: these runs have no such metric{advice}")
        chosen += found
    return list(dict.fromkeys(chosen))


def without_repeats(runs: Mapping[str, Mapping[str, Curve]], names: Sequence[str]) -> list[str]:
    """Returns the names without the mean rewards of evaluations that repeat their accuracy."""

    def repeats(name: str) -> bool:
        accuracy = name.removesuffix("reward/mean") + "accuracy"
        pairs = [(run.get(name), run.get(accuracy)) for run in runs.values()]
        return name.startswith("eval/") and all(one == other for one, other in pairs)

    return [name for name in names if not name.endswith("reward/mean") or not repeats(name)]


def draw(
    runs: Mapping[str, Mapping[str, Curve]],
    names: Sequence[str],
    file: Path,
    *,
    smoothing: float = 0.0,
) -> None:
    """Writes the picture of runs.

    Raises ConfigError when the suffix of `file` names no format, and RunDirectoryError when the
    file cannot be written.
    """
    if file.suffix.removeprefix(".") not in FORMATS:
        raise ConfigError(f"--output {file}: its suffix must be one of {', '.join(FORMATS)}")
    with writing(file):
        picture(runs, names, smoothing).savefig(file)


def picture(
    runs: Mapping[str, Mapping[str, Curve]], names: Sequence[str], smoothing: float
) -> Figure:
    """Returns a figure with a panel for each name, and a line for each run that has the number."""
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    # A panel is 4 inches wide and 2.6 high; the names of the runs stand above the panels.
    figure = Figure((4 * columns, 2.6 * rows + 0.4), dpi=150, layout="constrained")
    colors = cycle(matplotlib.color_sequences["petroff10"])
    styles = [
        {"color": color, "linestyle": line}
        for _, color, line in zip(runs, colors, cycle(_LINES), strict=False)
    ]
    for place, name in enumerate(names, start=1):
        panel = figure.add_subplot(rows, columns, place)
        panel.set_title(name, fontsize="medium")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
        for curves, style in zip(runs.values(), styles, strict=True):
            if name in curves:
                _draw_curve(panel, name, curves, smoothing, style)
    legend = figure.legend(
        [Line2D([], [], **style) for style in styles],
        # matplotlib leaves out labels that begin with "_".
        [f" {name}" for name in runs],
        loc="outside upper center",
        ncols=columns,
        handlelength=4,
    )
    for text in legend.get_texts():
        # A "$" in a name begins no formula.
        text.set_parse_math(False)
    return figure


def _draw_curve(
    panel: Axes, name: str, curves: Mapping[str, Curve], smoothing: float, style: dict[str, Any]
) -> None:
    curve = curves[name]
    marker = "." if len(curve.steps) <= _FEW else ""
    low, high = (curves.get(f"{name}_{side}") for side in ("low", "high"))
    if low and high and low.steps == curve.steps == high.steps:
        # Evaluations are few, so they are not smoothed.
        reach = [
            [abs(end - value) for end, value in zip(side.values, curve.values, strict=True)]
            for side in (low, high)
        ]
        panel.errorbar(curve.steps, curve.values, reach, marker=marker, capsize=3, **style)
        return
    if smoothing:
        panel.plot(curve.steps, curve.values, alpha=0.25, color=style["color"])
        curve, marker = curve.smoothed(smoothing), ""
    panel.plot(curve.steps, curve.values, marker=marker, **style)
