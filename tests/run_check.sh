#!/usr/bin/env bash
# What to run after an edit: lint of the changed files, the C++ tests that belong to them, and the
# client's tests.
#   tests/run_check.sh BUILD_DIR [BASE]     (files that differ from BASE, or HEAD; untracked ones too)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export JOBS=${JOBS:-$(setup/jobs.sh)}
build=$(realpath "${1:-build/release}") base=${2:-HEAD}
export TANDEM_BUILD_DIR=$build
source tests/stages.sh

mapfile -t changed < <({ git diff --name-only --diff-filter=d "$base" && git ls-files -o --exclude-standard; } | sort -u)
of() { printf '%s\n' "${changed[@]}" | grep -E "$1"; }

lint() {
  local failed=0
  check() { "$@" || { echo "lint: $1 $2: FAILED"; failed=1; }; }
  mapfile -t python < <(of '\.py$')
  mapfile -t cpp < <(of '\.(h|cc|cu|cuh)$')
  mapfile -t pages < <(of '\.md$')
  [ "${#python[@]}" = 0 ] || check .venv/bin/ruff check --quiet "${python[@]}"
  [ "${#python[@]}" = 0 ] || check .venv/bin/ruff format --quiet --check "${python[@]}"
  [ "${#pages[@]}" = 0 ] || check .venv/bin/mdformat --check "${pages[@]}"
  [ "${#cpp[@]}" = 0 ] || check clang-format --dry-run -Werror "${cpp[@]}"
  if of '\.(h|cc|cu|cuh)$|CMakeLists\.txt$' >/dev/null; then check .venv/bin/python tests/lint/check_layers.py; fi
  if of '\.proto$' >/dev/null; then
    check .venv/bin/python tests/lint/proto_contract.py lint
    check .venv/bin/python tests/lint/proto_contract.py check
  fi
  if of '^clients/python/tandem/' >/dev/null; then
    check env PYTHONPATH=clients/python .venv/bin/lint-imports --no-cache clients/python/pyproject.toml
  fi
  return "$failed"
}

cpp_tests() {
  mapfile -t programs < <(.venv/bin/python tests/changed_programs.py "${changed[@]}")
  if [ "${#programs[@]}" = 0 ]; then echo "no C++ test belongs to a changed file"; return; fi
  echo "${programs[*]}"
  cmake --build "$build" -j "$JOBS" --target "${programs[@]}" &&
    ctest --test-dir "$build" --output-on-failure -j "$JOBS" -R "^($(IFS='|'; echo "${programs[*]}"))$"
}

stage "lint of ${#changed[@]} changed files" lint
stage "C++ tests of changed files" cpp_tests
stage "the client's tests (pytest)" tests/run_pytest.sh -m "not slow" clients/python/tests
finish
