"""Programs that are shipped have nothing of the simulated GPUs."""

import os
import subprocess
from pathlib import Path

import pytest
from harness import REPOSITORY

BUILD = Path(os.environ.get("TANDEM_BUILD_DIR", REPOSITORY / "build/release"))
SERVERS = ("rollout", "trainer", "critic")
# Names in symbols and texts of tests/gpu/simulated and tests/gpu/emulated.
MARKS = (b"simulated_gpu", b"simulated GPU", b"emulated", b"SetMemoryLimit")


def found(program: Path) -> set[bytes]:
    """Returns the marks of a program, among its texts and all of its symbols."""
    content = program.read_bytes()
    symbols = subprocess.run(["nm", "-C", program], capture_output=True, check=True).stdout
    dynamic = subprocess.run(["nm", "-DC", program], capture_output=True, check=True).stdout
    libraries = subprocess.run(["ldd", program], capture_output=True, check=True).stdout
    whole = content + symbols + dynamic + libraries
    return {mark for mark in MARKS if mark in whole}


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_has_nothing_of_the_simulation(server):
    assert not found(BUILD / f"bin/tandem-{server}-server")


def test_the_marks_are_those_of_the_simulation():
    with_kernels = BUILD / "simulated_gpu/kernels/bin/tandem-rollout-server"
    assert found(with_kernels) == set(MARKS) - {b"SetMemoryLimit"}
    assert found(BUILD / "lib/libtandem_simulated_gpu.so") >= {b"SetMemoryLimit", b"simulated GPU"}
