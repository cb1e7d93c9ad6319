#!/bin/bash
# Prepares what `make bench-arm` needs beyond tests/arm/setup.sh:
# a QEMU with TCG plugins, and an LLVM (17 or later) with models of the Arm cores.
#
#   bench/arm/setup.sh    idempotent; prints the folder that tests/arm/setup.sh prepared
#
# Debian or Ubuntu; missing packages are installed with apt-get, which takes root.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
home=$(bash "$here/../../tests/arm/setup.sh")
fail() { echo "bench/arm/setup.sh: $*" >&2; exit 1; }
# LLVM 17 is the first that models Neoverse V2; Debian 12's plain `llvm` is 14.
have_mca() {
  local program version
  for program in $(compgen -c llvm-mca | sort -u); do
    version=$("$program" --version 2>/dev/null | sed -n 's/.*LLVM version \([0-9]*\).*/\1/p')
    [ "${version:-0}" -ge 17 ] && return 0
  done
  return 1
}

packages=()
command -v qemu-aarch64 >/dev/null || packages+=(qemu-user)  # the dynamic build; the static one has no plugins
command -v cc >/dev/null || packages+=(gcc libc6-dev)
have_mca || packages+=(llvm-19)
if [ ${#packages[@]} -gt 0 ]; then
  [ "$(id -u)" = 0 ] || fail "not root, and these packages are missing: apt-get install ${packages[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null ||
    fail "apt-get cannot install ${packages[*]}"
fi
have_mca || fail "there is no llvm-mca in the packages; install LLVM 17 or later"
qemu-aarch64 -help | grep -- -plugin >/dev/null ||
  echo "bench/arm/setup.sh: this QEMU has no plugins: counting from its log, which takes longer" >&2
echo "$home"
