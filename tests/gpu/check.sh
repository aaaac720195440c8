#!/usr/bin/env bash
# Checks on this machine's GPU what `make gpu-pack` packed, within 8 minutes (docs/operations/cuda.md).
#   OUT=results tests/gpu/check.sh [PART…]    without names: every part
# PACK: the pack, by default .gpu/pack.tar.xz. DEV=cpu: the same parts on the CPU, where they can run.
# PYTHON: an interpreter with torch and transformers. Results: $OUT/table.md and $OUT/results.tar.gz,
# written again after each part.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/check.py" "$@"
