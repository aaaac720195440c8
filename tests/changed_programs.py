"""Prints the C++ test programs that belong to files, one a line.

    changed_programs.py FILE…

A program belongs to a source or header if it compiles it, or compiles its test (foo_test.cc for
foo.h and foo.cc). Where no program does, those that compile a test of the same folder do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

REPOSITORY = Path(__file__).resolve().parents[1]
# The programs that a build without CUDA lacks.
_OF_CUDA = re.compile(r"if\(TANDEM_CUDA\).*?endif\(\)", re.DOTALL)
_ROOT = "${CMAKE_SOURCE_DIR}/"
_TEST = re.compile(r"\btandem_test\(\s*(\w+)\s+SRCS\b(.*?)(?:\bDEPS\b|\))", re.DOTALL)


def programs(repository: Path = REPOSITORY) -> dict[str, set[str]]:
    """Returns the source files of every test program, relative to the repository."""
    found = {}
    for folder in ("common", "services", "tests"):
        for lists in (repository / folder).rglob("CMakeLists.txt"):
            beside = lists.parent.relative_to(repository)
            for name, sources in _TEST.findall(_OF_CUDA.sub("", lists.read_text())):
                found[name] = {
                    one.removeprefix(_ROOT) if one.startswith(_ROOT) else (beside / one).as_posix()
                    for one in sources.split()
                }
    return found


def belonging_to(file: str, known: dict[str, set[str]]) -> set[str]:
    """Returns the programs that belong to a file."""
    path = PurePosixPath(file)
    if path.suffix not in (".h", ".cc", ".cu", ".cuh"):
        return set()
    own = {file, str(path.with_name(f"{path.stem}_test.cc"))}
    found = {name for name, sources in known.items() if own & sources}
    return found or {
        name
        for name, sources in known.items()
        if any(PurePosixPath(one).parent == path.parent for one in sources)
    }


def main(files: Iterable[str]) -> None:
    """Prints the programs of all files."""
    known = programs()
    for name in sorted(set().union(*(belonging_to(file, known) for file in files))):
        print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
