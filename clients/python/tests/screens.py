"""A terminal whose lines tests can read."""

from __future__ import annotations

import io
import re

from rich.console import Console

from tandem.terminal.output import Output

WIDTHS = (60, 80, 120, 200)


class Screen:
    """A terminal of a given width, without colours."""

    def __init__(self, width: int, *, terminal: bool = True) -> None:
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, width=width, force_terminal=terminal, color_system=None
        )
        self.output = Output(console=self.console)

    @property
    def lines(self) -> list[str]:
        """The lines on the terminal that are not empty."""
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.file.getvalue())
        return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]
