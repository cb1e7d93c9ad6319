#!/bin/bash
# Builds the driver from the cross-built objects of the ops, and counts: see bench/arm/__main__.py for the
# arguments.
#
#   bench/arm/run.sh [--variant i8mm] [--only REGEX] [--regions N]
#   ARMLLM_ARM_BUILD=DIR   build folder (default: build/arm of the checkout), as for tests/arm/test-arm.sh
#   SME_QEMU=PROGRAM       a QEMU that knows SME2 (default: the one of tests/arm/setup.sh, if there is one)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
build=${ARMLLM_ARM_BUILD:-$root/build/arm}
[ -n "${VENV:-}" ] && export PATH="$VENV/bin:$PATH"

home=$(bash "$here/setup.sh")
torch=$home/site/torch/include
mkdir -p "$build/bench"
cmake -G Ninja -S "$root/ops" -B "$build/ops" -DCMAKE_TOOLCHAIN_FILE="$root/tests/arm/aarch64.cmake" \
  -DARMLLM_TORCH_INCLUDE="$torch" >"$build/bench/configure.log"
cmake --build "$build/ops" -- --quiet >&2
mapfile -t objects < <(cd "$build/ops" && ninja -t inputs _ops.so | sed -n "s|^[^/].*\.o\$|$build/ops/&|p")
sources=("$here"/*.cpp)
newer=$(find "${sources[@]}" "$here"/*.h "${objects[@]}" -newer "$build/bench/driver" 2>/dev/null | head -1) || true
if [ -n "$newer" ] || [ ! -x "$build/bench/driver" ]; then
  aarch64-linux-gnu-g++ -std=c++17 -O2 -Wall -Wextra -fvisibility=hidden -DTORCH_TARGET_VERSION=0x020a000000000000 \
    -I"$root/ops" -I"$here" -isystem "$torch" "${sources[@]}" "${objects[@]}" -static -o "$build/bench/driver"
  cc -O2 -Wall -Wextra -shared -fPIC -fvisibility=hidden "$here/tbcount.c" -o "$build/bench/tbcount.so"
fi

sme=()
for qemu in "${SME_QEMU:-}" "$home/qemu/qemu-aarch64" qemu-aarch64; do
  version=$("${qemu:-false}" --version 2>/dev/null | sed -n 's/.* version \([0-9]*\).*/\1/p') || true
  [ "${version:-0}" -ge 10 ] && sme=(--sme-qemu "$qemu") && break
done
cd "$root"
exec "${PYTHON:-python3}" -m bench.arm --driver "$build/bench/driver" --plugin "$build/bench/tbcount.so" "${sme[@]}" "$@"
