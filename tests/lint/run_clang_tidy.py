"""Runs clang-tidy over the changed C++ files, within a time budget.

    run_clang_tidy.py BUILD_DIR [--all] [--jobs N] [--budget SECONDS]

A file counts as changed if it differs from the merge base with origin/main (or, when HEAD is that
base, from HEAD~1), or includes a header that does. A file that passed is not checked again until
it, a header of the repository that it includes, or .clang-tidy changes (BUILD_DIR/
clang-tidy-passed). --all checks all files and has no budget. Neither files that the budget left out
nor files that g++ compiles and clang cannot read (vector extensions, captured structured bindings)
fail the run; both are named.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from check_layers import REPOSITORY, TORCH_HEADER, SourceTree


def git(*arguments: str) -> str:
    """Returns the output of a git command in the repository, or "" if it fails."""
    command = ["git", *arguments]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""


def changed_files() -> set[str] | None:
    """The files that differ from the base, including untracked ones; None if there is no base."""
    head = git("rev-parse", "HEAD")
    base = git("merge-base", "HEAD", "origin/main")
    if not base or (base == head and not git("status", "--porcelain")):
        base = git("rev-parse", "HEAD~1")
    if not base:
        return None
    untracked = git("ls-files", "--others", "--exclude-standard")
    return set(git("diff", "--name-only", base).splitlines() + untracked.splitlines())


# A finding ends with the name of its check in brackets.
FINDING = re.compile(r"^\S+: (?:error|warning): (.*) \[([\w.,-]+)\]$", re.MULTILINE)


def is_only_unreadable(output: str) -> bool:
    """Whether every finding is an error of clang in code that g++ compiles."""
    found = FINDING.findall(output)
    return bool(found) and all(
        check.startswith("clang-diagnostic-error") and "file not found" not in message
        for message, check in found
    )


# The options of precompiled headers, which clang cannot read, and of g++'s own memory.
OF_GCC = re.compile(
    r" -(?:fpch-preprocess|Winvalid-pch|include \S+/cmake_pch\.hxx|-param=ggc-\S+)(?= )"
)


def commands_for_clang(build: Path) -> tuple[Path, set[Path]]:
    """Writes the build's compile commands without what only g++ knows.

    Returns the folder of the written commands, and the files that they compile.
    """
    commands = json.loads((build / "compile_commands.json").read_text())
    for command in commands:
        command["command"] = OF_GCC.sub("", command["command"])
    folder = build / "clang-tidy"
    folder.mkdir(exist_ok=True)
    (folder / "compile_commands.json").write_text(json.dumps(commands))
    return folder, {Path(command["file"]) for command in commands}


class Tidy:
    """clang-tidy with a record of the files that passed."""

    def __init__(self, build: Path, commands: Path, tree: SourceTree) -> None:
        self._commands = commands
        self._tree = tree
        self._memory = build / "clang-tidy-passed"
        self._memory.mkdir(exist_ok=True)

    def key(self, file: str) -> Path:
        """The record that `file` passed in its present state."""
        digest = hashlib.sha256()
        for name in [".clang-tidy", *sorted(self._tree.own_headers(file))]:
            digest.update(name.encode() + b"\0" + (REPOSITORY / name).read_bytes())
        return self._memory / digest.hexdigest()

    def run(self, file: str) -> str:
        """Checks one file; returns the findings, "" for none."""
        command = ["clang-tidy", "-p", str(self._commands), "--quiet"]
        # g++ has its own omp.h, which clang does not find.
        command += ["--extra-arg=-Wno-unknown-warning-option", "--extra-arg=-fno-openmp", file]
        result = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        if result.returncode == 0:
            self.key(file).touch()
            return ""
        return result.stdout.strip() or result.stderr.strip()


def main() -> int:
    """Prints the findings and the files left out; returns 1 if there is a finding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("build", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds")
    options = parser.parse_args()

    tree = SourceTree(REPOSITORY)
    build = options.build.resolve()
    commands, compiled = commands_for_clang(build)
    tidy = Tidy(build, commands, tree)
    files = [f for f in tree.includes if f.endswith(".cc") and REPOSITORY / f in compiled]
    changed = None if options.all else changed_files()
    if changed is not None:
        files = [f for f in files if changed.intersection(tree.own_headers(f))]
    pending = [f for f in files if not tidy.key(f).exists()]
    # Cheap files first: one with torch headers takes four times as long.
    pending.sort(key=lambda f: any(TORCH_HEADER.search(h) for h in tree.reached(f)))

    start = time.monotonic()
    findings: list[str] = []
    unreadable: list[str] = []
    left_out: list[str] = []

    def check(file: str) -> None:
        if not options.all and time.monotonic() - start > options.budget:
            left_out.append(file)
        elif found := tidy.run(file):
            if is_only_unreadable(found):
                unreadable.append(file)
            else:
                findings.append(found)
                print(found, flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(check, pending))
    known, run = len(files) - len(pending), len(pending) - len(left_out)
    print(
        f"clang-tidy: {len(files)} files in question, {known} known good, {run} run, "
        f"{len(findings)} with findings, {len(unreadable)} that clang cannot read, "
        f"{len(left_out)} left out by the budget"
    )
    for file in sorted(unreadable):
        print(f"  clang cannot read: {file}")
    for file in sorted(left_out):
        print(f"  left out: {file}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
