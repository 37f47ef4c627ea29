#!/bin/sh
# One run of everything that needs a GPU: sh scripts/gpu_suite.sh --budget 540 --out DIR [--dry]
#
# Measures the kernels, whole steps and the engine on the device at hand, within the budget in
# seconds, and ends with a table. Nothing is installed: the interpreter must have jax with its GPU
# plugin, flax, and what jaxpaged imports; with torch and transformers the peer is timed, too. More
# arguments go to scripts/bench_kernels.py. See docs/gpu_suite.md.
#   PYTHON  the interpreter (default: python3)
set -eu
command -v "${PYTHON:-python3}" >/dev/null 2>&1 || {
    echo "error: ${PYTHON:-python3} was not found. Set PYTHON to the interpreter that has jax." >&2
    exit 1
}
exec "${PYTHON:-python3}" "$(dirname "$0")/bench_kernels.py" "$@"
