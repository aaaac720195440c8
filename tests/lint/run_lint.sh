#!/usr/bin/env bash
# Runs every check of style and structure that runs no code of the project.
#   tests/lint/run_lint.sh BUILD_DIR changed|all     (files for clang-tidy)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build=${1:?build directory} scope=${2:-changed}
python=.venv/bin/python
failed=0

check() {
  local name=$1
  shift
  if "$@"; then echo "lint: $name: ok"; else echo "lint: $name: FAILED"; failed=1; fi
}

cpp_files() { git ls-files -z -co --exclude-standard -- '*.h' '*.cc' '*.cu' '*.cuh'; }
check_clang_format() { cpp_files | xargs -0 -r clang-format --dry-run -Werror; }
check_mdformat() { git ls-files -z -co --exclude-standard -- '*.md' | xargs -0 -r .venv/bin/mdformat --check; }
check_clang_tidy() {
  local arguments=()
  [ "$scope" = all ] && arguments=(--all)
  "$python" tests/lint/run_clang_tidy.py "$build" --jobs "${JOBS:-$(setup/jobs.sh)}" "${arguments[@]}"
}

check "layers" "$python" tests/lint/check_layers.py
check "protos (style)" "$python" tests/lint/proto_contract.py lint
check "protos (compatible with proto/golden)" "$python" tests/lint/proto_contract.py check
check "generated pages" "$python" tests/lint/reference_docs.py check
check "rooms of the client" env PYTHONPATH=clients/python .venv/bin/lint-imports --no-cache clients/python/pyproject.toml
check "ruff" .venv/bin/ruff check --quiet .
check "ruff format" .venv/bin/ruff format --quiet --check .
check "mdformat" check_mdformat
check "hadolint" .venv/bin/hadolint docker/Dockerfile tests/images/monitoring/Dockerfile
check "clang-format" check_clang_format
check "clang-tidy ($scope files)" check_clang_tidy
exit "$failed"
