#!/usr/bin/env bash
# Builds the parsers' fuzz targets with clang and runs each for some seconds, from its corpus.
#   tests/fuzz/run_fuzz.sh SECONDS_PER_PARSER
# Inputs that break a parser are kept in build/fuzz/found; add them to tests/fuzz/corpus.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
seconds=${1:?seconds for each parser}
command -v clang++ >/dev/null || {
  echo "make fuzz needs clang++ with libFuzzer: make setup installs the Debian packages clang and libclang-rt-dev" >&2
  exit 1
}
cmake --preset fuzz >/dev/null
cmake --build build/fuzz -j "${JOBS:-$(setup/jobs.sh)}" --target fuzz
failed=0
for corpus in tests/fuzz/corpus/*/; do
  name=$(basename "$corpus")
  found=build/fuzz/found/$name
  mkdir -p "$found"
  echo "==> $name: $seconds s"
  # Debian's libraries are not instrumented: AddressSanitizer takes containers from them for poisoned.
  ASAN_OPTIONS=detect_container_overflow=0 "build/fuzz/bin/fuzz_$name" \
    -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -verbosity=0 \
    -artifact_prefix="$found/broken-" "$found" "$corpus" 2>&1 | grep -vE '^("|###)' || {
    failed=1
    echo "to repeat the failure: build/fuzz/bin/fuzz_$name $found/broken-…"
  }
done
exit "$failed"
