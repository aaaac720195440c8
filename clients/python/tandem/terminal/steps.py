"""The steps of a run as they are done: a line for each, and between them the work at the moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text

from tandem.terminal.output import Output, cell
from tandem.utils.progress import Progress, ProgressLines
from tandem.utils.words import duration

Line = Mapping[str, Any]


def _value(key: str) -> Callable[[Line], Any]:
    return lambda line: line.get(key)


def _tokens_per_second(line: Line) -> float | None:
    """Returns the response tokens a second of generation; where nothing is drawn, of training."""
    seconds = line.get("time/generate_seconds") or line.get("time/train_seconds")
    tokens = line.get("tokens/response")
    return tokens / seconds if tokens is not None and seconds else None


def _kl(line: Line) -> float | None:
    """Returns the KL to the reference of a run whose loss or reward has it."""
    return None if line.get("policy/kl_coefficient") is None else line.get("policy/kl_to_ref")


def _senior(line: Line) -> float | None:
    """Returns the senior's share of the tokens, where a junior wrote others."""
    share = line.get("tandem/senior_token_fraction")
    return None if share == 1 else share


def _any(key: str) -> Callable[[Line], float | None]:
    """Returns what gives a count that is shown once it is not 0."""
    return lambda line: line.get(key) or None


def _switches(line: Line) -> float | None:
    return line.get("tandem/switches_per_seq") or None


@dataclass(frozen=True)
class _Column:
    """A column of the display, which is there from the first step on that has its value.

    Attributes:
        name: its header.
        meaning: its line in the legend.
        form: the format of a value.
        priority: a narrow terminal keeps the columns with the lowest numbers.
        value: returns the value of a line of metrics.jsonl; None where it has none.
    """

    name: str
    meaning: str
    form: str
    priority: int
    value: Callable[[Line], Any]

    @property
    def width(self) -> int:
        return max(7, len(self.name))


_COLUMNS = (
    _Column("step", "", "{:.0f}", 0, _value("step")),
    _Column("reward", "mean reward", "{:.3f}", 0, _value("reward/mean")),
    _Column(
        "flat", "prompts whose rewards are all equal", "{:.0%}", 8, _value("reward/frac_zero_std")
    ),
    _Column("loss", "total loss", "{:+.4f}", 1, _value("loss/total")),
    _Column(
        "right",
        "pairs whose chosen response has more reward",
        "{:.0%}",
        1,
        _value("rewards/accuracies"),
    ),
    _Column("margin", "mean difference of their rewards", "{:+.3f}", 2, _value("rewards/margins")),
    _Column("value", "the critic's loss", "{:.3f}", 2, _value("critic/loss")),
    _Column("heads", "the speculator's loss", "{:.3f}", 1, _value("speculator/loss")),
    _Column("kl", "KL to the reference, nats per token", "{:.4f}", 3, _kl),
    _Column("grad", "gradient norm", "{:.3g}", 2, _value("policy/grad_norm")),
    _Column("rate", "learning rate", "{:.1e}", 5, _value("policy/learning_rate")),
    _Column("entropy", "mean entropy, nats per token", "{:.3g}", 10, _value("policy/entropy")),
    _Column("mismatch", "KL between rollout and trainer (k3)", "{:.1e}", 9, _value("mismatch/k3")),
    _Column("senior", "tokens written by the senior", "{:.0%}", 3, _senior),
    _Column("switches", "changes of author per response", "{:.2f}", 7, _switches),
    _Column("tokens", "response tokens in the step", "{:,.0f}", 6, _value("tokens/response")),
    _Column(
        "tok/s",
        "response tokens per second of generation, else of training",
        "{:,.0f}",
        6,
        _tokens_per_second,
    ),
    _Column(
        "cut",
        "responses that reached max_tokens",
        "{:.0%}",
        11,
        _value("response/truncated_fraction"),
    ),
    _Column(
        "failed", "episodes whose environment failed", "{:.0f}", 3, _any("environment/failures")
    ),
    _Column(
        "hung", "of them because a call took too long", "{:.0f}", 4, _any("environment/timeouts")
    ),
    _Column("crashed", "of them because a process ended", "{:.0f}", 4, _any("environment/crashes")),
    _Column(
        "flooded",
        "of them because of too much memory or output",
        "{:.0f}",
        4,
        _any("environment/floods"),
    ),
    _Column("stale", "versions that the tokens lie behind", "{:.1f}", 4, _value("staleness/mean")),
    _Column(
        "r.idle", "share of the time with nothing to draw", "{:.0%}", 3, _value("idle/rollout")
    ),
    _Column(
        "t.idle", "share of the time with nothing to train", "{:.0%}", 3, _value("idle/trainer")
    ),
    _Column("c.idle", "the same of the critic", "{:.0%}", 3, _value("idle/critic")),
    _Column("generate", "seconds for generation", "{:.1f}s", 4, _value("time/generate_seconds")),
    _Column("judge", "seconds for the rewards", "{:.1f}s", 12, _value("time/reward_seconds")),
    _Column("train", "seconds for the update", "{:.1f}s", 4, _value("time/train_seconds")),
    _Column(
        "publish",
        "seconds until the rollout servers had the weights",
        "{:.1f}s",
        5,
        _value("time/publish_seconds"),
    ),
)
_LEGEND_LEFT = "left: time left at this rate"
# Phases of a step, with who waits in them.
_PHASES = {
    "generate": "the trainer waits",
    "reward": "both wait",
    "reference": "the trainer waits",
    "teachers": "the trainer waits",
    "train": "the rollout servers wait",
    "publish": "",
    "trajectories": "all wait for the disk",
    "eval": "the trainer waits",
    "checkpoint": "the rollout servers wait",
}
# The same of an asynchronous run, whose rollout servers wait for no phase of it.
_ASYNC_PHASES = {
    "wait": "the trainer waits for rollouts",
    "reference": "the trainer waits",
    "teachers": "the trainer waits",
    "train": "",
    "publish": "both wait",
    "trajectories": "the trainer waits for the disk",
    "eval": "the trainer waits",
    "checkpoint": "the trainer waits",
}
# Phases that waiting() names in every run.
_ALWAYS = ("generate", "reward", "wait", "train", "publish")
# Width of the column with the time that the rest of the run takes.
_LEFT_WIDTH = 8
# Steps between two headers.
_HEADER_EVERY = 20


class _BarsAndWork(Bars):
    """The bar of the steps, with the work at the moment below."""

    def __init__(self, work: Progress, *columns: Any, **options: Any) -> None:
        self._work = work
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yields the lines that are drawn again and again."""
        yield from super().get_renderables()
        if line := self._work.line():
            yield Text(line, overflow="ellipsis", no_wrap=True)


class StepDisplay:
    """A line for every step, and the work at the moment.

    On a terminal a bar with rate and ETA shows the steps, and a line below it the work; elsewhere
    the work is a line every 30 seconds.

    `elapsed_seconds` is the run's time before `first_step`, which the rate leaves out.
    """

    def __init__(
        self,
        output: Output,
        first_step: int,
        steps: int,
        elapsed_seconds: float = 0.0,
        work: Progress | None = None,
    ) -> None:
        self._output = output
        self._phases: Mapping[str, str] = _PHASES
        # Seconds in which servers of an asynchronous run had nothing to do, and those of the steps.
        self._idle: dict[str, float] = {}
        self._last_seconds = elapsed_seconds
        self._seconds: dict[str, float] = {}
        self._first_step = first_step
        self._steps = steps
        self._lines = 0
        self._known: set[_Column] = set()
        self._explained: set[_Column] = set()
        self._shown_columns: list[_Column] = []
        self._bars: _BarsAndWork | None = None
        self._work = work or Progress()
        self._work_lines = ProgressLines(self._work, output.note)
        self._elapsed_before = elapsed_seconds

    def __enter__(self) -> StepDisplay:
        if not self._output.console.is_terminal or self._output.as_json:
            self._work_lines.__enter__()
            return self
        self._bars = _BarsAndWork(
            self._work,
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._output.console,
            expand=True,
        )
        self._task = self._bars.add_task(
            "steps", total=self._steps, completed=self._first_step - 1, rate=""
        )
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bars is not None:
            self._bars.stop()
        else:
            self._work_lines.__exit__(*exc)

    def step(self, line: Line) -> None:
        """Shows one line of metrics.jsonl."""
        self._output.json_line(line)
        if line.get("time/wait_seconds") is not None:
            self._phases = _ASYNC_PHASES
        seconds = line["time_seconds"] - self._last_seconds
        self._last_seconds = line["time_seconds"]
        for server in ("rollout", "trainer", "critic"):
            if (share := line.get(f"idle/{server}")) is not None:
                self._idle[server] = self._idle.get(server, 0.0) + share * seconds
        for phase in self._phases:
            seconds = line.get(f"time/{phase}_seconds") or 0.0
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        done = line["step"] - self._first_step + 1
        rate = (line["time_seconds"] - self._elapsed_before) / done
        left = (self._steps - line["step"]) * rate
        if self._bars is not None:
            self._bars.update(self._task, completed=line["step"], rate=f"{rate:.1f} s/step")
        if self._output.as_json:
            return
        columns = self._columns(line)
        if self._lines % _HEADER_EVERY == 0 or columns != self._shown_columns:
            self._explain(columns)
            names = [f"{column.name:>{column.width}}" for column in columns]
            self._print([*names, f"{'left':>{_LEFT_WIDTH}}"])
            self._lines, self._shown_columns = 0, columns
        self._lines += 1
        cells = [f"{cell(column.value(line), column.form):>{column.width}}" for column in columns]
        told = ["trained nothing"] if line.get("step/trained") == 0 else []
        self._print([*cells, f"{duration(left):>{_LEFT_WIDTH}}", *told])

    def _columns(self, line: Line) -> list[_Column]:
        """Returns the columns that the run has and that fit the terminal, if there is one."""
        self._known |= {one for one in _COLUMNS if one.value(line) is not None}
        present = [one for one in _COLUMNS if one in self._known]
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

    def _explain(self, columns: Sequence[_Column]) -> None:
        """Says once what each column means."""
        new = [one for one in columns if one.meaning and one not in self._explained]
        said = [f"{one.name}: {one.meaning}" for one in new]
        if not self._explained:
            said.append(_LEGEND_LEFT)
        self._explained |= set(new)
        if said:
            self._output.note("; ".join(said))

    def _print(self, cells: Sequence[str]) -> None:
        # A number that is wider than its column keeps a space before it.
        self._output.console.print(" ".join(cells), markup=False, soft_wrap=True)

    def waiting(self) -> str:
        """Returns a line with each phase's share of the time, and who waits during the phase.

        Of an asynchronous run it ends with the idle shares of the servers.
        """
        total = max(1e-9, sum(self._seconds.values()))
        told = self._phases
        shares = {name: self._seconds.get(name, 0.0) / total for name in told}
        said = ", ".join(
            f"{name} {share:.0%}" + (f" ({told[name]})" if told[name] else "")
            for name, share in shares.items()
            if share or name in _ALWAYS
        )
        elapsed = max(1e-9, self._last_seconds - self._elapsed_before)
        idle = ", ".join(f"{name} {idle / elapsed:.0%}" for name, idle in self._idle.items())
        return f"{said}; idle: {idle}" if idle else said
