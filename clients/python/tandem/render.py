"""What people see: notes, results, tables, and responses coloured by author."""

from __future__ import annotations

import io
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tandem.rollout.v1 import rollout_pb2
from tandem.text import GrowingText, TextCodec

SENIOR_STYLE = "bold cyan"
JUNIOR_STYLE = "underline yellow"
LEGEND = "senior, [junior]"


def use_any_encoding() -> None:
    """Lets a terminal that cannot show a character show its escape instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Output:
    """Writes to the terminal: rich on one, plain lines elsewhere, JSON lines with `--json`."""

    def __init__(self, *, as_json: bool = False, console: Console | None = None) -> None:
        self.as_json = as_json
        # Text stays as it is: rich would colour numbers, and turn ":key:" into a picture.
        plain: dict[str, Any] = {"highlight": False, "emoji": False}
        self.console = console or Console(**plain)
        self.errors = Console(stderr=True, **plain)
        self.notes = self.errors if as_json else self.console

    def note(self, message: str) -> None:
        """A line about what is going on; with --json on the error stream."""
        _print_text(self.notes, message)

    def error(self, message: str) -> None:
        """A line about what went wrong, on the error stream."""
        _print_text(self.errors, message)

    def result(self, value: Mapping[str, Any] | Sequence[Any], text: Any = None) -> None:
        """The answer of a command: as JSON, or as `text` for people."""
        if self.as_json:
            print(json.dumps(value), flush=True)
        elif isinstance(text, str):
            _print_text(self.console, text)
        elif text is not None:
            self.console.print(text)

    def rows(self, rows: Sequence[Mapping[str, Any]], counts: Collection[str] = ()) -> Any:
        """Rows as "key=value …" lines; on a terminal as a table or, where that is too wide, a list.

        `counts` names the columns of numbers that people compare: they get separators.
        """
        if not self.console.is_terminal:
            lines = (
                " ".join(f"{key}={_shown(value)}" for key, value in row.items()) for row in rows
            )
            return "\n".join(lines)
        shown = [
            {
                key: f"{value:,}" if key in counts and value is not None else _shown(value)
                for key, value in row.items()
            }
            for row in rows
        ]
        table = Table()
        columns = list(dict.fromkeys(key for row in shown for key in row))
        for column in columns:
            # Names, addresses and numbers stay whole; sentences may wrap.
            prose = any(" " in row.get(column, "") for row in shown)
            table.add_column(column, no_wrap=not prose)
        for row in shown:
            table.add_row(*(Text(row.get(column, "")) for column in columns))
        anything = self.console.options.update(width=10_000)
        if self.console.measure(table, options=anything).minimum <= self.console.width:
            return table
        return Group(*(_listed(row, last=row is shown[-1]) for row in shown))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
        """Cells as a table on a terminal, numbers at the right; tab-separated lines elsewhere."""
        if not self.console.is_terminal:
            return tab_separated(title, columns, rows)
        table = Table(title=Text(title))
        for column in columns:
            table.add_column(column, justify="right" if column else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        return table

    def json_line(self, value: Mapping[str, Any]) -> None:
        """One event of a longer command, with --json alone."""
        if self.as_json:
            print(json.dumps(value), flush=True)


class AuthoredText:
    """A text that grows by author: senior bold cyan, junior yellow, underlined and in brackets."""

    def __init__(self, keep: str = "\n") -> None:
        """`keep`: the control characters that are not shown by their escapes."""
        self._text = Text()
        self._author = 1
        self._keep = keep

    def append(self, author: int, piece: str, note: str = "") -> None:
        """A piece by an author (1: senior), and what is to say about it."""
        # Bytes of a character show with the token that completes it.
        if not piece:
            return
        if author != self._author:
            self._text.append("]" if author else "[", style="dim")
            self._author = author
        style = SENIOR_STYLE if author else JUNIOR_STYLE
        self._text.append(visible(piece, self._keep), style=style)
        self._text.append(note, style="dim")

    def end(self) -> None:
        """No more pieces come."""
        if not self._author:
            self._text.append("]", style="dim")

    def take(self) -> Text:
        """What came since the last call."""
        taken, self._text = self._text, Text()
        return taken


def authored_text(
    pieces: Sequence[str],
    mask: Sequence[int],
    notes: Iterable[str] = itertools.repeat(""),
    keep: str = "\n",
) -> Text:
    """A whole response as AuthoredText; `notes` has one for every piece."""
    text = AuthoredText(keep)
    for author, piece, note in zip(mask, pieces, notes, strict=False):
        text.append(author, piece, note)
    text.end()
    return text.take()


def tab_separated(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Cells as lines for where there is no terminal."""
    lines = ("\t".join(map(str, cells)) for cells in (columns, *rows))
    return "\n".join([title, *lines])


class ResponsePrinter:
    """Prints responses in a given order, by author, each while it is written.

    Those that come early wait for their turn. Their heads stand between them; a single response is
    printed without.
    """

    def __init__(
        self, console: Console, codec: TextCodec, heads: Mapping[tuple[str, int], str]
    ) -> None:
        """`heads`: (request_id, sample_index) → what stands above the response, in order."""
        self._console = console
        self._heads = heads
        self._waiting = list(heads)
        self._responses = {key: _Response(codec.growing()) for key in heads}
        self._head()

    def on_event(self, event: rollout_pb2.GenerateResponse) -> None:
        """Takes an event of Generate."""
        kind = event.WhichOneof("event")
        if kind == "tokens":
            tokens = event.tokens
            response = self._responses[tokens.request_id, tokens.sample_index]
            response.add(tokens.token_ids, tokens.authorship_mask, tokens.offset)
        elif kind == "finished":
            trajectory = event.finished.trajectory
            response = self._responses[event.finished.request_id, trajectory.sample_index]
            response.add(trajectory.response_token_ids, trajectory.authorship_mask, 0)
            response.end()
        self._print()

    def _print(self) -> None:
        while self._waiting:
            response = self._responses[self._waiting[0]]
            self._console.print(response.take(), end="", soft_wrap=True)
            if not response.ended:
                return
            self._console.print()
            self._waiting.pop(0)
            self._head()

    def _head(self) -> None:
        if self._waiting and len(self._heads) > 1:
            _print_text(self._console, f"--- {self._heads[self._waiting[0]]} ---")


class _Response:
    """A response that grows: what of it was not printed yet."""

    def __init__(self, pieces: GrowingText) -> None:
        self.ended = False
        self._pieces = pieces
        self._tokens = 0
        self._author = 1
        self._text = AuthoredText()

    def add(self, ids: Sequence[int], mask: Sequence[int], offset: int) -> None:
        """Takes tokens from position `offset` on; those that are known already change nothing."""
        known = self._tokens - offset
        for token, author in zip(ids[known:], mask[known:], strict=True):
            self._text.append(author, self._pieces.add(token))
            self._author = author
            self._tokens += 1

    def end(self) -> None:
        """No more tokens come."""
        self._text.append(self._author, self._pieces.rest())
        self._text.end()
        self.ended = True

    def take(self) -> Text:
        """What came since the last call."""
        return self._text.take()


def _listed(row: Mapping[str, str], *, last: bool) -> Any:
    """A row as one "key  value" line per field."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for key, value in row.items():
        grid.add_row(Text(key, style="bold"), Text(value))
    return grid if last else Group(grid, "")


def _print_text(console: Console, text: str) -> None:
    """Prints a text as it is; a terminal gets it wrapped between words.

    No line feed comes into a word: an address or a path can be copied whole.
    """
    if console.is_terminal:
        for line in text.split("\n"):
            start = re.match(r" *(- )?", line)
            parts = textwrap.wrap(
                line,
                console.width,
                subsequent_indent=" " * len(start[0]) if start else "",
                break_long_words=False,
                break_on_hyphens=False,
            )
            console.print(Text("\n".join(parts)), soft_wrap=True)
    else:
        # Not by rich, which would make spaces of tabs.
        print(text, file=console.file, flush=True)


def visible(text: str, keep: str = "") -> str:
    """A text whose control characters, but those of `keep`, are shown by their escapes."""
    # A model may write control characters; a terminal must not obey them.
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"
    return "" if value is None else str(value)


def cell(value: Any, form: str) -> str:
    """A number in a format; "-" for None."""
    return "-" if value is None else form.format(value)
