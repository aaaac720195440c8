"""Output for people: notes, results, tables, and responses coloured by author."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tandem._proto.rollout.v1 import rollout_pb2
from tandem.models.tokenizer import GrowingText, TextCodec
from tandem.rpc.generate_events import SampleFinished, TokensCame, read_event
from tandem.run_directory.log import FILE_ONLY, handled_by, shown
from tandem.utils.authors import ENVIRONMENT, JUNIOR, SENIOR

_log = logging.getLogger(__name__)


# The style of an author's text and the marks around it, by the number in authorship masks.
AUTHOR_STYLES = {SENIOR: "bold cyan", JUNIOR: "underline yellow", ENVIRONMENT: "green"}
_MARKS = {SENIOR: ("", ""), JUNIOR: ("[", "]"), ENVIRONMENT: ("«", "»")}
LEGEND = "senior, [junior]"
ENVIRONMENT_LEGEND = "«environment»"
# Added to an author's style.
DRAFT_STYLE = "reverse"
DRAFT_LEGEND = "‹accepted draft›"


def use_any_encoding() -> None:
    """Makes output show a character's escape where the terminal's encoding lacks the character."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def lasting_output() -> Iterator[None]:
    """Lets stdout and stderr fail while the body runs: that costs their text, and nothing else.

    A file on a full disk fails, for example, or a pipe whose reader has gone. The log is told once.
    """
    before = sys.stdout, sys.stderr
    lasting = [_LastingStream(stream) for stream in before]
    sys.stdout, sys.stderr = lasting  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in lasting:
            stream.end()


class _LastingStream:
    """A text stream whose failures are logged once and then passed over."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, if the stream takes it."""
        with self._passing_over():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered, if the stream takes it."""
        with self._passing_over():
            self._stream.flush()

    def end(self) -> None:
        """Throws away what a failing stream did not take: the exit of Python would fail on it."""
        self.flush()
        if self._failed:
            try:
                self._stream.flush()
            except OSError:
                with suppress(OSError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, self._stream.fileno())
                    os.close(nowhere)

    @contextmanager
    def _passing_over(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                self._failed = True
                name = getattr(self._stream, "name", "the output")
                _log.warning(
                    f"{name} cannot be written ({error.strerror}): the run continues",
                    extra=FILE_ONLY,
                )


class _Notes(logging.Handler):
    """Prints log messages as the notes of an output."""

    def __init__(self, output: Output, prefix: str) -> None:
        super().__init__()
        self._output = output
        self._prefix = prefix

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a message, unless it is only for the run's log file."""
        text = shown(record)
        if text is not None:
            self._output.note(self._prefix + text)


class Output:
    """The output of a command: rich on a terminal, plain lines elsewhere, JSON with `--json`."""

    def __init__(self, *, as_json: bool = False, console: Console | None = None) -> None:
        self.as_json = as_json
        # Text is printed as it is: rich would colour numbers and turn ":key:" into a picture.
        plain: dict[str, Any] = {"highlight": False, "emoji": False}
        self.console = console or Console(**plain)
        self.errors = Console(stderr=True, **plain)
        self.notes = self.errors if as_json else self.console

    def note(self, message: str) -> None:
        """Prints a line about progress; with --json on the error stream."""
        _print_text(self.notes, message)

    @contextmanager
    def shows_log(self, prefix: str = "") -> Iterator[None]:
        """Prints what the package logs while the body runs, as notes that begin with `prefix`."""
        with handled_by(_Notes(self, prefix)):
            yield

    def error(self, message: str) -> None:
        """Prints a line about a failure on the error stream."""
        _print_text(self.errors, message)

    def result(self, value: Mapping[str, Any] | Sequence[Any], text: Any = None) -> None:
        """Prints the result of a command: `value` as JSON, or `text` for people."""
        if self.as_json:
            print(json.dumps(value), flush=True)
        elif isinstance(text, str):
            _print_text(self.console, text)
        elif text is not None:
            self.console.print(text)

    def rows(self, rows: Sequence[Mapping[str, Any]], counts: Collection[str] = ()) -> Any:
        """Returns rows as "key=value …" lines; on a terminal as a table or, if too wide, as a list.

        `counts` names the columns whose numbers get thousands separators.
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
        """Returns cells as a table with numbers at the right; tab-separated without a terminal."""
        if not self.console.is_terminal:
            return tab_separated(title, columns, rows)
        table = Table(title=Text(title))
        for column in columns:
            table.add_column(column, justify="right" if column else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        return table

    def json_line(self, value: Mapping[str, Any]) -> None:
        """Prints one event of a longer command with --json; without it nothing."""
        if self.as_json:
            print(json.dumps(value), flush=True)


def recording_console() -> Console:
    """Returns a console that shows nothing, and records what a terminal of 100 columns would."""
    return Console(
        record=True,
        width=100,
        force_terminal=True,
        color_system="truecolor",
        file=io.StringIO(),
        highlight=False,
        emoji=False,
    )


def picture(console: Console, title: str) -> str:
    """Returns what a recording_console() recorded as an SVG, which loads nothing from a network."""
    return re.sub(r"@font-face \{[^}]*\}\s*", "", console.export_svg(title=title))


class AuthoredText:
    """A text that grows by author: senior bold cyan, junior yellow, underlined and in brackets.

    What an environment said is green and between « and ». Accepted drafts are reversed and between
    ‹ and ›, inside of the brackets.
    """

    def __init__(self, keep: str = "\n") -> None:
        """Begins an empty text; control characters other than `keep` are shown by their escapes."""
        self._text = Text()
        self._author = SENIOR
        self._draft = 0
        self._keep = keep

    def append(self, author: int, text: str, note: str = "", draft: int = 0) -> None:
        """Appends the text of a token by an author of authorship masks, and a note about it.

        `draft`: 1 for an accepted draft.
        """
        # A token that completes no character has no text.
        if not text:
            return
        self._mark(author, draft)
        style = AUTHOR_STYLES[author]
        if draft:
            style += f" {DRAFT_STYLE}"
        self._text.append(visible(text, self._keep), style=style)
        self._text.append(note, style="dim")

    def end(self) -> None:
        """Closes the marks of a text that ends with another author than the senior, or a draft."""
        self._mark(SENIOR, 0)

    def _mark(self, author: int, draft: int) -> None:
        """Ends and begins the marks before a token."""
        other = author != self._author
        marks = "›" if self._draft and (other or not draft) else ""
        if other:
            marks += _MARKS[self._author][1] + _MARKS[author][0]
        if draft and (other or not self._draft):
            marks += "‹"
        self._text.append(marks, style="dim")
        self._author, self._draft = author, draft

    def take(self) -> Text:
        """Returns the text that was appended since the last call."""
        taken, self._text = self._text, Text()
        return taken


def authored_text(
    texts: Sequence[str],
    mask: Sequence[int],
    notes: Iterable[str] = itertools.repeat(""),
    keep: str = "\n",
    drafts: Iterable[int] = itertools.repeat(0),
) -> Text:
    """Returns a whole response as AuthoredText makes it.

    `notes` and `drafts` have a note, and whether it is an accepted draft, for every token.
    """
    text = AuthoredText(keep)
    for author, token, note, draft in zip(mask, texts, notes, drafts, strict=False):
        text.append(author, token, note, draft)
    text.end()
    return text.take()


def tab_separated(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns cells as tab-separated lines below a title."""
    lines = ("\t".join(map(str, cells)) for cells in (columns, *rows))
    return "\n".join([title, *lines])


class ResponsePrinter:
    """Prints responses in a given order, by author, each while it is written.

    Responses that come early wait for their turn. Each stands below its head.
    """

    def __init__(
        self, console: Console, codec: TextCodec, heads: Mapping[tuple[str, int], str]
    ) -> None:
        """`heads`: (request_id, sample_index) → the line above the response, in printing order."""
        self._console = console
        self._heads = heads
        self._waiting = list(heads)
        self._responses = {key: _Response(codec.growing()) for key in heads}
        self._head()

    def on_event(self, event: rollout_pb2.GenerateResponse) -> None:
        """Takes an event of Generate."""
        told = read_event(event)
        if isinstance(told, TokensCame):
            response = self._responses[told.request_id, told.sample_index]
            response.add(told.token_ids, told.authorship_mask, told.offset)
        elif isinstance(told, SampleFinished):
            trajectory = told.trajectory
            response = self._responses[told.request_id, told.sample_index]
            response.add(
                trajectory.response_token_ids,
                trajectory.authorship_mask,
                trajectory.response_offset,
            )
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
        if self._waiting:
            head = visible(self._heads[self._waiting[0]], "\n")
            _print_text(self._console, f"--- {head} ---")


class _Response:
    """A response that grows, with the text of it that was not printed yet."""

    def __init__(self, growing: GrowingText) -> None:
        self.ended = False
        self._growing = growing
        # Position behind the last token; None before the first, which may continue a response.
        self._end: int | None = None
        self._author = SENIOR
        self._text = AuthoredText()

    def add(self, ids: Sequence[int], mask: Sequence[int], offset: int) -> None:
        """Takes tokens from position `offset` on; tokens that are known already change nothing."""
        known = 0 if self._end is None else self._end - offset
        for token, author in zip(ids[known:], mask[known:], strict=True):
            self._text.append(author, self._growing.add(token))
            self._author = author
        self._end = max(self._end or 0, offset + len(ids))

    def end(self) -> None:
        """Ends the response: no more tokens come."""
        self._text.append(self._author, self._growing.rest())
        self._text.end()
        self.ended = True

    def take(self) -> Text:
        """Returns the text that was added since the last call."""
        return self._text.take()


def _listed(row: Mapping[str, str], *, last: bool) -> Any:
    """Returns a row as one "key  value" line per column."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for key, value in row.items():
        grid.add_row(Text(key, style="bold"), Text(value))
    return grid if last else Group(grid, "")


def _print_text(console: Console, text: str) -> None:
    """Prints a text as it is; on a terminal it is wrapped between words.

    Words are never broken, so that an address or a path can be copied whole.
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
        # rich would turn tabs into spaces.
        print(text, file=console.file, flush=True)


def visible(text: str, keep: str = "") -> str:
    """Returns a text with its control characters, other than `keep`, shown by their escapes."""
    # A model may write control characters, which a terminal must not obey.
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"
    return "" if value is None else str(value)


def cell(value: Any, form: str) -> str:
    """Returns a number in a format; "-" for None."""
    return "-" if value is None else form.format(value)
