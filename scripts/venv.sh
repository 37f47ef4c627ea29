# Sourced by the other scripts, from the repository root: gives them a virtual environment with
# the project in it. Installs only when pyproject.toml or the set of packages changed.
#
#   PYTHON  the interpreter that makes the environment (default: python3; 3.11 or newer)
#   VENV    the folder of the environment (default: .venv)

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

die() {
    echo "error: $*" >&2
    exit 1
}

check_python() {
    command -v "$PYTHON" >/dev/null 2>&1 ||
        die "'$PYTHON' was not found. Install Python 3.11 or newer, or set PYTHON to one."
    version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
        die "'$PYTHON' does not run. Set PYTHON to a working Python 3.11 or newer."
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "'$PYTHON' is Python $version, but 3.11 or newer is needed. Set PYTHON, for example" \
            "PYTHON=python3.12."
    "$PYTHON" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
        die "'$PYTHON' (Python $version) lacks venv or pip. On Debian and Ubuntu:" \
            "apt install python$version-venv. Or set PYTHON to another interpreter."
}

# use_venv EXTRA: makes $VENV if needed, installs the project with that extra ("" for none).
use_venv() {
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        check_python
        echo "Making a virtual environment in $VENV" >&2
        "$PYTHON" -m venv "$VENV" || die "could not make $VENV; remove that folder and try again."
    fi
    stamp="$VENV/.jaxpaged-${1:-base}"
    # The packages count too: an editable install maps only those that were there at the time.
    wanted="$(pwd) $(cksum <pyproject.toml) $(echo */__init__.py)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing jaxpaged${1:+[$1]} into $VENV (a few minutes the first time)" >&2
        "$VENV/bin/python" -m pip install --quiet --editable ".${1:+[$1]}" ||
            die "the installation failed; the lines above say why. Run again to retry."
        echo "$wanted" >"$stamp"
        # An extra brings the base along.
        [ -z "$1" ] || echo "$wanted" >"$VENV/.jaxpaged-base"
    fi
}

# use_gpu_compiler: installs what compiles the GPU kernels without a GPU, which some tests need, in
# a folder of its own: jax would try a plugin that it finds in every process. Where that cannot be
# done, those tests skip with a reason; nothing fails here.
use_gpu_compiler() {
    [ "${AOT:-yes}" != no ] || return 0
    wheels=$("$VENV/bin/python" scripts/aot_wheels.py) || return 0
    [ -n "$wheels" ] || return 0
    echo "Installing a compiler for GPU kernels (about 240 MB to fetch; AOT=no leaves it out)" >&2
    log="$VENV/.jaxpaged-aot.log"
    # shellcheck disable=SC2086 # one argument each
    if ! "$VENV/bin/python" -m pip install --quiet --no-deps --upgrade --retries 1 \
        --target "$VENV/aot-wheels" $wheels >"$log" 2>&1; then
        echo "note: it could not be installed; the tests that need it skip. pip says:" >&2
        tail -n 3 "$log" >&2
    fi
}
