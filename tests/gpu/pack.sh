#!/usr/bin/env bash
# Packs what tests/gpu/check.sh needs on a machine that has torch 2.11.0+cu130, Python 3.12 and
# transformers, and no network: servers, benchmarks and test programs (stripped), the Debian libraries
# that they load, the client and the tests, a small pair of random models, and the client's wheels.
#   tests/gpu/pack.sh BUILD_DIR PACK.tar.xz [--no-wheels]
set -euo pipefail
build=$(realpath "$1") pack=$(realpath -m "$2") wheels=${3:-}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=$(realpath -s .venv/bin/python)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

programs=(tandem-rollout-server tandem-trainer-server tandem-critic-server tandem-model-probe
  tandem-engine-bench tandem-loss-bench)
tests=(cuda_kernels_test ops_test gpu_transfer_test host_copies_test compute_setup_test fused_output_loss_test linear_divergence_test)
mkdir -p "$folder"/project/build/bin "$folder"/{gtest,lib,lib-if-missing,wheels,models}
for program in "${programs[@]}"; do
  if [ -e "$build/bin/$program" ]; then strip -o "$folder/project/build/bin/$program" "$build/bin/$program"
  else echo "gpu-pack: without $program, which $build does not have"; fi
done
for test in "${tests[@]}"; do
  file=$(find "$build" -name "$test" -type f -perm -u+x -print -quit)
  if [ -n "$file" ]; then strip -o "$folder/gtest/$test" "$file"
  else echo "gpu-pack: without $test, which $build does not have"; fi
done

# What the programs load, but for torch, CUDA and the C and C++ runtimes: those are the machine's own.
ldd "$folder"/project/build/bin/* "$folder"/gtest/* 2>/dev/null | awk '/=> \// {print $3}' | sort -u |
  grep -vE '/site-packages/|/usr/local/cuda|/(ld-linux|libc\.so|libm\.so|libpthread|librt\.|libdl\.|libgcc_s|libstdc\+\+)' |
  xargs -I{} cp -L {} "$folder/lib/"
# A machine that has these has them in the version that its Python loads.
for library in libcrypto libssl libz libutil; do mv "$folder/lib/$library".so* "$folder/lib-if-missing/" 2>/dev/null || true; done
strip "$folder"/lib/* "$folder"/lib-if-missing/* 2>/dev/null || true

mkdir -p "$folder/project/clients" "$folder/project/tests"
cp -r clients/python "$folder/project/clients/"
cp -r tests/parity tests/integration tests/gpu "$folder/project/tests/"
cp -r proto pytest.ini "$folder/project/"
find "$folder/project" -name __pycache__ -prune -exec rm -rf {} +
PYTHONPATH=clients/python:tests/integration "$python" -c \
  'import pathlib, sys, harness; harness.make_models(pathlib.Path(sys.argv[1]))' "$folder/models" >/dev/null

if [ -d /usr/local/cuda/extras/CUPTI ] || [ -e /usr/local/cuda/include/cupti.h ]; then
  g++ -std=c++20 -O2 -shared -fPIC -I/usr/local/cuda/include -I/usr/local/cuda/extras/CUPTI/include tests/gpu/gpuprof.cc \
    -o "$folder/gpuprof.so" -L/usr/local/cuda/lib64 -L/usr/local/cuda/extras/CUPTI/lib64 -lcupti
fi
if [ "$wheels" != --no-wheels ]; then
  names='grpcio|grpcio-health-checking|grpcio-status|grpcio-reflection|protobuf|googleapis-common-protos|pydantic|pydantic-core|annotated-types|typing-extensions|typing-inspection|rich|typer|xxhash|pytest|pytest-asyncio|pytest-timeout|pytest-xdist|execnet'
  pinned=$(grep -E "^($names)==" setup/python-requirements.txt | sed 's/ *[#;].*//')
  # shellcheck disable=SC2086  # a list of requirements
  "$python" -m pip download --disable-pip-version-check -q --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 -d "$folder/wheels" $pinned
fi

mkdir -p "$(dirname "$pack")"
tar c -C "$folder" . | xz -T0 "${XZ_LEVEL:--3}" >"$pack.tmp"
mv "$pack.tmp" "$pack"
bytes=$(stat -c %s "$pack")
echo "gpu-pack: $pack, $((bytes / 1000000)) MB"
[ "$bytes" -le 60000000 ] || { echo "gpu-pack: more than 60 MB, which the way to the machine does not take" >&2; exit 1; }
