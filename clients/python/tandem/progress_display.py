"""Progress on a terminal as a line that changes, elsewhere as a line now and then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.live import Live
from rich.text import Text

from tandem.progress import Progress, ProgressLines
from tandem.render import Output


@contextmanager
def progress_shown(output: Output, progress: Progress) -> Iterator[None]:
    """Shows what is done during the block; nothing of it stays on a terminal."""
    if output.console.is_terminal and not output.as_json:
        with Live(
            get_renderable=lambda: Text(progress.line(), overflow="ellipsis", no_wrap=True),
            console=output.console,
            transient=True,
        ):
            yield
    else:
        with ProgressLines(progress, output.note):
            yield
