#!/usr/bin/env bash
# Builds images with docker, buildah or podman, whichever is there, and writes their bills of
# materials to build/images/TARGET.cdx.json.
#   docker/build.sh TARGET…        targets of docker/Dockerfile; images are IMAGES-TARGET:TAG
# Environment: IMAGES (default tandem), TAG (default the version), TOOL (docker, buildah or podman),
# ARTIFACTS (compiled, or prebuilt: take what docker/make_artifacts.sh wrote to build/artifacts),
# SOURCE and REVISION (address and commit, for the labels), BUILD_OPTIONS (further options of the tool).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -gt 0 ] || { sed -n 2,8p "$0"; exit 2; }

version=$(sed -n 's/^project(tandem VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
images=${IMAGES:-tandem} tag=${TAG:-$version}
revision=${REVISION:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
source=${SOURCE:-$(git config --get remote.origin.url || echo unknown)}
artifacts=${ARTIFACTS:-compiled}
bill=/usr/share/tandem/sbom.cdx.json

# A docker command without its daemon builds nothing.
works() { case $1 in docker) docker info >/dev/null 2>&1 ;; *) command -v "$1" >/dev/null ;; esac; }
tool=${TOOL:-}
for one in docker buildah podman; do
  if [ -z "$tool" ] && works "$one"; then tool=$one; fi
done
case $tool in
  docker) build=(docker build) ;;
  buildah) build=(buildah build --format docker --layers) ;;
  # Health checks are in docker's format only.
  podman) build=(podman build --format docker --layers) ;;
  "") echo "build: none of docker (with its daemon), buildah and podman is there" >&2; exit 1 ;;
  *) echo "build: TOOL is docker, buildah or podman, not $tool" >&2; exit 2 ;;
esac
read -ra options <<<"${BUILD_OPTIONS:-}"

print_bill() {
  local container
  if [ "$tool" = buildah ]; then
    container=$(buildah from --pull-never "$1")
    buildah run "$container" -- cat "$bill"
  else
    container=$("$tool" create "$1")
    "$tool" cp "$container:$bill" - | tar -xO
  fi
  "$tool" rm "$container" >/dev/null
}

mkdir -p build/images
for target in "$@"; do
  image=$images-$target:$tag
  echo "build: $image with $tool"
  "${build[@]}" "${options[@]}" --file docker/Dockerfile --target "$target" --tag "$image" \
    --build-arg "ARTIFACTS=$artifacts" --build-arg "ARTIFACTS_CUDA=${artifacts/compiled/compiled-cuda}" \
    --build-arg "VERSION=$version" --label "org.opencontainers.image.version=$version" \
    --label "org.opencontainers.image.revision=$revision" --label "org.opencontainers.image.source=$source" .
  print_bill "$image" >"build/images/$target.cdx.json"
done
