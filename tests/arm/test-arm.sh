#!/bin/bash
# Tests the project as aarch64 code under QEMU: sets up and cross-builds (build.sh), and runs on several CPUs.
#
#   tests/arm/test-arm.sh [PYTEST ARGS]
#   ARMLLM_ARM_BUILD=DIR   build, installed copy and logs (default: build/arm of the checkout)
#   JOBS=N                 emulators at a time (default: the number of processors)
#
# The logs of all runs stay in DIR/logs; the last lines printed say how each one ended.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
build=${ARMLLM_ARM_BUILD:-$root/build/arm}
export ARMLLM_ARM_BUILD=$build
jobs=${JOBS:-$(nproc)}
start=$SECONDS
[ -n "${VENV:-}" ] && export PATH="$VENV/bin:$PATH"

logs=$build/logs
echo "== cross build"
bash "$here/build.sh"
mkdir -p "$logs"
rm -f "$logs"/*.result

echo "== a checkpoint saved here, to be loaded there"
rm -rf "$build/saved"
mkdir -p "$build/saved"
if PYTHONPATH=$root HF_HUB_OFFLINE=1 python "$root/tests/arm/saved.py" "$build/saved" >"$logs/saved.log" 2>&1; then
  export ARMLLM_SAVED=$build/saved
else
  echo "   none, so the emulated runs load their own: $(tail -1 "$logs/saved.log")"
fi

names=()
run() {  # run NAME COMMAND…: in the background, as soon as fewer than $jobs are running
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do sleep 0.2; done
  local name=$1
  shift
  (
    began=$SECONDS
    code=0
    "$@" >"$logs/$name.log" 2>&1 || code=$?
    case $code in 0) result=ok ;; 77) result=SKIPPED ;; *) result=FAILED ;; esac
    last=$(grep -v '^ *$' "$logs/$name.log" | tail -1) || true
    printf '%-7s %4ss  %-28s %s\n' "$result" $((SECONDS - began)) "$name" "$last" | tee "$logs/$name.result"
  ) &
  names+=("$name")
}
kernels() { local cpu=$1; shift; "$here/run.sh" "$cpu" -- "$build/ops/kernel_test" "$@"; }
# One thread each, as there are as many emulators as processors.  Tests of threading set their own number.
# Hypothesis' profile "ci" draws the same examples each time, and has no deadline for drawing them.
emulated() {
  local cpu=$1
  shift
  OMP_NUM_THREADS=1 "$here/run.sh" "$cpu" -- pytest -q -p no:cacheprovider --hypothesis-profile=ci "$@"
}
# Damaged calls ask for terabytes: QEMU would grant them, and keep a note of every page.
bounded() { (ulimit -v $((64 << 20)) && emulated "$@"); }
selects() { local cpu=$1 wanted=$2; [ "$(kernels "$cpu" --selected)" = "$wanted" ] && echo "$cpu uses $wanted"; }
overrides() {
  selects cortex-a72 neon && selects neoverse-n1 dotprod && selects i8mm i8mm && selects sve128 i8mm &&
    selects sve256 svei8mm && selects max svei8mm && selects a64fx sve &&
    ARMLLM_ISA=neon selects max neon && ARMLLM_ISA=scalar selects neoverse-n1 scalar &&
    ! ARMLLM_ISA=i8mm kernels neoverse-n1 --selected && ! ARMLLM_ISA=unheard-of kernels max --selected
}

# Emulation is slow, so nothing is emulated twice.  Each variant's kernels run on a CPU that supports no
# more than they need.  The ops around the kernels are the same on every CPU: one CPU runs them, with the
# variant of today's servers, and with few examples of each property; --thorough takes all but sme2, and but
# scalar, the reference, which is the same source as on the machine that runs this.  Each model family runs
# on one CPU.  A saved model must have the bits of the machine that saved it on every CPU.  Random calls of
# all ops and variants run on tensors that end at guard pages: emulated loads fault there like real ones.
# opcheck and checks of arguments are left out, as they test no kernel's code, and so are the errors of two
# formats, which are no code's, and comparisons with functions of transformers, which the build machine makes;
# here the same ops are compared with references.  Importing torch takes 20 s, so that what runs on one CPU
# shares a process.  Longest runs first.
echo "== emulated runs"
computed="not opcheck and not are_symbols and not wrong_arguments and not well_formed and not triton"
computed+=" and not latents_error and not of_folding and not function_of_transformers and not scalar"
computed+=" and not untraced"  # graphs of torch
# What a program of the plan reads and writes in float16, test_plan_elementwise has too.
case " $* " in *" --thorough "*) ;; *) computed+=" and not (pointwise and float16)" ;; esac
ops() {  # ops FILES MORE...: the op tests of these first letters, and more files; a process for all
  local files=$1
  shift
  bounded sve256 $(cd "$root" && echo tests/ops/test_[$files]*.py) --variants svei8mm --fewer 2 "$@"
}
run ops-plans-fuzz-sve256 ops a-l tests/arm/test_{isa,saved}.py tests/plan/test_{plan_elementwise,pointwise}.py \
  tests/fuzz/test_ops.py -k "$computed and (not fuzz or random_calls)" "$@"
run ops-m-z-sve256 ops m-z -k "$computed" "$@"
run models-neoverse-n1 emulated neoverse-n1 tests/arm/{test_isa,test_saved,test_engine,test_generate,families}.py \
  -k "not (families and (qwen3_moe or gpt_oss))"
run models-i8mm emulated i8mm tests/arm/{test_isa,test_saved,test_engine,families}.py \
  -k "not (families and (llama or deepseek))"
ARMLLM_ISA=neon run saved-forced-neon emulated neoverse-n1 tests/arm/{test_isa,test_saved}.py
run ops-sme2 emulated sme2 tests/ops/test_linear{,_inputs}.py -k "sme2 or two_digits or special"
run kernels-i8mm kernels i8mm i8mm
run kernels-neoverse-n1 kernels neoverse-n1 dotprod
run kernels-a64fx kernels a64fx sve
run kernels-cortex-a72 kernels cortex-a72 neon
for bits in 128 256 512; do run "kernels-sve$bits" kernels "sve$bits" svei8mm sve; done
run kernels-sme2 kernels sme2 sme2
run variant-selection overrides

wait
failed=0
skipped=0
for name in "${names[@]}"; do  # what a run has written: the shell forgets the status of one that ended long ago
  case $(cat "$logs/$name.result") in ok*) ;; SKIPPED*) skipped=$((skipped + 1)) ;; *) failed=$((failed + 1)) ;; esac
done
echo "== test-arm: $((${#names[@]} - failed - skipped)) of ${#names[@]} runs passed, $skipped skipped, in $((SECONDS - start)) s"
for name in "${names[@]}"; do cat "$logs/$name.result"; done
exit $((failed > 0))
