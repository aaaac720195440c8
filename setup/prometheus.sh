#!/usr/bin/env bash
# Puts prometheus, promtool, prometheus-alertmanager and amtool, which the tests run, into
# .cache/prometheus/usr/bin. Does nothing when they are there.
# Debian's packages are unpacked instead of installed: installed, they would start services on this
# machine. Needs no root; the programs need libc6 alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

directory=.cache/prometheus
packages=(prometheus prometheus-alertmanager)

[ -e "$directory" ] && exit
if ! command -v apt-get >/dev/null; then
  for program in prometheus promtool prometheus-alertmanager amtool; do
    command -v "$program" >/dev/null && continue
    printf 'setup: this is not a Debian-like system; put %s on the PATH by hand\n' "$program" >&2
    exit 1
  done
  exit
fi
mkdir -p .cache
work=$(mktemp -d "$PWD/.cache/prometheus.XXXXXX")
trap 'rm -rf "$work"' EXIT
printf 'setup: Prometheus and Alertmanager: unpacking Debian packages into %s (30 MB to fetch, 140 MB on disk)\n' "$directory"

# Package lists of its own: those of the system may be missing or old, and belong to root.
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/root"
apt=(apt-get -qq -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o "APT::Sandbox::User=$(id -un)")
"${apt[@]}" update
(cd "$work" && "${apt[@]}" download "${packages[@]}")
for package in "$work"/*.deb; do dpkg-deb -x "$package" "$work/root"; done
# Whoever is first wins: another test may have unpacked them meanwhile.
mv -T "$work/root" "$directory" 2>/dev/null || [ -e "$directory" ]
