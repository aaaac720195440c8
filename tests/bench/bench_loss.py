"""A loss of the output layer beside plain torch and cut-cross-entropy, forward and backward.

    .venv-peers/bin/python tests/bench/bench_loss.py [--shape 2048,576,49152] [--dtype float32]
    .venv-peers/bin/python tests/bench/bench_loss.py --loss reverse_kl --shape 1024,576,49152

The sides compute N rows of hidden size H and vocabulary V on the same cores in turn; then each side
tells, in a process of its own, the memory that it takes beyond its inputs and gradients. "peak" is
the machine's limit: square matrix products with as many operations as the products of the loss.
"half" leaves out half of the rows, as if the junior had written them. A divergence is from a junior
as large as the senior.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from alternate import alternate
from status_bytes import status_bytes

DIVERGENCES = ("reverse_kl", "forward_kl")
PEERS = {
    "cross_entropy": ("torch", "cut-cross-entropy"),
    **dict.fromkeys(DIVERGENCES, ("torch",)),
}
OURS = {
    "cross_entropy": {
        "cce": {},
        "torch_compile": {"impl": "torch_compile"},
        "pytorch": {"impl": "pytorch"},
        "cce, recompute": {"mode": "recompute"},
        "cce, half": {"weightless": "0.5"},
    },
    **{name: {"own kernels": {}, "aten": {"kernels": "aten"}} for name in DIVERGENCES},
}


class LossProcess:
    """tandem-loss-bench with its own inputs."""

    def __init__(self, shape: tuple[int, int, int], dtype: str, flags: Mapping[str, str]) -> None:
        build = Path(os.environ.get("TANDEM_BUILD_DIR", "build/release"))
        names = ("rows", "hidden", "vocabulary")
        all_flags = {**dict(zip(names, map(str, shape), strict=True)), "dtype": dtype, **flags}
        self.process = subprocess.Popen(
            [
                build / "bin" / "tandem-loss-bench",
                *(f"--{name.replace('_', '-')}={value}" for name, value in all_flags.items()),
                f"--threads={torch.get_num_threads()}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def ask(self, command: str) -> float:
        """Sends a command, and returns the answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def peer_work(peer: str, shape: tuple[int, int, int], dtype: str, name: str) -> Callable[[], None]:
    """A function that runs forward and backward of a peer and adds to gradients, as tandem does."""
    rows, width, vocabulary = shape
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    hidden = torch.randn(rows, width).to(kind).requires_grad_()
    weight = (torch.randn(vocabulary, width) * 0.02).to(kind).requires_grad_()
    labels = torch.randint(vocabulary, (rows,))
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    if name in DIVERGENCES:
        junior_hidden = torch.randn(rows, width).to(kind)
        junior_weight = (torch.randn(vocabulary, width) * 0.02).to(kind)

        def log_probs(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(h, w).float().log_softmax(-1)

        def loss() -> torch.Tensor:
            logp, logq = log_probs(hidden, weight), log_probs(junior_hidden, junior_weight)
            pair = (logq, logp) if name == "reverse_kl" else (logp, logq)  # kl_div(b, a): KL(a||b)
            return torch.nn.functional.kl_div(*pair, reduction="batchmean", log_target=True)
    elif peer == "torch":

        def loss() -> torch.Tensor:
            logits = torch.nn.functional.linear(hidden, weight)
            return torch.nn.functional.cross_entropy(logits.float(), labels)
    else:
        from cut_cross_entropy import linear_cross_entropy

        def loss() -> torch.Tensor:
            return linear_cross_entropy(hidden, weight, labels, impl="torch_compile")

    return lambda: loss().backward()


def extra_bytes_of_peer(peer: str, shape: tuple[int, int, int], dtype: str, name: str) -> int:
    """Peak of this process's resident memory during the peer's work, beyond that before it."""
    work = peer_work(peer, shape, dtype, name)
    if peer != "torch":
        # Compiles beforehand: that takes memory of its own.
        peer_work(peer, (64, shape[1], 512), dtype, name)()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # restarts VmHWM
    work()
    return status_bytes("VmHWM") - before


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loss", choices=tuple(OURS), default="cross_entropy")
    parser.add_argument("--shape", default="2048,576,49152", help="N,H,V")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--logits-chunk-bytes", type=int, default=0, help="0: as the trainer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--extra-bytes-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows, width, vocabulary = map(int, options.shape.split(","))
    shape = (rows, width, vocabulary)
    if options.extra_bytes_of is not None:
        print(extra_bytes_of_peer(options.extra_bytes_of, shape, options.dtype, options.loss))
        return

    print(f"{options.loss}: N, H, V = {rows}, {width}, {vocabulary:,}, {options.dtype}")
    chunk_bytes = options.logits_chunk_bytes or max(48 << 20, 256 * 4 * vocabulary)
    all_flags = {"loss": options.loss, "logits_chunk_bytes": str(chunk_bytes)}
    processes = {
        name: LossProcess(shape, options.dtype, all_flags | flags)
        for name, flags in OURS[options.loss].items()
    }
    memory = {name: process.ask("extra_bytes") for name, process in processes.items()}
    command = [sys.executable, __file__, f"--shape={options.shape}", f"--dtype={options.dtype}"]
    for peer in PEERS[options.loss]:
        flags = [f"--loss={options.loss}", f"--extra-bytes-of={peer}"]
        memory[peer] = int(subprocess.check_output([*command, *flags]))

    def ours(process: LossProcess, command: str) -> Callable[[], int]:
        def work() -> int:
            process.ask(command)
            return rows

        return work

    def peers(peer: str) -> Callable[[], int]:
        step = peer_work(peer, shape, options.dtype, options.loss)

        def work() -> int:
            step()
            return rows

        return work

    alternate(
        {
            **{peer: peers(peer) for peer in PEERS[options.loss]},
            **{name: ours(process, "loss") for name, process in processes.items()},
            "peak": ours(next(iter(processes.values())), "peak"),
        },
        peer="torch",
        rounds=options.rounds,
        unit="rows",
        pids=[process.process.pid for process in processes.values()],
    )
    for name, taken in memory.items():
        ratio = taken / memory["torch"]
        print(f"  {name:24} {taken / 2**20:8.0f} MiB extra  {ratio:5.3f} x torch")
    for process in processes.values():
        process.close()


if __name__ == "__main__":
    main()
