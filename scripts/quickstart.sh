#!/bin/sh
# From nothing to answers: sh scripts/quickstart.sh [prompt ...]
#
# Makes a virtual environment, installs jaxpaged into it, fetches a small chat model (about 100 MB)
# and answers a few prompts at once. What is already there is used as it is, so a second run
# needs no network.
#   PYTHON  the interpreter that makes the environment (default: python3; 3.11 or newer)
#   VENV    the folder of the environment (default: .venv)
set -eu
cd "$(dirname "$0")/.."
. scripts/venv.sh

case "${1:-}" in
-h | --help)
    sed -n '2,9s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
use_venv ""
"$VENV/bin/python" scripts/fetch_model.py >&2
exec "$VENV/bin/python" scripts/quickstart.py "$@"
