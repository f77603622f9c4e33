#!/usr/bin/env bash
# A fleet of three devices on this machine, of which one is killed and one lies. Arguments: --json FILE, --out FOLDER.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

# What the caller names relatively is meant where the caller stands.
here="$PWD"
cd -- "$caller_directory"
exec "$VENV/bin/python" "$here/scripts/fleet_demo.py" "$@"
