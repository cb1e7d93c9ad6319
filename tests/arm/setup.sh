#!/bin/bash
# Prepares what `make test-arm` needs: a cross compiler, QEMU, and an arm64 Python with torch 2.10 to run
# under it.
#
#   tests/arm/setup.sh            idempotent; prints the folder it prepared
#   ARMLLM_ARM_HOME=DIR           where (default: ${XDG_CACHE_HOME:-~/.cache}/torch-armllm-arm; about 1 GB)
#   ARMLLM_ARM_SOURCES=FILE       apt sources of arm64 packages, where the configured ones have none (Ubuntu)
#   ARMLLM_QEMU_SOURCES=FILE      apt sources of a QEMU with SME2 (default: Debian forky from the mirror
#                                 that apt uses); without one, DIR/qemu.missing says why and the rest works
#
# Debian or Ubuntu.  Missing packages are installed with apt-get, which needs root.  Packages of
# another architecture are never installed on the machine itself: they are only unpacked into DIR/root.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
home=${ARMLLM_ARM_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/torch-armllm-arm}
fail() { echo "tests/arm/setup.sh: $*" >&2; exit 1; }

command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || fail "needs Debian or Ubuntu (apt-get and dpkg-deb)"
mkdir -p "$home"
exec 9>"$home/lock"
flock 9

packages=()
command -v aarch64-linux-gnu-g++ >/dev/null || packages+=(g++-aarch64-linux-gnu)
command -v qemu-aarch64-static >/dev/null || command -v qemu-aarch64 >/dev/null || packages+=(qemu-user-static)
command -v cmake >/dev/null || packages+=(cmake)
command -v ninja >/dev/null || packages+=(ninja-build)
if [ ${#packages[@]} -gt 0 ]; then
  [ "$(id -u)" = 0 ] || fail "not root, and these packages are missing: apt-get install ${packages[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
fi

# A separate, empty package database: apt resolves and downloads an arm64 Python from the mirrors that this
# machine already uses, and changes no installed package.
if [ ! -e "$home/root.done" ]; then
  apt=$home/apt
  rm -rf "$home/root" "$apt"
  mkdir -p "$home/root/usr/lib" "$apt/lists/partial" "$apt/cache/archives/partial"
  : >"$apt/status"
  sources=(-o "Dir::Etc::sourcelist=/etc/apt/sources.list" -o "Dir::Etc::sourceparts=/etc/apt/sources.list.d")
  if [ -n "${ARMLLM_ARM_SOURCES:-}" ]; then
    mkdir "$apt/none"
    sources=(-o "Dir::Etc::sourcelist=$ARMLLM_ARM_SOURCES" -o "Dir::Etc::sourceparts=$apt/none")
  fi
  options=(-qq "${sources[@]}" -o "Dir::State=$apt" -o "Dir::State::lists=$apt/lists" -o "Dir::State::status=$apt/status"
    -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root -o Debug::NoLocking=1
    -o APT::Architecture=arm64 -o APT::Architectures=arm64)
  apt-get "${options[@]}" update || fail "apt finds no arm64 packages; name a mirror that has them in ARMLLM_ARM_SOURCES"
  apt-get "${options[@]}" install --download-only -y --no-install-recommends python3 libstdc++6 libgomp1 >/dev/null
  for name in bin lib sbin; do mkdir -p "$home/root/usr/$name" && ln -s "usr/$name" "$home/root/$name"; done
  for deb in "$apt"/cache/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$home/root" --keep-directory-symlink
  done
  rm -rf "$apt"
  touch "$home/root.done"
fi
# SME2 came with QEMU 10.1.  Debian's later builds are static: unpacked, they run anywhere.
has_sme2() {  # has_sme2 QEMU
  local version
  version=$("$1" --version 2>/dev/null | sed -n 's/.* version \([0-9]*\)\.\([0-9]*\).*/\1 \2/p')
  [ -n "$version" ] && [ $((${version% *} * 100 + ${version#* })) -ge 1001 ]
}
newer_qemu() {
  local apt=$home/apt-qemu mirror
  rm -rf "$apt"
  mkdir -p "$apt/lists/partial" "$apt/none"
  : >"$apt/status"
  if [ -n "${ARMLLM_QEMU_SOURCES:-}" ]; then
    cp "$ARMLLM_QEMU_SOURCES" "$apt/qemu.list" || return 1
  else
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m1 '/debian/*$') ||
      { echo "no Debian mirror is configured; name apt sources with QEMU 10.1 in ARMLLM_QEMU_SOURCES"; return 1; }
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror forky main" >"$apt/qemu.list"
  fi
  local options=(-qq -o "Dir::Etc::sourcelist=$apt/qemu.list" -o "Dir::Etc::sourceparts=$apt/none"
    -o "Dir::State::lists=$apt/lists" -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt"
    -o APT::Sandbox::User=root -o Debug::NoLocking=1)
  apt-get "${options[@]}" update && (cd "$apt" && apt-get "${options[@]}" download qemu-user) || return 1
  mkdir -p "$home/qemu"
  dpkg-deb --fsys-tarfile "$apt"/qemu-user_*.deb | tar -x -C "$home/qemu" --strip-components=3 ./usr/bin/qemu-aarch64
  rm -rf "$apt"
}
if ! has_sme2 "$(command -v qemu-aarch64-static || command -v qemu-aarch64)" && ! has_sme2 "$home/qemu/qemu-aarch64"; then
  rm -f "$home/qemu.missing"
  if ! newer_qemu >"$home/qemu.log" 2>&1 || ! has_sme2 "$home/qemu/qemu-aarch64"; then
    { tail -1 "$home/qemu.log"; echo "no newer QEMU could be had"; } | head -1 >"$home/qemu.missing"
  fi
fi
python=$(basename "$(ls -d "$home"/root/usr/bin/python3.*[0-9] | head -1)")

wanted=$(cat "$here/requirements.txt"; echo "$python")
if [ "$(cat "$home/site.done" 2>/dev/null)" != "$wanted" ]; then
  version=${python#python}
  rm -rf "$home/site" "$home/site.done"
  platforms=()
  for glibc in 2_36 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_aarch64"); done
  "${PYTHON:-python3}" -m pip install -qq --disable-pip-version-check --root-user-action=ignore \
    --target "$home/site" --no-deps --no-compile --only-binary=:all: --implementation cp --python-version "$version" --abi "cp${version/./}" --abi abi3 --abi none \
    "${platforms[@]}" --platform manylinux2014_aarch64 -r "$here/requirements.txt"
  bash "$here/compile.sh" -x '/(testing|models/(?!auto|llama|mixtral|deepseek_v2|qwen3_moe|gpt_oss))' \
    "$home"/site/{torch,transformers,numpy,sympy,hypothesis,_pytest}
  echo "$wanted" >"$home/site.done"
fi
echo "$home"
