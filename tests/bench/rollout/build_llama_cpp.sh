#!/usr/bin/env bash
# Builds the peer of bench_rollout.py: llama.cpp for this machine's CPU, from the source package of
# llama-cpp-python, and tests/bench/rollout/llama_driver.cc over it. Prints the folder that holds
# `llama_driver` and `source` (with the script that converts models).
#
#     [JOBS=2] tests/bench/rollout/build_llama_cpp.sh
set -euo pipefail

VERSION=0.3.36
SHA256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e

cd "$(dirname "$0")/../../.."
JOBS=${JOBS:-$(setup/jobs.sh)}
FOLDER=$PWD/.cache/llama.cpp-$VERSION
DRIVER=$PWD/tests/bench/rollout/llama_driver.cc
MOMENT=$PWD/tests/bench/programs/moment.h
mkdir -p "$FOLDER"

if [[ ! -e $FOLDER/source/CMakeLists.txt ]]; then
  archive=$FOLDER/llama_cpp_python-$VERSION.tar.gz
  .venv/bin/python -m pip --disable-pip-version-check download --quiet --no-deps \
    --no-binary llama-cpp-python --dest "$FOLDER" "llama-cpp-python==$VERSION" >&2
  sha256sum --check --quiet <<<"$SHA256  $archive" >&2
  rm -rf "$FOLDER/unpacked"
  mkdir "$FOLDER/unpacked"
  tar --extract --gzip --file "$archive" --directory "$FOLDER/unpacked" --strip-components=1
  mv "$FOLDER/unpacked/vendor/llama.cpp" "$FOLDER/source"
  rm -rf "$FOLDER/unpacked" "$archive"
fi

if [[ ! -e $FOLDER/build/bin/libllama.so ]]; then
  cmake -S "$FOLDER/source" -B "$FOLDER/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON -DGGML_OPENMP=ON -DGGML_BLAS=OFF -DGGML_CCACHE=OFF \
    -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF >"$FOLDER/build.log"
  cmake --build "$FOLDER/build" -j "$JOBS" --target llama >>"$FOLDER/build.log"
fi

if [[ $DRIVER -nt $FOLDER/llama_driver || $MOMENT -nt $FOLDER/llama_driver ]]; then
  g++ -std=c++20 -O2 -Wall -Wextra -Werror -I"$PWD" "$DRIVER" -isystem "$FOLDER/source/include" \
    -isystem "$FOLDER/source/ggml/include" -L "$FOLDER/build/bin" -Wl,-rpath,"$FOLDER/build/bin" \
    -lllama -lggml -lggml-base -lggml-cpu -o "$FOLDER/llama_driver"
fi
echo "$FOLDER"
