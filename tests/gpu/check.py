"""Checks packed servers on this machine's device, part by part (docs/operations/cuda.md).

    check.py [PART…]    without names: every part, in the order of `stages` (parts.py)

The environment has OUT (where results go), PACK, DEV (cuda, or cpu for a machine without a device)
and LIMIT (seconds for everything). Exit code: 0 if every part passed.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from parts import HERE, Machine, stages
from runner import Part, Result, Runner
from tables import tables

REPOSITORY = HERE.parents[1]
SECONDS = 465.0  # less than the 8 minutes for which the machine is there


def chosen(stage: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """Returns the parts that are named, by their whole name or its first word."""
    return [p for p in stage if not names or p.name in names or p.name.split()[0] in names]


def main(names: Sequence[str], variables: Mapping[str, str]) -> int:
    """Runs the parts; returns the exit code."""
    begin = time.monotonic()
    device = variables.get("DEV", "cuda")
    out = Path(variables.get("OUT", REPOSITORY / "build/gpu-check"))
    pack = Path(variables.get("PACK", REPOSITORY / ".gpu/pack.tar.xz"))
    folder = Path(tempfile.mkdtemp(prefix="tandem-gpu-"))
    machine = Machine(folder, device)
    limit = float(variables.get("LIMIT", SECONDS))
    runner = Runner(machine.logs, out, limit, tables)
    try:
        said = machine.unpack(pack)
        os.environ.update(machine.environment())
        runner.note(Result("unpack", "passed", time.monotonic() - begin, said))
        plan = stages(machine)
        known = {name for stage in plan for p in stage for name in (p.name, p.name.split()[0])}
        if unknown := set(names) - known:
            runner.note(Result("parts", "FAILED", 0, f"no part is called {sorted(unknown)}"))
        for stage in plan:
            parts = chosen(stage, names)
            for part in parts:
                if device == "cpu" and part.needs_device and not names:
                    runner.note(Result(part.name, "left out", 0, "needs a device"))
            runner.run([p for p in parts if names or device != "cpu" or not p.needs_device])
    except Exception as error:  # the table says so
        reason = f"{type(error).__name__}: {error}"
        runner.note(Result("check", "FAILED", time.monotonic() - begin, reason[:300]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print((out / "table.md").read_text())
    return 0 if all(result.good for result in runner.results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
