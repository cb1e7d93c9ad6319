"""Scripts and files of a release: symbols of old systems, rows of the matrix, and what is deployed."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from torch_armllm import ops
from torch_armllm._version import __version__
from torch_armllm.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / ".ci" / "release").exists(), reason="needs a checkout")

USES_NEW_SYMBOLS = """
#include <cmath>
#include <condition_variable>
#include <dlfcn.h>
#include <pthread.h>
#include <sstream>
using Lock = std::unique_lock<std::mutex>;
extern "C" void* used(double x, pthread_rwlock_t* shared, std::condition_variable& changed, Lock& lock) {
  std::ostringstream text;
  text << std::log(x);
  changed.wait(lock);
  pthread_rwlock_rdlock(shared);
  return dlsym(nullptr, text.str().c_str());
}
"""
"""All of these have a newer version in glibc 2.36 and GCC 12 than manylinux_2_28 has."""


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / "release" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "key"),
    [
        ("GLIBC_2.28", ("GLIBC", (2, 28))),
        ("GLIBCXX_3.4.24", ("GLIBCXX", (3, 4, 24))),
        ("GLIBC_PRIVATE", None),
        ("", None),
    ],
)
def test_symbol_versions_are_compared_by_number(version: str, key: object) -> None:
    assert script("stubs").version_key(version) == key


def test_newest_version_of_each_symbol_is_taken() -> None:
    found = [
        ("memcpy", "function", "GLIBC_2.2.5"),
        ("memcpy", "function", "GLIBC_2.14"),
        ("stdout", "object", "GLIBC_2.2.5"),
    ]
    assert script("stubs").newest(iter(found)) == {
        "memcpy": ("function", "GLIBC_2.14"),
        "stdout": ("object", "GLIBC_2.2.5"),
    }


def test_program_linked_with_stubs_needs_old_symbols_only(tmp_path: Path) -> None:
    if shutil.which("g++") is None or shutil.which("nm") is None or sys.platform != "linux":
        pytest.skip("needs g++ and binutils on Linux")
    (tmp_path / "a.cpp").write_text(USES_NEW_SYMBOLS)
    stubs = script("stubs")
    libraries = stubs.build(tmp_path / "stubs", "g++")
    output = tmp_path / "a.so"
    flags = ["-shared", "-fPIC", "-O1", "-nodefaultlibs", "-Wl,--exclude-libs,ALL"]
    subprocess.run(["g++", *flags, "-o", output, tmp_path / "a.cpp", *libraries], check=True)
    lines = subprocess.check_output(["nm", "-D", "--undefined-only", output], text=True).splitlines()
    versions = {line.rpartition("@")[2] for line in lines if "@" in line}
    keys = [key for key in map(stubs.version_key, versions) if key is not None and key[0] in stubs.NEWEST]
    assert len(keys) > 3
    assert [key for key in keys if key[1] > stubs.NEWEST[key[0]]] == []
    strong = [line for line in lines if line.split()[-2] == "U"]
    assert [line for line in strong if "@" not in line] == []


def test_functions_of_torch_that_the_library_calls_are_listed() -> None:
    """Of a family of functions, inlining decides which are called."""
    if shutil.which("nm") is None:
        pytest.skip("needs binutils")
    command = ["nm", "-D", "--undefined-only", ops.LIBRARY_PATH]
    lines = subprocess.check_output(command, text=True).splitlines()
    called = {name for line in lines if "@" not in (name := line.split()[-1]) and "torch_" in name}
    listed = set((ROOT / ".ci/release/symbols.txt").read_text().split())
    assert called and called - listed == set()
    assert len([name for name in listed if name.startswith("aoti_torch_memory_format_")]) == 4


def test_each_torch_has_a_build_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci" / "release"))
    wheel = script("wheel")
    commands: list[tuple[str, ...]] = []

    def record(*args: object, **_: object) -> str:
        commands.append(tuple(map(str, args)))
        raise SystemExit

    monkeypatch.setattr(wheel, "run", record)
    monkeypatch.setattr(wheel, "build_stubs", lambda *_: [])
    monkeypatch.setattr(wheel, "torch_headers", lambda: tmp_path)
    with pytest.raises(SystemExit):
        wheel.build_wheel("x86_64", "g++")
    (folder,) = (each for each in commands[0] if each.startswith("-Cbuild-dir="))
    assert folder.endswith(f"wheel-x86_64-torch-{wheel.TORCH}")


def test_outcome_of_a_row_names_what_failed() -> None:
    matrix = script("matrix")
    good = {"row": "3.11/2.13.0/5.21.0", "machine": "x86_64", "steps": {"import": {"seen": "avx2"}}}
    bad = {**good, "steps": {"import": {"seen": "avx2"}, "load": {"failed": "OSError: no"}}}
    skipped = {"row": "3.9/2.13.0/5.21.0", "skipped": "no Python 3.9 on this machine"}
    assert matrix.outcome(good) == "all steps passed"
    assert matrix.outcome(bad) == "load failed: OSError: no"
    table = matrix.markdown([good, skipped]).splitlines()
    assert table[2:] == [
        "| 3.11 | 2.13.0 | 5.21.0 | x86_64 | all steps passed |",
        "| 3.9 | 2.13.0 | 5.21.0 |  | not run: no Python 3.9 on this machine |",
    ]


def test_commands_of_the_unit_and_the_image_are_valid() -> None:
    unit = (ROOT / "docs/deploy/armllm.service").read_text().replace("\\\n", " ")
    command = re.search(r"^ExecStart=\S+/torch-armllm (.*)$", unit, re.M)
    image = re.search(r"^CMD \[(.*)\]$", (ROOT / "Dockerfile").read_text(), re.M)
    assert command is not None and image is not None
    for arguments in (shlex.split(command[1]), re.findall(r'"(.*?)"', image[1])):
        assert build_parser().parse_args(arguments).host in ("127.0.0.1", "0.0.0.0")


def test_version_is_the_same_everywhere() -> None:
    assert f'\nversion = "{__version__}"\n' in (ROOT / "pyproject.toml").read_text()
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_notices_and_list_of_materials_name_the_libraries_of_the_page() -> None:
    page = (ROOT / "torch_armllm/server/page/libraries/README.md").read_text()
    versions = dict(re.findall(r"\| (marked|DOMPurify) ([\d.]+),", page))
    assert set(versions) == {"marked", "DOMPurify"}
    for file in ("THIRD_PARTY_NOTICES.md", "ops/sbom.cdx.json.in"):
        text = (ROOT / file).read_text()
        assert [version for version in versions.values() if version not in text] == [], file
