"""Builds, repairs and checks the wheel of one platform, and the source distribution, with build tools alone.

    python .ci/release/wheel.py                      a manylinux_2_28 wheel of this machine, into dist/
    python .ci/release/wheel.py --arch aarch64       one for Arm, by the cross compiler (tests/arm/setup.sh)
    python .ci/release/wheel.py --sdist              the source distribution
    python .ci/release/wheel.py --check FILE ...     checks finished files again

`make wheel` runs it in an environment that has `.ci/release/requirements.txt` and nothing else: of torch only
the headers are needed, and they are taken out of its smallest wheel.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from stubs import build as build_stubs

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "release"
DIST = ROOT / "dist"
TORCH = "2.10.0"
"""The oldest version of torch that is supported: its headers are compiled against."""
PLATFORM = "manylinux_2_28"
SYMBOLS = Path(__file__).with_name("symbols.txt")
"""All functions of torch that the library may call, one a line; the compiler inlines some of a family."""
SYSTEM = re.compile(r"lib(torch_cpu|stdc\+\+|gcc_s|m|c|dl|pthread)\.so|ld-linux")
"""Libraries that every system with torch has."""
SIZE = 8 << 20
"""Bytes that a wheel may have."""
MODULES = Path(sys.executable).parent


def run(*args: str | Path, env: dict[str, str] | None = None) -> str:
    """Output of a command; ends the program with what it printed if it fails."""
    done = subprocess.run(
        [str(a) for a in args],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{MODULES}{os.pathsep}{os.environ['PATH']}", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(map(str, args))}: exit status {done.returncode}")
    return done.stdout


def torch_headers() -> Path:
    """The folder of torch's headers: the same for every platform, and its Arm wheel is the smallest."""
    home = WORK / f"torch-{TORCH}"
    include = home / "torch" / "include"
    if not include.exists():
        only = ["--only-binary=:all:", "--platform", f"{PLATFORM}_aarch64", "--python-version", "3.11"]
        run(sys.executable, "-m", "pip", "download", "--no-deps", *only, "--dest", home, f"torch=={TORCH}")
        (wheel,) = home.glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                home, [name for name in archive.namelist() if name.startswith("torch/include/torch/")]
            )
        wheel.unlink()
    return include


def build_wheel(arch: str, cxx: str) -> Path:
    """Builds a wheel for an architecture, linked against the libraries of an old system, and repairs it."""
    libraries = ";".join(str(path) for path in build_stubs(WORK / f"stubs-{arch}", cxx))
    settings = {
        "build-dir": str(ROOT / "build" / f"wheel-{arch}-torch-{TORCH}"),
        "cmake.define.ARMLLM_TORCH_INCLUDE": str(torch_headers()),
        "cmake.define.ARMLLM_LINK_LIBRARIES": libraries,
        "cmake.define.CMAKE_CXX_COMPILER": cxx,
    }
    env = {}
    if arch != platform.machine():
        settings["cmake.define.CMAKE_TOOLCHAIN_FILE"] = str(ROOT / "tests" / "arm" / f"{arch}.cmake")
        env["_PYTHON_HOST_PLATFORM"] = f"linux-{arch}"
    fresh = WORK / f"wheel-{arch}"
    for old in fresh.glob("*.whl"):
        old.unlink()
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"),
        *(f"-C{name}={value}" for name, value in settings.items()),
        *("--outdir", fresh),
        env=env,
    )
    (built,) = fresh.glob("*.whl")
    for old in DIST.glob(f"torch_armllm-*_{arch}.whl"):
        old.unlink()
    if arch == platform.machine():
        repair = ["--only-plat", "--plat", f"{PLATFORM}_{arch}", "--exclude", "libtorch_cpu.so"]
        run(sys.executable, "-m", "auditwheel", "repair", *repair, "--wheel-dir", DIST, built)
    else:  # auditwheel repairs for its own machine alone; nothing has to be copied in
        run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", f"{PLATFORM}_{arch}", built)
        DIST.mkdir(exist_ok=True)
        (tagged,) = fresh.glob("*.whl")
        tagged.rename(DIST / tagged.name)
    (wheel,) = DIST.glob(f"torch_armllm-*_{arch}.whl")
    return wheel


def build_sdist() -> Path:
    """Builds the source distribution."""
    run(
        *(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--skip-dependency-check"),
        *("--outdir", DIST),
    )
    return max(DIST.glob("torch_armllm-*.tar.gz"), key=lambda path: path.stat().st_mtime)


def undefined(library: Path) -> list[str]:
    """Names of the symbols that a library expects from others, with their versions."""
    lines = run("nm", "-D", "--undefined-only", "--with-symbol-versions", library).splitlines()
    return [line.split()[-1] for line in lines if line.split()[-2] != "w"]


def needed(library: Path) -> set[str]:
    """Names of the libraries that a library loads."""
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "--dynamic", "--wide", library)))


def complaints(wheel: Path) -> list[str]:
    """Everything about a wheel that may not be published."""
    found = []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        folder = WORK / "checked" / wheel.stem
        archive.extract("torch_armllm/_ops.so", folder)
    for part in ("py.typed", "_ops.so", "server/page/index.html", "ops/__init__.py", "passes/__init__.py"):
        if f"torch_armllm/{part}" not in names:
            found.append(f"torch_armllm/{part} is missing")
    for part in ("licenses/LICENSE", "licenses/THIRD_PARTY_NOTICES.md", "sboms/torch_armllm.cdx.json"):
        if not any(name.endswith(f".dist-info/{part}") for name in names):
            found.append(f"{part} is missing among the metadata")
    if wheel.name.split("-")[2:4] != ["py3", "none"]:
        found.append(f"{wheel.name} is not for every Python: py3-none was expected")
    if wheel.stat().st_size > SIZE:
        found.append(f"{wheel.stat().st_size} bytes, at most {SIZE}")
    library = folder / "torch_armllm" / "_ops.so"
    found += [f"_ops.so needs {name}" for name in needed(library) if not SYSTEM.match(name)]
    allowed = set(SYMBOLS.read_text().split())
    plain = [name for name in undefined(library) if "@" not in name]
    found += [f"symbol {name} is not in {SYMBOLS.name}" for name in plain if name not in allowed]
    return found


def check(files: list[Path]) -> None:
    """Checks finished files; ends the program where one may not be published."""
    print(run(sys.executable, "-m", "twine", "check", "--strict", *files).strip())
    found = []
    for wheel in (file for file in files if file.suffix == ".whl"):
        print(run("check-wheel-contents", wheel).strip())
        shown = run(sys.executable, "-m", "auditwheel", "show", wheel)
        needs = re.search(r'platform tag to "manylinux_(\d+)_(\d+)_', " ".join(shown.split()))
        if needs is None or (int(needs[1]), int(needs[2])) > (2, 28):
            found.append(f"{wheel.name}: auditwheel does not call it {PLATFORM}:\n{shown}")
        found += [f"{wheel.name}: {complaint}" for complaint in complaints(wheel)]
    if found:
        sys.exit("\n".join(found))
    for file in files:
        print(f"{file.name}: {file.stat().st_size >> 10} KiB")


def main() -> None:
    """Builds what was asked for and checks it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default=platform.machine(), choices=["x86_64", "aarch64"])
    parser.add_argument("--sdist", action="store_true", help="build the source distribution, too")
    parser.add_argument(
        "--check", type=Path, nargs="+", metavar="FILE", help="build nothing, check these files"
    )
    options = parser.parse_args()
    if options.check:
        return check(options.check)
    native = options.arch == platform.machine()
    cxx = os.environ.get("CXX", "g++") if native else f"{options.arch}-linux-gnu-g++"
    files = [build_wheel(options.arch, cxx)]
    if options.sdist:
        files.append(build_sdist())
    return check(files)


if __name__ == "__main__":
    main()
