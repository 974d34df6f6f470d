#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv in the repository root: exact versions, the Megatron-Core fork, this package.
# A second run with nothing changed returns at once. PYTHON names another interpreter.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
STAMP="$VENV/moevement-setup.stamp"
CACHE="$ROOT/build/fork"

refuse() {
    echo "setup: $*" >&2
    exit 2
}

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3 python; do
        if supported "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
        [ "$candidate" != "${PYTHON:-}" ] || refuse "PYTHON=$PYTHON is not Python 3.11 or 3.12"
    done
    refuse "Python 3.11 or 3.12 is needed and none is on PATH: install one, or set PYTHON"
}

# What the environment is made of. The root is part of it: scripts in a venv hold its path.
inputs_digest() {
    {
        printf '%s\n' "$ROOT"
        cd "$ROOT"
        sha256sum constraints.txt constraints-cuda.txt pyproject.toml setup.py scripts/setup.sh
        find patches megatron_moevement/integrations/megatron/fork \
            -type f -not -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    } | sha256sum | cut -d ' ' -f 1
}

# Whole, in this place, and of the interpreter that was asked for, if one was.
is_usable() {
    local wanted=""
    [ -f "$STAMP" ] && "$VENV/bin/python" -c '' 2>/dev/null || return 1
    [ "$(sed -n 2p "$STAMP")" = "$ROOT" ] || return 1
    [ -z "${PYTHON:-}" ] || wanted="$("$PYTHON" --version 2>&1)" || return 1
    [ -z "$wanted" ] || [ "$wanted" = "$("$VENV/bin/python" --version)" ]
}

is_current() {
    is_usable && [ "$(sed -n 1p "$STAMP")" = "$1" ]
}

step() {
    local title="$1" start="$SECONDS"
    shift
    echo "setup: $title ..."
    "$@" || refuse "$title failed: the lines above say why"
    echo "setup: $title: $((SECONDS - start)) s"
}

make_venv() {
    rm -rf "$VENV"
    if "$1" -c 'import ensurepip' 2>/dev/null; then
        "$1" -m venv "$VENV"
    else # Debian without python3-venv: let the system's pip fill the environment
        "$1" -m venv --without-pip "$VENV"
        "$1" -m pip --python "$VENV/bin/python" install -qq -c "$ROOT/constraints.txt" pip
    fi
}

pip_install() {
    "$VENV/bin/python" -m pip --disable-pip-version-check install -qq \
        -c "$ROOT/constraints.txt" -c "$ROOT/constraints-cuda.txt" "$@"
}

build_fork() {
    rm -rf "$CACHE/wheel"
    PYTHONPATH="$ROOT" "$VENV/bin/python" -m megatron_moevement.integrations.megatron.fork \
        build --cache "$CACHE/release" --out "$CACHE/wheel" >/dev/null
}

install_packages() {
    # Without isolation the build uses the pinned setuptools of the environment.
    pip_install --no-deps --force-reinstall "$CACHE"/wheel/*.whl &&
        pip_install --no-build-isolation --editable "${ROOT}[docs,test]"
}

check_machine() {
    "$1" -c 'import ensurepip' 2>/dev/null || "$1" -m pip --version >/dev/null 2>&1 ||
        refuse "$1 has neither pip nor ensurepip: install pip for it"
    command -v gcc >/dev/null || refuse "gcc is needed and not on PATH: install it"
    command -v git >/dev/null || refuse "git is needed and not on PATH: install it"
}

main() {
    local digest python
    digest="$(inputs_digest)"
    if is_current "$digest"; then
        return
    fi
    mkdir -p "$ROOT/build"
    exec 9>"$ROOT/build/setup.lock"
    if command -v flock >/dev/null; then
        flock 9
    fi
    if is_current "$digest"; then # another set-up was at work
        return
    fi
    if ! is_usable; then
        python="$(find_python)"
        check_machine "$python"
        step "environment with $("$python" --version)" make_venv "$python"
        step "build tools" pip_install pip setuptools
    fi
    rm -f "$STAMP" # an interrupted set-up starts from nothing
    step "Megatron-Core with the patches" build_fork
    step "packages" install_packages
    printf '%s\n' "$digest" "$ROOT" >"$STAMP"
}

main
