"""The number of CPUs that this process may use, also in a container."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def usable_cpus(cgroups: Path = _CGROUPS, mount: Path = _MOUNT) -> int:
    """Returns the number of CPUs that work can use, at least 1.

    That is the number of cores on which the process may run, and no more than its control groups
    (version 1 or 2) give it in CPU time, rounded up.
    """
    quotas = [quota for folder in _folders(cgroups, mount) if (quota := _quota(folder)) is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *(math.ceil(one) for one in quotas)]))


def _folders(cgroups: Path, mount: Path) -> list[Path]:
    """Returns the folders of the process's control groups for CPUs, and of those around them."""
    try:
        lines = cgroups.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if controllers == "":
            root = mount
        elif "cpu" in controllers.split(","):
            root = next(
                (one for one in (mount / controllers, mount / "cpu") if one.is_dir()), mount
            )
        else:
            continue
        # In a container the path may be the host's, which its mount does not show.
        folder = Path(os.path.normpath(path.lstrip("/") or "."))
        found += [root / one for one in (folder, *folder.parents)]
    return found


def _quota(folder: Path) -> float | None:
    """Returns the CPUs that a control group gives in time; None if it does not say."""
    try:
        if (file := folder / "cpu.max").is_file():
            quota, period = file.read_text(encoding="ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        return float(quota) / float(period) if float(quota) > 0 else None
    # "max" means no quota.
    except (OSError, ValueError, ZeroDivisionError):
        return None
