"""Progress in bytes: a line every 30 seconds in a log, a bar on a terminal."""

import io

from rich.console import Console

from tandem.byte_progress import ByteCount, ByteProgress
from tandem.render import Output


def test_a_log_gets_a_line_every_30_seconds(capsys):
    seconds = iter([0.0, 1.0, 29.0, 30.0, 31.0, 61.0])
    with ByteProgress(Output(), "importing", lambda: next(seconds)) as progress:
        count = ByteCount(5_000_000_000, progress.show)
        for _ in range(4):
            count.add(1_000_000_000)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["importing: 2.00 of 5.00 GB", "importing: 4.00 of 5.00 GB"]


def test_a_terminal_gets_a_bar():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with ByteProgress(Output(console=console), "exporting") as progress:
        progress.show(3_000_000, 4_000_000)
    assert "exporting" in console.file.getvalue()
    assert "3.0/4.0 MB" in console.file.getvalue()
