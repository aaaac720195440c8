#!/usr/bin/env bash
# Runs pytest, in a process for each core: a test and its servers mostly wait for each other.
#   tests/run_pytest.sh [ARGUMENT…]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
workers=${JOBS:-$(setup/jobs.sh)}
# Tests of a file share servers, so all of them run in one process.
parallel=()
if [ "$workers" -ge 2 ]; then parallel=(-n "$workers" --dist loadfile); fi
exec .venv/bin/python -m pytest -q "${parallel[@]}" "$@"
