"""The table of ratios that a run ends with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, field

from rollout.turns import Ratio


@dataclass(frozen=True)
class Row:
    """A figure with its bar; a figure without a bar is there to be read."""

    figure: str
    measured: str
    cpu: str = ""
    bar: str = ""
    verdict: str = ""
    detail: str = ""


@dataclass
class Table:
    """Rows in the order in which they were measured.

    A ratio is given as a number, or as a Ratio where CPU time was measured, too.
    """

    rows: list[Row] = field(default_factory=list)

    def at_least(self, figure: str, ratio: float | Ratio, bar: float, detail: str = "") -> None:
        """Adds a ratio that must not be below its bar."""
        self._add(figure, ratio, f">= {bar:g}", lambda value: value >= bar, detail)

    def at_most(self, figure: str, ratio: float | Ratio, bar: float, detail: str = "") -> None:
        """Adds a ratio that must not be above its bar."""
        self._add(figure, ratio, f"<= {bar:g}", lambda value: value <= bar, detail)

    def note(self, figure: str, ratio: float | Ratio, detail: str = "") -> None:
        """Adds a ratio without a bar."""
        self._add(figure, ratio, "", None, detail)

    def missing(self, figure: str, reason: str) -> None:
        """Adds a figure that could not be measured."""
        self.rows.append(Row(figure, "", verdict="not measured", detail=reason))

    def _add(
        self,
        figure: str,
        ratio: float | Ratio,
        bar: str,
        holds: Callable[[float], bool] | None,
        detail: str,
    ) -> None:
        value = ratio.value if isinstance(ratio, Ratio) else ratio
        cpu = f"{ratio.cpu:.2f}" if isinstance(ratio, Ratio) else ""
        verdict = "" if holds is None else "yes" if holds(value) else "NO"
        self.rows.append(Row(figure, f"{value:.2f}", cpu, bar, verdict, detail))

    def print(self) -> None:
        """Prints the table as Markdown."""
        head = Row("figure", "ratio", "in CPU time", "bar", "holds", "of what")
        cells = [astuple(row) for row in [head, Row(*["--"] * 6), *self.rows]]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        print()
        for row in cells:
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print(f"| {' | '.join(padded)} |", flush=True)
