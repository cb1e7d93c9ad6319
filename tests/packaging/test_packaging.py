"""Files of the installed package, needs of its library, and use outside the checkout."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists() or sys.platform != "linux", reason="needs a checkout on Linux"
)


def command(*args: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([str(a) for a in args], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built without network by what is installed."""
    pytest.importorskip("scikit_build_core")
    folder = tmp_path_factory.mktemp("wheel")
    flags = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", folder]
    command(sys.executable, "-m", "pip", "wheel", *flags, ROOT)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's files and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_serves_every_python(wheel: Path) -> None:
    assert wheel.name.startswith("torch_armllm-")
    assert "-py3-none-linux_" in wheel.name, wheel.name


def test_wheel_contains_only_the_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert all(top == "torch_armllm" or top.endswith(".dist-info") for top in tops), tops
    assert "torch_armllm/_ops.so" in names
    assert "torch_armllm/server/page/index.html" in names
    for package in ("ops", "passes"):
        for file in (ROOT / package).rglob("*.py"):
            inside = f"torch_armllm/{package}/{file.relative_to(ROOT / package).as_posix()}"
            assert inside in names
    wrong = [n for n in names if Path(n).suffix in {".cpp", ".h", ".txt"} or "__pycache__" in n]
    assert [n for n in wrong if ".dist-info/" not in n] == []
    assert sum(name.endswith(".so") for name in names) == 1


def test_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {n.split(".dist-info/")[1]: n for n in archive.namelist() if ".dist-info/" in n}
        metadata = archive.read(inside["METADATA"]).decode()
        materials = json.loads(archive.read(inside["sboms/torch_armllm.cdx.json"]))
        assert "torch_armllm/py.typed" in archive.namelist()
    assert {"licenses/LICENSE", "licenses/THIRD_PARTY_NOTICES.md"} <= set(inside)
    for field in (
        "Classifier: Typing :: Typed",
        "Project-URL: Source, https://",
        "Keywords: ",
        "Maintainer: ",
    ):
        assert f"\n{field}" in metadata
    assert [
        link for link in re.findall(r"\]\((.+?)\)", metadata) if not link.startswith(("https://", "#"))
    ] == []
    assert [c["name"] for c in materials["components"]] == ["marked", "dompurify", "libstdc++"]
    assert materials["metadata"]["component"]["version"] in wheel.name


def test_library_needs_only_the_stable_abi(installed: Path) -> None:
    if shutil.which("readelf") is None or shutil.which("nm") is None:
        pytest.skip("needs binutils")
    library = installed / "torch_armllm" / "_ops.so"
    dynamic = command("readelf", "--dynamic", "--wide", library)
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    system = ("libstdc++.", "libm.", "libgcc_s.", "libc.", "libpthread.", "ld-linux")
    assert "libtorch_cpu.so" in needed
    assert all(name == "libtorch_cpu.so" or name.startswith(system) for name in needed), needed
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic

    symbols = [line.split()[-1] for line in command("nm", "-D", "--undefined-only", library).splitlines()]
    unversioned = {
        s for s in symbols if "@" not in s and not s.startswith(("__cxa_finalize", "_ITM_", "__gmon"))
    }
    foreign = {s for s in unversioned if not s.startswith(("aoti_torch_", "torch_"))}
    assert not foreign, foreign
    assert not any("GOMP" in s or "omp_" in s or "kmp" in s for s in symbols)


@pytest.mark.parametrize("start", ["elsewhere", "checkout"])
def test_installed_package_works(installed: Path, tmp_path: Path, start: str) -> None:
    """Alone, and with the checkout's Python found first: both use the installed library."""
    code = (
        "import sys; sys.path[:0] = {paths!r}\n"
        "import torch, torch_armllm, torch_armllm.ops as ops\n"
        "print(torch_armllm.__file__); print(ops.__file__); print(ops.LIBRARY_PATH)\n"
        "print(ops.variants.machine().selected)\n"
    )
    checkout = start == "checkout"
    paths = ([str(ROOT)] if checkout else []) + [str(installed)]
    # -S: no site-packages hooks, which an editable install of this checkout would use to come first.
    torch_home = str(Path(__import__("torch").__file__).parent.parent)
    out = command(sys.executable, "-S", "-c", code.format(paths=[*paths, torch_home]), cwd=tmp_path)
    package, ops, library, variant = out.split("\n")[:4]
    home = ROOT if checkout else installed
    assert Path(package).is_relative_to(home)
    assert Path(ops).is_relative_to(home)
    if not checkout or not (ROOT / "torch_armllm" / "_ops.so").exists():
        assert Path(library) == installed / "torch_armllm" / "_ops.so"
    assert variant
