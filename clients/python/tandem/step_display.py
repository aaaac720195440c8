"""The steps of a run as they are done: a line for each, a bar on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tandem.render import Output, cell


@dataclass(frozen=True)
class _Column:
    """A column of the display: a metric of a step with its name and format."""

    key: str
    name: str
    form: str
    # A narrow terminal keeps the columns with the lowest numbers.
    priority: int
    # Whether steps without the metric have no such column; else it is empty.
    optional: bool = False

    @property
    def width(self) -> int:
        return max(7, len(self.name))


_COLUMNS = (
    _Column("step", "step", "{:.0f}", 0),
    _Column("reward/mean", "reward", "{:.3f}", 0),
    _Column("reward/frac_zero_std", "flat", "{:.0%}", 8),
    _Column("loss/total", "loss", "{:+.4f}", 1),
    _Column("speculator/loss", "heads", "{:.3f}", 1, optional=True),
    _Column("policy/grad_norm", "grad", "{:.3g}", 2),
    _Column("policy/entropy", "entropy", "{:.3g}", 10),
    _Column("mismatch/k3", "mismatch", "{:.1e}", 9),
    _Column("tandem/senior_token_fraction", "senior", "{:.0%}", 3),
    _Column("tandem/switches_per_seq", "switches", "{:.2f}", 7),
    _Column("tokens/response", "tokens", "{:,.0f}", 6),
    _Column("response/truncated_fraction", "cut", "{:.0%}", 11),
    _Column("time/generate_seconds", "generate", "{:.1f}s", 4),
    _Column("time/reward_seconds", "judge", "{:.1f}s", 12),
    _Column("time/train_seconds", "train", "{:.1f}s", 4),
    _Column("time/publish_seconds", "publish", "{:.1f}s", 5),
)
# Width of the column with the time that the rest of the run takes.
_LEFT_WIDTH = 8
# Steps between two headers.
_HEADER_EVERY = 20


class StepDisplay:
    """A line for every step; on a terminal also a bar with rate and ETA.

    `elapsed_seconds` is the run's time before `first_step`, which the rate leaves out.
    """

    def __init__(
        self, output: Output, first_step: int, steps: int, elapsed_seconds: float = 0.0
    ) -> None:
        self._output = output
        self._seconds: dict[str, float] = {}
        self._first_step = first_step
        self._steps = steps
        self._lines = 0
        self._shown_columns: list[_Column] = []
        self._progress: Progress | None = None
        self._elapsed_before = elapsed_seconds

    def __enter__(self) -> StepDisplay:
        if self._output.console.is_terminal and not self._output.as_json:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=self._output.console,
                expand=True,
            )
            self._task = self._progress.add_task(
                "steps", total=self._steps, completed=self._first_step - 1, rate=""
            )
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def step(self, line: Mapping[str, Any]) -> None:
        """Shows one line of metrics.jsonl."""
        self._output.json_line(line)
        for phase in ("generate", "reward", "reference", "train", "publish"):
            seconds = line.get(f"time/{phase}_seconds") or 0.0
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        done = line["step"] - self._first_step + 1
        rate = (line["time_seconds"] - self._elapsed_before) / done
        left = (self._steps - line["step"]) * rate
        if self._progress is not None:
            self._progress.update(self._task, completed=line["step"], rate=f"{rate:.1f} s/step")
        if self._output.as_json:
            return
        columns = self._columns(line)
        if self._lines % _HEADER_EVERY == 0 or columns != self._shown_columns:
            names = [f"{column.name:>{column.width}}" for column in columns]
            self._print([*names, f"{'left':>{_LEFT_WIDTH}}"])
            self._lines, self._shown_columns = 0, columns
        self._lines += 1
        cells = [f"{cell(line.get(c.key), c.form):>{c.width}}" for c in columns]
        self._print([*cells, f"{_duration(left):>{_LEFT_WIDTH}}"])

    def _columns(self, line: Mapping[str, Any]) -> list[_Column]:
        """Returns the columns of a step that fit the terminal; all of them where there is none."""
        present = [one for one in _COLUMNS if one.key in line or not one.optional]
        if not self._output.console.is_terminal:
            return present
        free = self._output.console.width - _LEFT_WIDTH
        kept = set()
        for column in sorted(present, key=lambda column: column.priority):
            free -= column.width + 1
            if free < 0:
                break
            kept.add(column)
        return [column for column in present if column in kept]

    def _print(self, cells: Sequence[str]) -> None:
        # A number that is wider than its column keeps a space before it.
        self._output.console.print(" ".join(cells), markup=False, soft_wrap=True)

    def waiting(self) -> str:
        """Returns a line with each phase's share of the time, and who waits during the phase."""
        total = max(1e-9, sum(self._seconds.values()))
        share = {name: f"{seconds / total:.0%}" for name, seconds in self._seconds.items()}
        asked = self._seconds.get("reference", 0.0) > 0
        reference = f"reference {share['reference']} (the trainer waits), " if asked else ""
        return (
            f"generate {share.get('generate', '0%')} (the trainer waits), "
            f"reward {share.get('reward', '0%')} (both wait), {reference}"
            f"train {share.get('train', '0%')} (the rollout servers wait), "
            f"publish {share.get('publish', '0%')}"
        )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
