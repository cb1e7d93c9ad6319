#!/bin/bash
# Builds the project for aarch64: the kernels' own tests, and a copy of the package that runs under emulation.
#
#   tests/arm/build.sh     sets up, then builds changed files; waits if another build is running
#   ARMLLM_ARM_BUILD=DIR   where (default: build/arm of the checkout): ops/kernel_test, site/
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
build=${ARMLLM_ARM_BUILD:-$root/build/arm}
jobs=${JOBS:-$(nproc)}

home=$(bash "$here/setup.sh")
site=$build/site
mkdir -p "$build/logs"
exec 9>"$build/lock"
flock 9

cmake -G Ninja -S "$root/ops" -B "$build/ops" -DCMAKE_TOOLCHAIN_FILE="$here/aarch64.cmake" \
  -DARMLLM_TORCH_INCLUDE="$home/site/torch/include" -DCMAKE_INSTALL_PREFIX="$site" >"$build/logs/configure.log"
cmake --build "$build/ops" -j "$jobs" --target all kernel_test
# An installed copy, as the checkout may contain the library of the build machine.
rm -rf "$site"
mkdir -p "$site"
cp -r "$root/torch_armllm" "$site/"
rm -f "$site/torch_armllm/_ops.so"
cmake --install "$build/ops" >/dev/null
cp -r "$root/ops" "$site/torch_armllm/ops"
[ -d "$root/passes" ] && cp -r "$root/passes" "$site/torch_armllm/passes"
cp -r "$root/tests" "$root/pyproject.toml" "$site/"
# Emulated, compiling takes ten times as long.
bash "$here/compile.sh" "$site/torch_armllm" "$site/tests"
