"""The page's table of the GPU's kernels."""

import shutil

import kernel_resources
import pytest

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def test_the_page_has_the_table_of_these_kernels():
    mark = kernel_resources.of_page().splitlines()[0]
    assert mark == f"<!-- kernels {kernel_resources.digest()} -->", (
        "run python tests/gpu/kernel_resources.py --update, which needs nvcc"
    )


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_the_table_is_what_nvcc_says():
    assert kernel_resources.of_page() == kernel_resources.table()
