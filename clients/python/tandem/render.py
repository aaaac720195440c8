"""What people see: tables, progress and trajectories coloured by author."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tandem.text import TextCodec

SENIOR_STYLE = "bold cyan"
JUNIOR_STYLE = "underline yellow"
LEGEND = "senior, [junior]"

_COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("loss/total", "loss", "{:+.4f}"),
    ("policy/grad_norm", "grad", "{:.2f}"),
    ("mismatch/k3", "mismatch", "{:.1e}"),
    ("tandem/senior_token_fraction", "senior", "{:.0%}"),
    ("tandem/switches_per_seq", "switches", "{:.2f}"),
    ("tokens/response", "tokens", "{:.0f}"),
    ("time/generate_seconds", "generate", "{:.1f}s"),
    ("time/train_seconds", "train", "{:.1f}s"),
    ("time/publish_seconds", "publish", "{:.1f}s"),
)
_WIDTH = 9


class Output:
    """Writes to the terminal: rich on one, plain lines elsewhere, JSON lines with `--json`."""

    def __init__(self, *, as_json: bool = False, console: Console | None = None) -> None:
        self.as_json = as_json
        # Text stays as it is: rich would colour numbers, and turn ":key:" into a picture.
        plain: dict[str, Any] = {"highlight": False, "emoji": False}
        self.console = console or Console(**plain)
        self.notes = Console(stderr=True, **plain) if as_json else self.console

    def note(self, message: str) -> None:
        """A line about what is going on; with --json on the error stream."""
        self.notes.print(message, markup=False, soft_wrap=True)

    def result(self, value: Mapping[str, Any] | Sequence[Any], text: Any = None) -> None:
        """The answer of a command: as JSON, or as `text` for people."""
        if self.as_json:
            print(json.dumps(value), flush=True)
        elif text is not None:
            # Plain text keeps its brackets; rich objects draw themselves.
            self.console.print(text, markup=False, soft_wrap=isinstance(text, str))

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Rows as a table on a terminal, as "key=value …" lines elsewhere."""
        if not self.console.is_terminal:
            lines = (
                " ".join(f"{key}={_shown(value)}" for key, value in row.items()) for row in rows
            )
            return "\n".join(lines)
        table = Table()
        columns = list(dict.fromkeys(key for row in rows for key in row))
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(_shown(row.get(column)) for column in columns))
        return table

    def json_line(self, value: Mapping[str, Any]) -> None:
        """One event of a longer command, with --json alone."""
        if self.as_json:
            print(json.dumps(value), flush=True)


class StepDisplay:
    """A line for every step; on a terminal also a bar with rate and ETA.

    `elapsed_seconds`: the run's time before `first_step`, of which the rate takes no notice.
    """

    def __init__(
        self, output: Output, first_step: int, steps: int, elapsed_seconds: float = 0.0
    ) -> None:
        self._output = output
        self._seconds: dict[str, float] = {}
        self._first_step = first_step
        self._steps = steps
        self._lines = 0
        self._progress: Progress | None = None
        self._elapsed_before = elapsed_seconds

    def __enter__(self) -> StepDisplay:
        if self._output.console.is_terminal and not self._output.as_json:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=self._output.console,
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
        for phase in ("generate", "reward", "train", "publish"):
            seconds = line.get(f"time/{phase}_seconds") or 0.0
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        done = line["step"] - self._first_step + 1
        rate = (line["time_seconds"] - self._elapsed_before) / done
        left = (self._steps - line["step"]) * rate
        if self._progress is not None:
            self._progress.update(self._task, completed=line["step"], rate=f"{rate:.1f} s/step")
        if self._output.as_json:
            return
        if self._lines % 20 == 0:
            self._output.note(
                "".join(f"{name:>{_WIDTH}}" for _, name, _ in _COLUMNS) + "      left"
            )
        self._lines += 1
        cells = "".join(f"{_cell(line.get(key), form):>{_WIDTH}}" for key, _, form in _COLUMNS)
        self._output.note(cells + f"{_duration(left):>10}")

    def waiting(self) -> str:
        """Who waited for whom: the share of the time in which each side worked."""
        total = max(1e-9, sum(self._seconds.values()))
        share = {name: f"{seconds / total:.0%}" for name, seconds in self._seconds.items()}
        return (
            f"generate {share.get('generate', '0%')} (the trainer waits), "
            f"reward {share.get('reward', '0%')} (both wait), "
            f"train {share.get('train', '0%')} (the rollout servers wait), "
            f"publish {share.get('publish', '0%')}"
        )


def authored_text(pieces: Sequence[str], mask: Sequence[int], *, one_line: bool = False) -> Text:
    """A response by author: senior bold cyan, junior yellow, underlined and in brackets."""
    text = Text()
    for author, raw in _runs(pieces, mask):
        run = _visible(raw, keep="" if one_line else "\n")
        if author:
            text.append(run, style=SENIOR_STYLE)
        else:
            text.append("[", style="dim")
            text.append(run, style=JUNIOR_STYLE)
            text.append("]", style="dim")
    return text


def trajectory_table(
    records: Iterable[Mapping[str, Any]], codec: TextCodec, title: str = "Trajectories"
) -> Table:
    """Trajectories with every token coloured by its author."""
    table = Table(title=Text(f"{title}: {LEGEND}"))
    table.add_column("prompt")
    table.add_column("response")
    table.add_column("reward", justify="right")
    for record in records:
        pieces = codec.pieces(record["response_token_ids"])
        table.add_row(
            Text(_visible(codec.decode(record["prompt_token_ids"]))),
            authored_text(pieces, record["authorship_mask"], one_line=True),
            _cell(record["reward"], "{:.2f}"),
        )
    return table


def _runs(pieces: Sequence[str], mask: Sequence[int]) -> Iterable[tuple[int, str]]:
    run, author = "", None
    for piece, who in zip(pieces, mask, strict=True):
        if author is not None and who != author:
            yield author, run
            run = ""
        author, run = who, run + piece
    if author is not None:
        yield author, run


def _visible(text: str, keep: str = "") -> str:
    # A model may write control characters; a terminal must not obey them.
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
