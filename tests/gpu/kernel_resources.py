"""Prints what nvcc says of the project's GPU kernels, as a table for docs/operations/cuda.md.

    python tests/gpu/kernel_resources.py

It needs nvcc and no GPU. Occupancy is the share of a multiprocessor's threads that the registers
and the shared memory of the blocks leave room for.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
KERNELS = REPOSITORY / "common" / "kernels" / "cuda"
# The size of a block: kThreads of every file.
_THREADS = re.compile(r"constexpr int kThreads = (\d+);")
# Registers come in units of this many for a warp of 32 threads.
REGISTER_UNIT = 256
REGISTERS = 65536
_ENTRY = re.compile(r"Compiling entry function '\w*?\d+(\w+?Kernel)(I\S+?E)?E\S*' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        threads: most threads of a multiprocessor.
        shared_bytes: shared memory of a multiprocessor.
    """

    names: str
    architecture: str
    threads: int
    shared_bytes: int

    def occupancy(self, threads: int, registers: int, shared_bytes: int) -> float:
        """The share of the threads that blocks of so many, with these needs, occupy."""
        of_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        blocks = min(
            self.threads // threads,
            REGISTERS // (of_warp * threads // 32),
            self.shared_bytes // max(shared_bytes, 1),
        )
        return blocks * threads / self.threads


GPUS = [
    Gpu("A100", "sm_80", 2048, 164 << 10),
    Gpu("L4", "sm_89", 1536, 100 << 10),
    Gpu("H100, H200", "sm_90a", 2048, 228 << 10),
]


def report(nvcc: str, source: Path, gpu: Gpu) -> list[tuple[str, str]]:
    """Returns the name of each kernel of a file, with its needs on a kind of GPU."""
    flags = ["-std=c++17", "-O3", f"-arch={gpu.architecture}", f"-I{REPOSITORY}", "-Xptxas", "-v"]
    command = [nvcc, *flags, "-c", str(source), "-o", "/dev/null"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    [threads] = _THREADS.findall(source.read_text())
    kernels = []
    for part in said.split("ptxas info    : Compiling")[1:]:
        entry, spills, used = (
            pattern.search("Compiling" + part) for pattern in (_ENTRY, _SPILLS, _USED)
        )
        if entry is None or spills is None or used is None:
            raise SystemExit(f"nvcc said of {source.name} what this script does not read: {part}")
        name = re.sub(r"^.*\d", "", entry[1]).removesuffix("Kernel")
        number = {None: "", "IfE": ", float32"}.get(entry[2], ", bfloat16")
        registers, shared = int(used[1]), int(used[2] or 0)
        spilled = int(spills[1]) + int(spills[2])
        occupied = gpu.occupancy(int(threads), registers, shared)
        needs = f"{registers}, {shared}, {spilled}, {occupied:.0%}"
        kernels.append((name + number, needs))
    return kernels


def main() -> None:
    """Compiles every kernel for every kind of GPU, and prints the table."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    rows: dict[str, list[str]] = {}
    for source in sorted(KERNELS.glob("*.cu")):
        for gpu in GPUS:
            for name, needs in report(nvcc, source, gpu):
                rows.setdefault(name, []).append(needs)
    print("Registers of a thread, bytes of shared memory, bytes spilled, occupancy:\n")
    print("| kernel | " + " | ".join(gpu.names for gpu in GPUS) + " |")
    print("| -- |" + " -- |" * len(GPUS))
    for name, needs in sorted(rows.items()):
        print(f"| {name} | " + " | ".join(needs) + " |")


if __name__ == "__main__":
    main()
