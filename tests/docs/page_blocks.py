"""The code blocks of the pages, and the marker above each that says how the block is tested.

A marker is an HTML comment, the last thing before its block:

    <!-- run -->                       test_page_commands.py runs the block on real servers
    <!-- tested by FILE -->            another test does what the block shows, or reads it
    <!-- part of a run file -->        the keys of YAML are settings of a run (or: a cluster file)
    <!-- not run: REASON -->           nothing runs the block

A page whose blocks are all alike says so once, near its top: <!-- all blocks: tested by FILE -->.
Blocks of text (```text, ```mermaid, without a language) have none.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = ("", "text", "mermaid")
SHELL = ("sh", "bash", "console", "shell")
_MARKER = re.compile(r"<!-- (?P<kind>run|tested by|part of|not run:)(?: (?P<what>[^>]+?))? -->\s*")
_ALL = "<!-- all blocks: "


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `line` is that of its fence."""

    page: str
    line: int
    language: str
    text: str
    marker: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def kind(self) -> str:
        """The kind of the marker; "" if there is none, or it is none of the known ones."""
        found = _MARKER.fullmatch(self.marker)
        return found["kind"].rstrip(":") if found else ""

    @property
    def what(self) -> str:
        """The marker's file or reason."""
        found = _MARKER.fullmatch(self.marker)
        return (found and found["what"]) or ""


def pages() -> list[str]:
    """Returns the paths of all pages of the repository."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return sorted(name for name in listed.stdout.splitlines() if (REPOSITORY / name).is_file())


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """Yields the fenced blocks of a page's text, each with its marker."""
    of_all = marker = ""
    for token in MarkdownIt().parse(text):
        if token.type == "fence" and token.map:
            language = token.info.split()[0] if token.info.strip() else ""
            yield Block(page, token.map[0] + 1, language, token.content, marker or of_all)
        marker = token.content.strip() if token.type == "html_block" else ""
        if marker.startswith(_ALL):
            of_all = marker.replace(_ALL, "<!-- ")
            marker = ""


def blocks() -> list[Block]:
    """Returns the blocks of all pages."""
    return [block for page in pages() for block in blocks_of(page, (REPOSITORY / page).read_text())]
