#!/bin/sh
# Format, lint and type checks: sh scripts/lint.sh [--fix]
#
# With --fix, ruff rewrites what it can first.
#   PYTHON  the interpreter that makes the environment (default: python3; 3.11 or newer)
#   VENV    the folder of the environment (default: .venv)
set -eu
cd "$(dirname "$0")/.."
. scripts/venv.sh

use_venv lint
if [ "${1:-}" = --fix ]; then
    "$VENV/bin/ruff" format .
    "$VENV/bin/ruff" check --fix .
fi
failed=0
"$VENV/bin/ruff" format --check . || failed=1
"$VENV/bin/ruff" check . || failed=1
# Packages, each once it exists.
packages=""
for package in jaxpaged pallas_kernels server; do
    [ ! -f "$package/__init__.py" ] || packages="$packages -p $package"
done
# shellcheck disable=SC2086 # one argument each
"$VENV/bin/mypy" $packages || failed=1
exit $failed
