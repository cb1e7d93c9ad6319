#!/bin/bash
# Runs op tests under emulation from an installed wheel, then its first use: the README's code and more.
#
#   tests/arm/test-wheel.sh WHEEL [CPU] [pytest ARGS]      CPU: as for run.sh (default: i8mm)
#
# By default: linear layers, experts and norms in every variant of that CPU.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
wheel=${1:?the wheel}
cpu=${2:-i8mm}
shift $(($# < 2 ? $# : 2))
tests=("$@")
((${#tests[@]})) || tests=(tests/ops/test_{linear,rope,moe}.py -q -k "not opcheck and not well_formed and not triton")

bash "$here/setup.sh" >/dev/null
build=$root/build/wheel-test
rm -rf "$build/site"
mkdir -p "$build/site"
"${PYTHON:-python3}" -m zipfile -e "$wheel" "$build/site"
cp -r "$root/tests" "$root/pyproject.toml" "$build/site/"
export ARMLLM_ARM_BUILD=$build
bash "$here/run.sh" "$cpu" -- pytest "${tests[@]}"
bash "$here/run.sh" "$cpu" -- python "$root/.ci/release/first_use.py" --emulated
