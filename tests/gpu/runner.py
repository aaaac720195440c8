"""Runs programs with time limits, ends what they leave behind, and writes their results."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tarfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MARK = "TANDEM_GPU_PART"
GRACE_SECONDS = 6.0
MAX_LOG_BYTES = 1 << 20


def last_line(log: str) -> str:
    """Returns the last line of a log that says something."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def last_row(log: str) -> str:
    """Returns the last line of JSON of a log, or its last line."""
    rows = [line for line in log.splitlines() if line.startswith("{")]
    return rows[-1] if rows else last_line(log)


def pytest_summary(log: str) -> str:
    """Returns the line in which pytest counts tests."""
    found = re.findall(r"^=*\s*(\d+ (?:passed|failed|skipped|error).*? in [\d.]+s)", log, re.M)
    return found[-1] if found else last_line(log)


def gtest_summary(log: str) -> str:
    """Returns the lines in which GoogleTest counts tests."""
    lines = re.findall(r"^\[\s+(PASSED|SKIPPED|FAILED)\s+\] (\d+) tests?", log, re.M)
    return ", ".join(f"{count} {what.lower()}" for what, count in lines) or last_line(log)


@dataclass(frozen=True)
class Part:
    """A program that is run for at most `limit` seconds."""

    name: str
    limit: float
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    finding: Callable[[str], str] = last_line  # what the table shows of its log
    needs_device: bool = True  # left out where the CPU stands for the device


@dataclass(frozen=True)
class Result:
    """What came of a part."""

    name: str
    outcome: str
    seconds: float
    finding: str

    @property
    def good(self) -> bool:
        """Whether the part did what it should."""
        return self.outcome in ("passed", "left out")


def processes_with(mark: str) -> list[int]:
    """Returns the processes that inherited the mark, wherever they hang in the tree."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def end_processes(mark: str, grace: float = GRACE_SECONDS) -> int:
    """Ends the processes with a mark, by their ids, and returns how many there were."""
    there = processes_with(mark)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes_with(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        until = time.monotonic() + grace
        while processes_with(mark) and time.monotonic() < until:
            time.sleep(0.05)
    return len(there)


class _Running:
    """A part whose program runs."""

    def __init__(self, part: Part, log: Path, limit: float) -> None:
        self.part, self.log, self.limit = part, log, limit
        self.mark = uuid.uuid4().hex
        self.begin = time.monotonic()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                part.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | part.environment | {MARK: self.mark},
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def result(self) -> Result | None:
        """Returns the result of a part that has ended or overruns; then none of it runs on."""
        code = self.process.poll()
        if code is None and self.seconds < self.limit:
            return None
        if code is None:
            outcome = f"STOPPED after {self.limit:.0f} s"
            self.process.send_signal(signal.SIGINT)  # pytest then counts what it has run
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_SECONDS)
        else:
            outcome = "passed" if code == 0 else f"FAILED (exit code {code})"
        seconds = self.seconds
        left = end_processes(self.mark)
        self.process.wait()
        finding = self.part.finding(self.log.read_text(errors="replace"))
        if code is not None and left:
            finding += f" ({left} processes were left and ended)"
        return Result(self.part.name, outcome, seconds, finding)


class Runner:
    """Runs parts until a deadline and keeps `out` current: table.md and results.tar.gz.

    `folder` takes the logs and what the parts write. `tables` returns more text for table.md.
    """

    def __init__(
        self, folder: Path, out: Path, limit: float, tables: Callable[[Path], str] = lambda _: ""
    ) -> None:
        self.folder, self.out, self.tables = folder, out, tables
        self.end = time.monotonic() + limit
        self.results: list[Result] = []
        folder.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)

    def note(self, result: Result) -> None:
        """Adds a result, prints it, and packs the results again."""
        self.results.append(result)
        print(f"{result.outcome:24} {result.seconds:6.1f} s  {result.name}: {result.finding[:160]}")
        self.write()

    def run(self, parts: Sequence[Part]) -> None:
        """Runs parts side by side, each until its limit or the runner's."""
        running = []
        for part in parts:
            left = self.end - time.monotonic()
            if left <= 0:
                self.note(Result(part.name, "NOT RUN", 0, "no time was left"))
                continue
            try:
                running.append(
                    _Running(part, self.folder / f"{part.name}.log", min(part.limit, left))
                )
            except OSError as error:
                self.note(Result(part.name, "FAILED to start", 0, str(error)))
        while running:
            for one in list(running):
                if (result := one.result()) is not None:
                    running.remove(one)
                    self.note(result)
            time.sleep(0.05)

    def write(self) -> None:
        """Writes the table and the archive."""
        rows = [
            f"| {r.name} | {r.outcome} | {r.seconds:.0f} | {r.finding[:200].replace('|', '/')} |"
            for r in self.results
        ]
        text = "| part | outcome | seconds | what it said |\n| -- | -- | -- | -- |\n"
        text += "\n".join(rows) + "\n"
        try:
            text += self.tables(self.folder)
        except Exception as error:  # a row that nobody expected must not cost the table
            text += f"\nno table of rates: {error!r}\n"
        _replace(self.out / "table.md", text.encode())
        (self.folder / "table.md").write_text(text)
        ended = {f"{result.name}.log" for result in self.results}
        archive = self.out / "results.tar.gz.tmp"
        with tarfile.open(archive, "w:gz") as tar:
            for path in sorted(self.folder.iterdir()):
                if path.is_file():
                    if path.name in ended:
                        _shorten(path)
                    tar.add(path, path.name)
        archive.replace(self.out / "results.tar.gz")


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def _shorten(path: Path) -> None:
    """Cuts the middle out of a long log."""
    if path.stat().st_size <= 2 * MAX_LOG_BYTES:
        return
    content = path.read_bytes()
    half = MAX_LOG_BYTES // 2
    path.write_bytes(content[:half] + b"\n[...]\n" + content[-half:])
