#!/usr/bin/env bash
# Run a fleet of three devices on this machine; one is killed and one lies. Arguments: --json FILE, --out FOLDER.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

# Relative paths of the caller refer to the caller's working directory.
here="$PWD"
cd -- "$caller_directory"
exec "$VENV/bin/python" "$here/scripts/fleet_demo.py" "$@"
