# Sourced by the scripts next to it: changes to the repository and ensures its Python environment.
#
# PRGE_VENV     folder of the environment, .venv in the repository if unset
# PRGE_PYTHON   the Python that makes it, else the first installed one of 3.10 to 3.13
#
# Afterwards $VENV is the environment's absolute path and the working directory is the repository.

repository="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
caller_directory="$PWD"
VENV="${PRGE_VENV:-$repository/.venv}"
case "$VENV" in /*) ;; *) VENV="$caller_directory/$VENV" ;; esac
cd -- "$repository"

fail() {
    printf '%s: error: %s\n' "$(basename -- "$0")" "$1" >&2
    exit 2
}

suits() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

find_python() {
    local name
    if [ -n "${PRGE_PYTHON:-}" ]; then
        suits "$PRGE_PYTHON" || fail "PRGE_PYTHON=$PRGE_PYTHON is no Python 3.10 to 3.13"
        printf '%s\n' "$PRGE_PYTHON"
        return
    fi
    for name in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if suits "$name"; then
            command -v "$name"
            return
        fi
    done
    fail "no Python 3.10 to 3.13 found: install one, or name it in PRGE_PYTHON"
}

make_environment() {
    local python
    python="$(find_python)" || exit 2
    printf 'making the environment %s with %s\n' "$VENV" "$python" >&2
    "$python" -m venv "$VENV" >/dev/null 2>&1 && return
    # Some distributions keep ensurepip in a package of its own; the Python's own pip can do its work.
    "$python" -m venv --clear --without-pip "$VENV" || fail "can't make the environment $VENV"
    "$python" -m pip --python "$VENV/bin/python" install --quiet pip ||
        fail "$python has neither ensurepip nor a pip of 22.3 or newer: install its venv package"
}

ensure_environment() {
    local stamp="$VENV/.prge-installed" wanted
    # An editable install points at this folder, so its name counts too.
    wanted="$(cksum <pyproject.toml) $repository"
    if [ -x "$VENV/bin/python" ] && [ -f "$stamp" ] && [ "$(cat -- "$stamp")" = "$wanted" ]; then
        return
    fi
    suits "$VENV/bin/python" || make_environment
    printf 'installing prge and its requirements into %s\n' "$VENV" >&2
    # Standard output belongs to the work that follows.
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[export,device,dev]' >&2 ||
        fail "the packages can't be installed: see pip's message above"
    printf '%s\n' "$wanted" >"$stamp"
}

ensure_environment
