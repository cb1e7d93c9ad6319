"""The layout for the Kernel Hub: it is complete, and its extension builds and computes the same bits."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.packaging.test_release import ROOT, script
from torch_armllm import ops

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
pytestmark = pytest.mark.skipif(not (ROOT / ".ci" / "release").exists(), reason="needs a checkout")

EXTENSION = "_armllm_cpu_test"
TORCH = Path(torch.__file__).parent / "include"


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "armllm"
    script("kernels_hub").write(folder, "someone/armllm")
    return folder


def kernel(layout: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((layout / "build.toml").read_text())["kernel"]["armllm_cpu"]
    return found


def test_variants_are_those_of_the_build(layout: Path) -> None:
    """Every variant of the C++ registry has its sources, and flags that the build gives it."""
    declared = re.findall(
        r"ARMLLM_DECLARE_VARIANT\((\w+)\)\n", (ROOT / "ops/dispatch/variants.cpp").read_text()
    )
    variants = script("kernels_hub").variants()
    assert set(variants) == set(declared)
    assert variants["avx2"].flags == ("-mavx2", "-mfma", "-mf16c")
    assert variants["avx512bf16"].base == "avx512" and variants["avx512bf16"].architecture == "x86_64"
    assert variants["sve"].flags == ("-march=armv8.2-a+fp16+sve",)
    assert (variants["sve"].architecture, variants["scalar"].architecture) == ("aarch64", None)
    dotprod = {path.name for path in variants["dotprod"].sources}
    assert "attention.simd.cpp" in dotprod and "norm.simd.cpp" not in dotprod


def test_variants_define_the_macros_that_kernels_ask_for() -> None:
    """A macro that is missing would choose slower code, or none."""
    hub = script("kernels_hub")
    defined = {macro for variant in hub.variants().values() for macro in hub.feature_macros(variant)}
    asked = set()
    for path in (ROOT / "ops").rglob("*"):
        if path.suffix in (".cpp", ".h"):
            asked |= set(re.findall(r"\b__(?:AVX|ARM_FEATURE|FMA|F16C)\w*\b", path.read_text()))
    assert asked <= defined
    assert "__AVX512BF16__" in hub.feature_macros(hub.variants()["amx"])


def test_configuration_names_all_sources(layout: Path) -> None:
    sources = kernel(layout)["src"]
    assert all((layout / source).is_file() for source in sources) and len(sources) == len(set(sources))
    own = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ops").rglob("*")
        if path.suffix in (".cpp", ".h", ".def")
    }
    compiled = {name for name in own if name.endswith(".cpp") and "/kernels/" not in name}
    compiled -= {"ops/schemas.cpp", *(name for name in own if name.endswith(".simd.cpp"))}
    assert compiled <= set(sources) and {name for name in own if not name.endswith(".cpp")} <= set(sources)
    included = {
        line.split('"')[1]
        for path in layout.glob("variants/*/*.cpp")
        for line in path.read_text().splitlines()
        if line.startswith("#include")
    }
    kernels = {name.removeprefix("ops/") for name in own if name.endswith(".cpp")} - {
        name.removeprefix("ops/") for name in (*compiled, "ops/schemas.cpp")
    }
    assert included == kernels
    assert {path.relative_to(layout).as_posix() for path in layout.glob("variants/*/*.cpp")} <= set(sources)


def test_ops_are_registered_in_the_namespace_of_a_build(layout: Path) -> None:
    for path in layout.rglob("*.cpp"):
        assert "STABLE_TORCH_LIBRARY(armllm" not in path.read_text(), path
        assert "STABLE_TORCH_LIBRARY_IMPL(armllm" not in path.read_text(), path
    package = layout / "torch-ext" / "armllm"
    assert len(list(package.rglob("*.py"))) == len(list((ROOT / "ops").rglob("*.py")))  # dtypes for loader
    for path in package.rglob("*.py"):
        text = path.read_text()
        compile(text, str(path), "exec")
        assert not re.search(r'import torch_armllm|from torch_armllm|torch\.ops\.armllm|"armllm', text), path


def test_configuration_is_valid(layout: Path) -> None:
    rust = pytest.importorskip("kernels._rust", reason="needs the package kernels")
    assert rust.Build.open(layout).general.backends == [rust.Backend.CPU]
    (layout / "build.toml").write_text((layout / "build.toml").read_text() + "other = 1\n")
    with pytest.raises(ValueError):
        rust.Build.open(layout)


@pytest.mark.parametrize("compiler", ["g++", "aarch64-linux-gnu-g++"])
def test_variants_compile(layout: Path, compiler: str) -> None:
    """Sources of each variant of an architecture, with the instructions that its pragma names."""
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    flags = [*kernel(layout)["cxx-flags"], "-std=c++17", "-fsyntax-only", "-Werror", "-Wno-unknown-pragmas"]
    for folder in sorted((layout / "variants").iterdir()):
        sources = [str(path) for path in sorted(folder.iterdir()) if path.stem in ("quantize_row", "dense")]
        command = [compiler, *flags, f"-I{layout / 'ops'}", *sources]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.builds
def test_extension_builds_and_computes_the_same_bits(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiles all of it, which takes many minutes, and loads it beside the ops of this package."""
    hub = build(layout, tmp_path, monkeypatch)
    assert hub.variants.machine().tables == ops.variants.machine().tables
    x, weight = torch.randn(5, 96), torch.randn(64, 96)
    q = torch.randint(-8, 8, (64, 96), dtype=torch.int8)
    multipliers, scales = torch.randint(1, 17, (64, 3), dtype=torch.uint8), torch.rand(64) + 0.5
    packed = [each.linear.pack_int4(q, multipliers, scales) for each in (hub, ops)]
    assert torch.equal(*packed)
    for name in ops.variants.machine().runnable:
        with hub.variants.use(name), ops.variants.use(name):
            norms = [each.norm.rms_norm(x, weight[0], 1e-6) for each in (hub, ops)]
            rows = [each.linear.int4_linear(x, packed[0], 64, "g32i") for each in (hub, ops)]
            assert torch.equal(*norms) and torch.equal(*rows), name
    fake = torch.compile(lambda a: hub.norm.rms_norm(a, weight[0], 1e-6), backend="eager", fullgraph=True)
    assert torch.equal(fake(x), norms[0])


def build(layout: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Builds the extension beside the layout's Python files, as kernel-builder does, and imports them."""
    configuration = kernel(layout)
    sources = [f"{layout}/{source}" for source in configuration["src"] if source.endswith(".cpp")]
    sources.append(f"{layout}/torch-ext/torch_binding.cpp")
    settings = {
        "SOURCES": ";".join(sources),
        "FLAGS": ";".join(configuration["cxx-flags"]),
        "LAYOUT": str(layout),
        "NAME": EXTENSION,
        "INCLUDES": f"{TORCH};{sysconfig.get_paths()['include']}",
        "TORCH": str(TORCH.parent / "lib" / "libtorch_cpu.so"),
    }
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    project = Path(__file__).parent / "kernels_hub"
    for command in (
        ["cmake", "-G", "Ninja", "-S", str(project), "-B", str(folder / "build"), *defines],
        ["cmake", "--build", str(folder / "build")],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    package = folder / "armllm"
    shutil.copytree(layout / "torch-ext" / "armllm", package)
    shutil.copy(folder / "build" / f"{EXTENSION}.abi3.so", package)
    (package / "_ops.py").write_text(
        f"import torch\nfrom . import {EXTENSION}\nops = torch.ops.{EXTENSION}\n"
        f"def add_op_namespace_prefix(name):\n    return f'{EXTENSION}::{{name}}'\n"
    )
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("armllm", None)
    return importlib.import_module("armllm")
