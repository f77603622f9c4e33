#!/usr/bin/env bash
# Check style, types and imports, and run the first tier of tests, which has one test of each sort.
#
#   --all    all tests
#
# Other arguments are passed to pytest. Selected tests run regardless of their tier: scripts/test.sh -k journal
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

tier=(-m "not whole") words=()
for word in "$@"; do
    case "$word" in --all | -k | tests | tests/*) tier=() ;; esac
    if [ "$word" = --all ]; then
        "$VENV/bin/python" scripts/smollm2.py >/dev/null || printf 'tests of SmolLM2 are skipped\n' >&2
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[docs]' >/dev/null ||
            printf 'the site of the documents is not built\n' >&2
    else
        words+=("$word")
    fi
done

# Two test processes run on two cores: more threads in each would only compete.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

"$VENV/bin/ruff" check --quiet --output-format concise .
"$VENV/bin/ruff" format --check --quiet . || fail "ruff format has something to do: run $VENV/bin/ruff format"
"$VENV/bin/mypy"
"$VENV/bin/lint-imports" --no-logo
exec "$VENV/bin/python" -m pytest -n 2 --dist worksteal --quiet "${tier[@]}" "${words[@]}"
