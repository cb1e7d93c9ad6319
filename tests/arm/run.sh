#!/bin/bash
# Runs an arm64 program under QEMU.
#
#   tests/arm/run.sh CPU -- pytest ARGS      the project's arm64 copy: build/arm/site, built by test-arm.sh
#   tests/arm/run.sh CPU -- python ARGS
#   tests/arm/run.sh CPU -- PROGRAM ARGS     any other aarch64 executable
#
# CPU: neoverse-n1 (dot product), i8mm (every Armv8.6 NEON feature, no SVE), max, cortex-a72 (plain NEON;
# torch itself does not run there), sve128, sve256, sve512 (that vector length), sme2 (streaming vectors of
# 512 bits; exits with 77 and the reason where no QEMU has it), or any -cpu string of QEMU. ARMLLM_*
# variables reach the program.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
home=${ARMLLM_ARM_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/torch-armllm-arm}
site=${ARMLLM_ARM_BUILD:-$here/../../build/arm}/site
[ $# -ge 3 ] && [ "$2" = -- ] || { sed -n '4,6s/^# *//p' "$0" >&2; exit 2; }

cpu=$1
shift 2
case $cpu in
  i8mm) cpu=max,sve=off ;;
  sve128 | sve256 | sve512) cpu=max,$cpu=on ;;
esac
newer=
case $cpu in
  sme2) cpu=max,sve=off,sme512=on,sme-default-vector-length=64 newer=$home/qemu/qemu-aarch64 ;;
  *sme*=on*) newer=$home/qemu/qemu-aarch64 ;;
esac
qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64) || { echo "run.sh: no QEMU; run tests/arm/setup.sh" >&2; exit 1; }
# Without a newer QEMU in $home, the system's is new enough, or setup.sh has noted why there is none.
if [ -n "$newer" ] && [ -e "$home/qemu.missing" ]; then
  echo "skipped: no QEMU with SME2: $(cat "$home/qemu.missing")"
  exit 77
fi
[ -z "$newer" ] || [ ! -x "$newer" ] || qemu=$newer

python=$(ls -d "$home"/root/usr/bin/python3.*[0-9] 2>/dev/null | head -1)
case $1 in
  pytest | python)
    [ -n "$python" ] || { echo "run.sh: no arm64 Python in $home; run tests/arm/setup.sh" >&2; exit 1; }
    [ -d "$site" ] || { echo "run.sh: nothing in $site; run tests/arm/test-arm.sh" >&2; exit 1; }
    module=()
    [ "$1" = pytest ] && module=(-m pytest)
    shift
    cd "$site"
    # Always keep bytecode: compiling all imported modules takes half a minute under emulation.
    exec "$qemu" -cpu "$cpu" -L "$home/root" -E "PYTHONPATH=$PWD:$home/site" -E PYTHONNOUSERSITE=1 -E HF_HUB_OFFLINE=1 \
      -E PYTHONDONTWRITEBYTECODE= "$python" "${module[@]}" "$@"
    ;;
esac
exec "$qemu" -cpu "$cpu" -L "$home/root" "$@"
