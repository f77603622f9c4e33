#!/usr/bin/env bash
# Export, train and evaluate a tiny model on this machine. Arguments go to `prge demo`.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

# What the caller names relatively is meant where the caller stands.
cd -- "$caller_directory"
exec "$VENV/bin/prge" demo "$@"
