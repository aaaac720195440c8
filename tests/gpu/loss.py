"""The fused output loss beside torch's cross entropy: loss.py BENCH DEVICE ROWS.jsonl [--help]"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
from rows import Rows


def main() -> None:
    """Measures the implementations of the loss, the machine's peak, and torch."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("program", "device", "rows"):
        parser.add_argument(name)
    parser.add_argument("--shape", default="8192x896x151936", help="rows, hidden, vocabulary")
    args = parser.parse_args()
    rows = Rows(args.rows)
    n, hidden, vocabulary = map(int, args.shape.split("x"))
    for dtype in ("bfloat16", "float32"):
        for implementation in ("auto", "torch_compile", "cce", "pytorch"):
            command = [
                args.program,
                *("--device", args.device, "--impl", implementation, "--dtype", dtype),
                *("--rows", str(n), "--hidden", str(hidden), "--vocabulary", str(vocabulary)),
                *("--logits-chunk-bytes", str(512 << 20)),
            ]
            done = subprocess.run(
                command,
                input="loss\nloss\nloss\npeak\npeak\nextra_bytes\n",
                capture_output=True,
                text=True,
            )
            try:
                *times, extra = (float(line.split()[-1]) for line in done.stdout.splitlines()[-6:])
                rows.add(
                    side=implementation,
                    dtype=dtype,
                    ms=round(1000 * min(times[1:3]), 2),
                    peak_ms=round(1000 * times[4], 2),
                    extra_mb=round(extra / 1e6),
                )
            except (ValueError, IndexError):
                rows.add(side=implementation, dtype=dtype, error=(done.stdout + done.stderr)[-400:])
    for dtype in (torch.bfloat16, torch.float32):
        try:
            took, extra = torch_loss(args.device, n, hidden, vocabulary, dtype)
            rows.add(
                side="torch",
                dtype=str(dtype).removeprefix("torch."),
                ms=round(1000 * took, 2),
                **extra,
            )
        except torch.OutOfMemoryError as error:
            rows.add(side="torch", dtype=str(dtype), error=str(error)[:200])
    sys.exit(rows.errors > 0)


def torch_loss(
    device: str, n: int, hidden: int, vocabulary: int, dtype: torch.dtype
) -> tuple[float, dict[str, int]]:
    """Returns the seconds of a forward and a backward pass with all logits, and on a GPU the most
    memory that one takes beside its inputs and their gradients."""
    x = torch.randn(n, hidden, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden, device=device, dtype=dtype) * 0.02).requires_grad_()
    labels = torch.randint(vocabulary, (n,), device=device)
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        torch.nn.functional.cross_entropy((x @ weight.T).float(), labels).backward()
        weight.grad[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - begin)
    if device != "cuda":
        return min(times[1:]), {}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.nn.functional.cross_entropy((x @ weight.T).float(), labels).backward()
    return min(times[1:]), {"extra_mb": round((torch.cuda.max_memory_allocated() - before) / 1e6)}


if __name__ == "__main__":
    main()
