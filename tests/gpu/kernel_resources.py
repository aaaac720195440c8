"""The registers and memory of the project's GPU kernels, as the table of docs/operations/cuda.md.

    python tests/gpu/kernel_resources.py [--update]     prints the table, or writes it to the page

It needs nvcc and no GPU. Occupancy is the share of a multiprocessor's threads that the registers
and the shared memory of the blocks leave room for; bytes are computed (kernel_bytes.py). The page
has a digest of the sources, so that a test without nvcc can tell an old table (test_kernels.py).
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kernel_bytes import FLOAT, HALF, by_least

REPOSITORY = Path(__file__).resolve().parents[2]
KERNELS = REPOSITORY / "common" / "kernels" / "cuda"
PAGE = REPOSITORY / "docs" / "operations" / "cuda.md"
NAMES = {
    "PagedAttention": "attention to the cache",
    "CacheWrite": "writes to the cache",
    "FoldPartials": "fold of attention's partial results",
    "Gated": "gates",
    "GroupedLinear": "maps of experts",
    "GroupedGradient": "maps of experts, gradients",
    "LogitGradient": "gradient of logits",
    "LogitStatistics": "statistics of logits",
    "RmsNorm": "RMSNorm",
    "Rotary": "rotation",
}
_TABLE = re.compile(r"<!-- kernels \w+ -->\n\n.*?\n\n<!-- end of kernels -->", re.DOTALL)
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


def report(nvcc: str, source: Path, gpu: Gpu) -> list[tuple[tuple[str, str], str]]:
    """Returns the name and type of each kernel of a file, with its needs on a kind of GPU."""
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
        number = {None: "", "IfE": "float32"}.get(entry[2], "bfloat16")
        registers, shared = int(used[1]), int(used[2] or 0)
        spilled = int(spills[1]) + int(spills[2])
        occupied = gpu.occupancy(int(threads), registers, shared)
        needs = f"{registers}, {shared:,}, {spilled}, {round(100 * occupied)} %"
        kernels.append(((name, number), needs))
    return kernels


def digest() -> str:
    """Returns a digest of what the table follows from."""
    files = [*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh"), KERNELS.parent / "device_kernels.h"]
    files += [Path(__file__), Path(__file__).with_name("kernel_bytes.py")]
    whole = hashlib.sha256()
    for file in sorted(files):
        whole.update(file.read_bytes())
    return whole.hexdigest()[:16]


def table() -> str:
    """Compiles every kernel for every kind of GPU, and returns the table between its marks."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    rows: dict[tuple[str, str], list[str]] = {}
    for source in sorted(KERNELS.glob("*.cu")):
        for gpu in GPUS:
            for key, needs in report(nvcc, source, gpu):
                rows.setdefault(key, []).append(needs)
    lines = ["kernel", "bytes by the least", *(gpu.names for gpu in GPUS)], ["--"] * (2 + len(GPUS))
    text = [
        [
            f"{NAMES[name]}{', ' if number else ''}{number}",
            f"{by_least(name, HALF if number == 'bfloat16' else FLOAT):.2f}",
            *needs,
        ]
        for (name, number), needs in sorted(rows.items(), key=lambda row: NAMES[row[0][0]].lower())
    ]
    body = "\n".join(f"| {' | '.join(line)} |" for line in [*lines, *text])
    return f"<!-- kernels {digest()} -->\n\n{body}\n\n<!-- end of kernels -->"


def of_page() -> str:
    """Returns the table that the page has."""
    [found] = _TABLE.findall(PAGE.read_text())
    return found


def main() -> None:
    """Prints the table or writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true")
    update = parser.parse_args().update
    made = table()
    if update:
        PAGE.write_text(PAGE.read_text().replace(of_page(), made))
    else:
        print(made)


if __name__ == "__main__":
    main()
