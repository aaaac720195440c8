"""The memory of a local cluster's servers together: each server plans only its own."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import ConfigError
from tandem.settings.cluster import ClusterSettings

_log = logging.getLogger(__name__)


# Bytes of a process beside its plan: the program and its libraries.
PROGRAM_BYTES = 300_000_000

_LINE = re.compile(r"(?m)^# +([0-9.]+) GB  (.*)$")


@dataclass(frozen=True)
class PlannedMemory:
    """The memory that a server plans, from the comments of its --check-config.

    Attributes:
        field: the key of the server's section in the cluster, for example "rollout.0".
        items: bytes of the host's memory of one rank, by item.
        available: bytes that this machine has for all ranks of the server; None if not known.
        ranks: number of the server's processes.
        sizes_cache: whether the server makes its key-value cache as large as the memory allows.
    """

    field: str
    items: Mapping[str, float]
    available: float | None
    ranks: int = 1
    sizes_cache: bool = False

    @classmethod
    def parse(
        cls, field: str, printed: str, ranks: int = 1, *, sizes_cache: bool = False
    ) -> PlannedMemory:
        """Reads what --check-config printed; without a plan there are no items."""
        items: dict[str, float] = {}
        available = None
        for size, name in _LINE.findall(printed):
            value = float(size) * 1e9
            if name.startswith("available"):
                available = value * ranks
            elif name != "in all" and "(on the device)" not in name:
                items[name.partition(":")[0]] = value
        return cls(field, items, available, ranks, sizes_cache)

    @property
    def total(self) -> float:
        """Bytes of all ranks, with their programs."""
        return self.ranks * (sum(self.items.values()) + PROGRAM_BYTES)

    @property
    def cache(self) -> float:
        """Bytes of the key-value caches of all ranks."""
        return self.ranks * sum(
            size for name, size in self.items.items() if name.endswith("kv_cache")
        )

    def __str__(self) -> str:
        """Returns the total and the largest items, in words."""
        largest = sorted(self.items.items(), key=lambda item: -item[1])[:3]
        items = ", ".join(f"{name} {_gigabytes(size * self.ranks)}" for name, size in largest)
        return f"{self.field} {_gigabytes(self.total)} ({items})"


def fitted(cluster: ClusterSettings, plans: Sequence[PlannedMemory]) -> ClusterSettings:
    """Returns the cluster with caches that let all of its servers fit into this machine's memory.

    Rollout servers whose section has no kv_cache_bytes share the memory that all else leaves, each
    by what it would take alone.

    Raises ConfigError where that is nothing.
    """
    known = [plan.available for plan in plans if plan.available is not None]
    if not known:
        return cluster
    available, needed = min(known), sum(plan.total for plan in plans)
    if needed <= available:
        return cluster
    elastic = [plan for plan in plans if plan.sizes_cache and plan.cache]
    wanted = sum(plan.cache for plan in elastic)
    left = available - (needed - wanted)
    if left <= 0:
        raise too_large(plans, available)
    rollout: list[dict[str, Any]] = list(cluster.rollout)
    for plan in elastic:
        size = int(plan.cache * left / wanted)
        index = int(plan.field.partition(".")[2] or 0)
        rollout[index] = rollout[index] | {"kv_cache_bytes": size}
        _log.info(
            f"cluster.{plan.field}: the key-value cache takes {_gigabytes(size)} of the "
            f"{_gigabytes(available)} that the servers share (kv_cache_bytes sets it)"
        )
    return cluster.model_copy(update={"rollout": rollout})


def too_large(plans: Sequence[PlannedMemory], available: float) -> ConfigError:
    """Returns the error for servers that this machine cannot hold together."""
    needed = sum(plan.total for plan in plans)
    return ConfigError(
        f"cluster: the servers need {_gigabytes(needed)} of memory together, but "
        f"{_gigabytes(available)} are available: {'; '.join(map(str, plans))}",
        hint="each server's `--check-config` lists all items; a shorter max_model_len, fewer "
        "max_num_seqs, a smaller batch.micro_batch_tokens, strategy.recompute_granularity: full or "
        "bfloat16 models take less",
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
