#!/usr/bin/env bash
# Builds the images of docker/Dockerfile from a local base image, without a registry, and tests them.
#   tests/images/run.sh BUILD_DIR [PYTEST_ARGUMENT…]
# Needs root and the network. Images and containers are kept in .cache/images (10 GB while it runs)
# and removed at the end, unless KEEP=1 is in the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build=${1:?build directory}
shift
[ "$(id -u)" -eq 0 ] || { echo "test-images: needs root, for debootstrap and for networks of containers" >&2; exit 1; }
setup/install.sh --apt setup/image-test-packages.txt

cache=$PWD/.cache/images
mkdir -p "$cache"
# vfs copies an image for every container, but also works where overlays cannot be mounted.
driver=vfs
mkdir -p "$cache"/trial/{lower,upper,work,merged}
if mount -t overlay overlay "$cache/trial/merged" 2>/dev/null \
  -o "lowerdir=$cache/trial/lower,upperdir=$cache/trial/upper,workdir=$cache/trial/work"; then
  umount "$cache/trial/merged"
  driver=overlay
fi
rm -rf "$cache/trial"
# Storage and settings of its own: the machine's images and containers are not touched.
cat >"$cache/storage.conf" <<EOF
[storage]
driver = "$driver"
graphroot = "$cache/store"
runroot = "$cache/run"
EOF
# runc also runs where the control groups are of version 1 and there is no systemd.
cat >"$cache/containers.conf" <<'EOF'
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
cgroups = "no-conmon"
[engine]
runtime = "runc"
EOF
export CONTAINERS_STORAGE_CONF=$cache/storage.conf CONTAINERS_CONF=$cache/containers.conf

clean_up() {
  podman rm --all --force --volumes >/dev/null 2>&1 || true
  podman network prune --force >/dev/null 2>&1 || true
  [ -n "${KEEP:-}" ] || rm -rf "$cache/store" "$cache/run" build/artifacts
}
trap clean_up EXIT

# A Debian as small as the image debian:12-slim: no documentation but copyrights.
if ! [ -e "$cache/base.tar" ]; then
  echo "test-images: making a base image"
  rm -rf "$cache/debian"
  debootstrap --variant=minbase bookworm "$cache/debian" http://deb.debian.org/debian >"$cache/debootstrap.log"
  cat >"$cache/debian/etc/apt/sources.list" <<'EOF'
deb http://deb.debian.org/debian bookworm main
deb http://deb.debian.org/debian bookworm-updates main
deb http://deb.debian.org/debian-security bookworm-security main
EOF
  # Authorities that this machine trusts beside Debian's: its network may be behind a proxy.
  mkdir -p "$cache/debian/usr/local/share/ca-certificates"
  find /usr/local/share/ca-certificates -name '*.crt' -exec cp -t "$cache/debian/usr/local/share/ca-certificates" {} +
  rm -rf "$cache"/debian/var/cache/apt/* "$cache"/debian/var/lib/apt/lists/* \
    "$cache"/debian/usr/share/{man,info,locale,lintian}/*
  find "$cache/debian/usr/share/doc" -depth ! -type d ! -name copyright -delete
  tar -C "$cache/debian" -cf "$cache/base.tar.new" .
  rm -rf "$cache/debian"
  mv "$cache/base.tar.new" "$cache/base.tar"
fi
podman image exists localhost/debian:12-slim || podman import "$cache/base.tar" localhost/debian:12-slim >/dev/null

docker/make_artifacts.sh "$build" build/artifacts
export IMAGES=localhost/tandem TAG=test SOURCE=https://example.com/tandem TOOL=buildah BUILDAH_ISOLATION=chroot
REVISION=$(git rev-parse HEAD)
export REVISION
ARTIFACTS=prebuilt BUILD_OPTIONS="--build-arg BASE=localhost/debian:12-slim" \
  docker/build.sh rollout trainer critic client demo-model

setup/prometheus.sh
for target in prometheus alertmanager; do
  buildah build --quiet --layers --build-arg BASE=localhost/debian:12-slim --target "$target" \
    --tag "localhost/$target:test" --file tests/images/monitoring/Dockerfile .cache/prometheus
done
export PROMETHEUS_IMAGE=localhost/prometheus:test ALERTMANAGER_IMAGE=localhost/alertmanager:test

PYTHONPATH=clients/python .venv/bin/python -m pytest -q -p no:cacheprovider tests/images "$@"
