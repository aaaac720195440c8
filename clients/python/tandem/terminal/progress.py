"""Progress on a terminal as a line that changes, elsewhere as a line now and then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.live import Live
from rich.text import Text

from tandem.terminal.output import Output
from tandem.utils.progress import Progress, ProgressLines


@contextmanager
def progress_shown(output: Output, progress: Progress) -> Iterator[None]:
    """Shows what is done during the block; nothing of it stays on a terminal."""
    if output.notes.is_terminal:
        with Live(
            get_renderable=lambda: Text(progress.line(), overflow="ellipsis", no_wrap=True),
            console=output.notes,
            transient=True,
        ):
            yield
    else:
        with ProgressLines(progress, output.note):
            yield


@contextmanager
def work_shown(output: Output, name: str) -> Iterator[Progress]:
    """Shows the block as a phase `name`; what is done of it is told to the Progress."""
    progress = Progress()
    with progress_shown(output, progress), progress.phase(name):
        yield progress
