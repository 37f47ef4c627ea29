#!/bin/sh
# Runs the whole test suite: sh scripts/test.sh [pytest arguments]
#
# Makes a virtual environment first if there is none, and fetches the small embedded model that
# the end-to-end tests read. Both are kept, so later runs need no network.
#   PYTHON  the interpreter that makes the environment (default: python3; 3.11 or newer)
#   VENV    the folder of the environment (default: .venv)
#   AOT     "no": do not install what compiles the GPU kernels without a GPU (200 MB to fetch);
#           the tests that need it skip then, as they do where it cannot be installed
set -eu
cd "$(dirname "$0")/.."
. scripts/venv.sh

use_venv test
use_gpu_compiler
"$VENV/bin/python" scripts/fetch_model.py >&2 ||
    die "the embedded model is needed by the tests. Without it: $VENV/bin/python -m pytest"
exec "$VENV/bin/python" -m pytest "$@"
