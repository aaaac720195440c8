#!/usr/bin/env bash
# Runs pytest, on machines with cores to spare in several processes: a test of servers keeps two cores busy.
#   tests/run_pytest.sh [ARGUMENT…]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
workers=$((${JOBS:-$(setup/jobs.sh)} / 2))
# Tests of a file share the servers that they started: a file stays in one process.
parallel=()
if [ "$workers" -ge 2 ]; then parallel=(-n "$workers" --dist loadfile); fi
exec .venv/bin/python -m pytest -q "${parallel[@]}" "$@"
