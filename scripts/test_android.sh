#!/usr/bin/env bash
# The whole path to a phone, without one: tests against a real adb daemon, then a run on the runtime for arm64
# under emulation in a phone's user space. Figures as JSON: scripts/test_android.sh --json android.json
#
#   --emulated   only the second half; the first is part of scripts/test.sh
#   --or-skip    if a requirement is missing, print it and exit with code 0
#
# Needs root and Debian's adb, iproute2, gnupg, g++, g++-aarch64-linux-gnu, patchelf, qemu-user-static and
# binfmt-support.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

json=() emulated=false or_skip=false
while [ $# -gt 0 ]; do
    case "$1" in
    --emulated) emulated=true ;;
    --or-skip) or_skip=true ;;
    --json)
        [ $# -gt 1 ] || fail "--json needs a file"
        shift
        case "$1" in /*) json=(--json "$1") ;; *) json=(--json "$caller_directory/$1") ;; esac
        ;;
    *) fail "usage: scripts/test_android.sh [--emulated] [--or-skip] [--json FILE]" ;;
    esac
    shift
done

lacks() {
    $or_skip || fail "$1"
    printf 'no run under emulation: %s\n' "$1" >&2
    exit 0
}

# A skipped test proves nothing, so every requirement that tests skip for must be there.
[ "$(id -u)" = 0 ] || lacks "it takes root"
for tool in adb apt-get dpkg-deb gpg ip unshare nsenter g++ aarch64-linux-gnu-g++ patchelf update-binfmts; do
    command -v "$tool" >/dev/null || lacks "there is no $tool"
done
[ -n "$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Component: main')" ] ||
    lacks "APT has no Debian archive"
unshare --net true 2>/dev/null || lacks "namespaces of networks can't be made"
handlers=/proc/sys/fs/binfmt_misc
[ -e "$handlers/register" ] || mount -t binfmt_misc binfmt_misc "$handlers" || lacks "$handlers can't be mounted"
[ -e "$handlers/qemu-aarch64" ] || update-binfmts --enable qemu-aarch64 ||
    lacks "programs for arm64 can't be run: apt install qemu-user-static binfmt-support"

fast=true
$emulated || "$VENV/bin/python" -m pytest --quiet tests/device_runner/android || fast=false
exec "$VENV/bin/python" -m tests.device_runner.android.rig --fast-passed "$fast" "${json[@]}"
