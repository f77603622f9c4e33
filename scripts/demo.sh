#!/usr/bin/env bash
# Export, train and evaluate a tiny model on this machine. Arguments go to demo.py.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

# Relative paths of the caller refer to the caller's working directory.
cd -- "$caller_directory"
exec "$VENV/bin/python" "$repository/scripts/demo.py" "$@"
