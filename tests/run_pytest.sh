#!/usr/bin/env bash
# Runs pytest, in WORKERS processes: by default in one per two cores, which a test of servers keeps busy.
#   tests/run_pytest.sh [ARGUMENT…]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
workers=${WORKERS:-$((${JOBS:-$(setup/jobs.sh)} / 2))}
# Tests of a file share servers, so all of them run in one process.
parallel=()
if [ "$workers" -ge 2 ]; then parallel=(-n "$workers" --dist loadfile); fi
exec .venv/bin/python -m pytest -q "${parallel[@]}" "$@"
