#!/bin/bash
# Compiles Python files for the emulated Python, if this machine's has the same version: it takes ten times as
# long under emulation.
#
#   tests/arm/compile.sh [-x EXPRESSION] FOLDER...    files whose path has the expression are left out
set -euo pipefail
home=${ARMLLM_ARM_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/torch-armllm-arm}
python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
[ -e "$home/root/usr/bin/$version" ] || exit 0
"$python" -m compileall -q -j 0 "$@" >/dev/null || true
