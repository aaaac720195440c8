#!/usr/bin/env bash
# Runs the parity and law tests, those of two ranks too, with compute.device cuda on simulated GPUs (tests/gpu/simulated), in
# float32 and bfloat16; then some of them with the project's kernels in place of ATen's operations, the laws with products of
# fixed rows, with which they hold to the bit.
#   tests/run_simulated_gpu.sh BUILD_DIR
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export TANDEM_BUILD_DIR=$1/simulated_gpu TANDEM_TEST_DEVICE=cuda
for dtype in float32 bfloat16; do
  TANDEM_TEST_DTYPE=$dtype tests/run_pytest.sh \
    tests/parity/test_{transformers,vision,speculator}_parity.py \
    tests/integration/laws/test_{rank,tandem,training}_laws.py \
    tests/integration/laws/test_gpu_publications.py
done
# Two ranks on one GPU.
TANDEM_TEST_DTYPE=float32 TANDEM_TEST_RANKS_PER_GPU=2 tests/run_pytest.sh \
  tests/integration/laws/test_rank_laws.py -k 'grpo or scores'
export TANDEM_BUILD_DIR=$TANDEM_BUILD_DIR/kernels
TANDEM_TEST_DTYPE=float32 tests/run_pytest.sh \
  tests/parity/test_transformers_parity.py::test_outputs_and_gradients_are_those_of_transformers
laws=tests/integration/laws
for dtype in float32 bfloat16; do
  TANDEM_TEST_DTYPE=$dtype TANDEM_TEST_PRODUCT_ROWS=16 tests/run_pytest.sh $laws/test_tandem_laws.py \
    $laws/test_training_laws.py::test_{the_first_step_has_ratio_one_and_no_kl,recomputed_old_log_probs_make_the_ratio_exactly_one}
done
