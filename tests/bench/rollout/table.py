"""The table of ratios that a run ends with."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """A figure with its bar; a figure without a bar is there to be read."""

    figure: str
    measured: str
    bar: str = ""
    verdict: str = ""


@dataclass
class Table:
    """Rows in the order in which they were measured."""

    rows: list[Row] = field(default_factory=list)

    def at_least(self, figure: str, value: float, bar: float, detail: str = "") -> None:
        """Adds a ratio that must not be below its bar."""
        self._add(figure, value, f">= {bar:g}", value >= bar, detail)

    def at_most(self, figure: str, value: float, bar: float, detail: str = "") -> None:
        """Adds a ratio that must not be above its bar."""
        self._add(figure, value, f"<= {bar:g}", value <= bar, detail)

    def note(self, figure: str, measured: str) -> None:
        """Adds a figure without a bar."""
        self.rows.append(Row(figure, measured))

    def missing(self, figure: str, reason: str) -> None:
        """Adds a figure that could not be measured."""
        self.rows.append(Row(figure, reason, verdict="not measured"))

    def _add(self, figure: str, value: float, bar: str, holds: bool, detail: str) -> None:
        measured = f"{value:.2f}" + (f" ({detail})" if detail else "")
        self.rows.append(Row(figure, measured, bar, "yes" if holds else "NO"))

    def print(self) -> None:
        """Prints the table as Markdown."""
        head = Row("figure", "measured", "bar", "holds")
        cells = [
            (row.figure, row.measured, row.bar, row.verdict)
            for row in [head, Row("--", "--", "--", "--"), *self.rows]
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        print()
        for row in cells:
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print(f"| {' | '.join(padded)} |", flush=True)
