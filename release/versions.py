"""The version of the project: project(tandem VERSION …) in CMakeLists.txt, and copies of it.

versions.py check          prints the version; fails when a copy differs
versions.py set X.Y.Z      writes it everywhere
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCE = "CMakeLists.txt"
_NUMBER = r"(\d+\.\d+\.\d+)"
# Where the version stands: files below the repository, and the text before it in a line.
PLACES = (
    (SOURCE, r"^project\(tandem VERSION "),
    ("clients/python/tandem/__init__.py", r'^__version__ = "'),
    ("deploy/**/Chart.yaml", r"^(?:version|appVersion): "),
    ("deploy/**/*.yaml", r"\$\{TAG:-"),
    ("deploy/**/*.yaml", r"\bimage: tandem-[a-z-]+:"),
    ("deploy/**/*.yaml", r"\bapp\.kubernetes\.io/version: "),
    ("deploy/**/*.env", r"^TAG="),
    ("docs/*/*.md", r"^make release VERSION="),
    ("docs/*/*.md", r"\btandem-[a-z-]+:"),
    ("docs/*/*.md", r'"softwareVersion": "'),
    ("tests/images/*.py", r"""\bTAG["'], ["']"""),
)


class ReleaseError(Exception):
    """A fact that keeps a version from being released."""


@dataclass(frozen=True)
class Place:
    """A line of a file that holds the version."""

    file: str
    line: int
    version: str


def places(root: Path = REPOSITORY) -> Iterator[Place]:
    """Yields every place with a version."""
    for pattern, before in PLACES:
        for file in sorted(root.glob(pattern)):
            text = file.read_text()
            for found in re.finditer(before + _NUMBER, text, re.MULTILINE):
                line = text.count("\n", 0, found.start()) + 1
                yield Place(str(file.relative_to(root)), line, found[1])


def version(root: Path = REPOSITORY) -> str:
    """Returns the version.

    Raises:
        ReleaseError: a copy differs.
    """
    found = list(places(root))
    [source] = (place.version for place in found if place.file == SOURCE)
    others = [place for place in found if place.version != source]
    if others:
        listed = ", ".join(f"{one.file}:{one.line} ({one.version})" for one in others)
        raise ReleaseError(f"{SOURCE} has version {source}, others differ: {listed}")
    return source


def write(new: str, root: Path = REPOSITORY) -> None:
    """Writes a version in every place.

    Raises:
        ReleaseError: it is not X.Y.Z.
    """
    if not re.fullmatch(_NUMBER, new):
        raise ReleaseError(f"VERSION is {new!r}, must be X.Y.Z")
    for pattern, before in PLACES:
        for file in root.glob(pattern):
            text = file.read_text()
            changed = re.sub(f"({before}){_NUMBER}", rf"\g<1>{new}", text, flags=re.MULTILINE)
            if changed != text:
                file.write_text(changed)


def main() -> int:
    """Runs the command of the arguments."""
    try:
        match sys.argv[1:]:
            case ["check"]:
                print(version())
            case ["set", new]:
                write(new)
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except ReleaseError as error:
        print(f"versions: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
