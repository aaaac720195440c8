#!/usr/bin/env bash
# Prepares this checkout: Debian packages, the virtual environment .venv, the Python packages in it,
# and the `tandem` client (editable).
# Safe to run again: it installs what is missing and says what it does. Works as root or with sudo.
#   setup/install.sh            everything
#   setup/install.sh --no-apt   Python only, where the Debian packages come from elsewhere
#   setup/install.sh --apt FILE the Debian packages of another list, and nothing else
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

apt_list=setup/apt-packages.txt
requirements=setup/python-requirements.txt
requirements_no_deps=setup/python-requirements-no-deps.txt
venv=.venv
python=${PYTHON:-python3}
use_apt=yes use_python=yes
case "${1:-}" in
  "") ;;
  --no-apt) use_apt= ;;
  --apt) apt_list=${2:?list of packages} use_python= ;;
  *) sed -n 2,7p "$0"; exit 2 ;;
esac

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
entries() { sed -e 's/#.*//' -e 's/[[:space:]]*$//' -e '/^$/d' "$1"; }

install_debian_packages() {
  command -v dpkg-query >/dev/null || fail "this is not a Debian-like system; install the packages of $apt_list by hand, then use --no-apt"
  local missing=() package
  for package in $(entries "$apt_list"); do
    dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing+=("$package")
  done
  if [ ${#missing[@]} -eq 0 ]; then
    say "Debian packages: all there"
    return
  fi
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail "missing Debian packages (${missing[*]}) and neither root nor sudo to install them"
    as_root=(sudo)
  fi
  say "Debian packages: installing ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 "${missing[@]}" >/dev/null
}

install_python_packages() {
  # The stamp holds what the environment was made from; the client's own metadata is part of it.
  local stamp=$venv/.tandem-setup inputs=("$requirements" "$requirements_no_deps") wanted
  [ -e clients/python/pyproject.toml ] && inputs+=(clients/python/pyproject.toml)
  wanted=$(cat "${inputs[@]}" | sha256sum | cut -d' ' -f1)
  if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    say "Python packages: all there ($venv)"
    return
  fi
  if ! [ -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "needs Python 3.11 or newer, $python is $("$python" --version)"
    say "virtual environment: creating $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
  fi
  local pip=("$venv/bin/python" -m pip --disable-pip-version-check install -q --use-pep517)
  say "Python packages: installing $requirements into $venv (about 2.5 GB to fetch, 6 GB on disk)"
  "${pip[@]}" -r "$requirements"
  "${pip[@]}" --no-deps -r "$requirements_no_deps"
  if [ -e clients/python/pyproject.toml ]; then
    say "Python packages: the tandem client (clients/python, editable)"
    "${pip[@]}" --no-deps --no-build-isolation -e clients/python
  fi
  "$venv/bin/python" -c 'import torch, transformers, grpc' || fail "the environment $venv is broken: remove it and run setup again"
  printf '%s\n' "$wanted" >"$stamp"
}

[ -z "$use_apt" ] || install_debian_packages
[ -z "$use_python" ] || install_python_packages
say "done"
