"""The highest rates of this device: ceilings.py DEVICE ROWS.jsonl

Rows: `copy` in bytes/s, read and written; `bfloat16` and `float32` products in operations/s.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from rows import Rows


def seconds(device: str, work: Callable[[], object], times: int) -> float:
    """Returns the seconds of a call, the least of three rounds of `times` calls."""
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    rounds = []
    for _ in range(4):
        sync()
        begin = time.perf_counter()
        for _ in range(times):
            work()
        sync()
        rounds.append((time.perf_counter() - begin) / times)
    return min(rounds[1:])


def main() -> None:
    """Measures copies and products."""
    device, path = sys.argv[1:]
    rows = Rows(path)
    count, side, times = (1 << 30, 8192, 10) if device == "cuda" else (1 << 22, 256, 2)
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took = seconds(device, lambda to=target, from_=source: to.copy_(from_), times)
    rows.add(name="copy", rate=2 * count / took)
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(side, side, device=device, dtype=dtype)
        took = seconds(device, lambda a=a: a @ a, times)
        rows.add(name=str(dtype).removeprefix("torch."), rate=2 * side**3 / took)


if __name__ == "__main__":
    main()
