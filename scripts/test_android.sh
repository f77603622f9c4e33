#!/usr/bin/env bash
# The whole path to a phone, without one: tests against a real adb daemon, then a run on the runtime for arm64
# under emulation in a phone's user space. Figures as JSON: scripts/test_android.sh --json android.json
#
# Needs root and Debian's adb, g++, g++-aarch64-linux-gnu, patchelf, qemu-user-static and binfmt-support.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

json=()
if [ "${1:-}" = --json ] && [ $# -eq 2 ]; then
    case "$2" in /*) json=(--json "$2") ;; *) json=(--json "$caller_directory/$2") ;; esac
elif [ $# -gt 0 ]; then
    fail "usage: scripts/test_android.sh [--json FILE]"
fi

handlers=/proc/sys/fs/binfmt_misc
[ -e "$handlers/register" ] || mount -t binfmt_misc binfmt_misc "$handlers" || fail "$handlers can't be mounted"
[ -e "$handlers/qemu-aarch64" ] || update-binfmts --enable qemu-aarch64 ||
    fail "programs for arm64 can't be run: apt install qemu-user-static binfmt-support"

fast=true
# A skipped test shows nothing: here it counts as a failure.
export PRGE_ANDROID_REQUIRED=1
"$VENV/bin/python" -m pytest --quiet tests/device_runner/android || fast=false
exec "$VENV/bin/python" -m tests.device_runner.android.rig --fast-passed "$fast" "${json[@]}"
