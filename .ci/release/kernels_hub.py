"""Lays the ops out as kernel-builder reads them, for the Kernel Hub of Hugging Face.

    python .ci/release/kernels_hub.py [--output build/kernels-hub] [--repo-id NAME/armllm]

kernel-builder has one set of compiler flags for a source, and none for one architecture alone.  A source of a
kernel variant is therefore a file of its own, which sets the instructions of its variant by a pragma, and is
empty on other architectures.  Ops are registered in the namespace that kernel-builder makes for each build.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OPS = ROOT / "ops"
NAME = "armllm"
VERSION = 1
"""The hub's number of the interface of these ops; a change that breaks callers raises it."""
OLDEST_TORCH = "2.10"
MACROS = {"x86_64": "__x86_64__", "aarch64": "__aarch64__"}
ARM_MACROS = {
    "bf16": "__ARM_FEATURE_BF16_VECTOR_ARITHMETIC",
    "dotprod": "__ARM_FEATURE_DOTPROD",
    "fp16": "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC",
    "i8mm": "__ARM_FEATURE_MATMUL_INT8",
    "sve": "__ARM_FEATURE_SVE",
}
"""Macros of the extensions of Arm by their names in flags; those of x86 have the names of flags."""
FLAGS = ("-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-attributes")
CARD = """---
library_name: kernels
license: apache-2.0
---

Ops of [torch_armllm](https://github.com/torch-armllm/torch-armllm) for Arm and x86-64 CPUs: linear layers of
INT4 and INT8 weights, paged attention over int8 and bfloat16 caches, mixtures of experts, recurrent layers,
norms and sampling. Each picks the kernel of the CPU's best instructions when it is called.

```python
from kernels import get_kernel

armllm = get_kernel("{repo_id}", version={version})
y = armllm.norm.rms_norm(x, weight, 1e-6)
```
"""
FLAKE = """{
  description = "Ops of torch_armllm";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""
CONFTEST = '''"""The kernel as it is installed by kernel-builder, or from a folder of the environment."""

import pytest


@pytest.fixture
def armllm():
    import armllm as kernel

    return kernel
'''
TEST = '''"""Ops give the results of their float32 references."""

import pytest
import torch


@pytest.mark.kernels_ci
def test_rms_norm(armllm):
    x, weight = torch.randn(3, 64), torch.randn(64)
    torch.testing.assert_close(
        armllm.norm.rms_norm(x, weight, 1e-6), armllm.norm.reference_rms_norm(x, weight, 1e-6)
    )


@pytest.mark.kernels_ci
def test_every_variant_gives_the_same_bits(armllm):
    x, weight = torch.randn(3, 100), torch.randn(100)
    results = []
    for variant in armllm.variants.machine().runnable:
        with armllm.variants.use(variant):
            results.append(armllm.norm.rms_norm(x, weight, 1e-6))
    assert all(torch.equal(results[0], each) for each in results)
'''


class Variant(NamedTuple):
    """A kernel variant: its architecture (None: all), flags, the variant whose code it shares, sources."""

    architecture: str | None
    flags: tuple[str, ...]
    base: str | None
    sources: tuple[Path, ...]


def variants() -> dict[str, Variant]:
    """Returns the variants that `ops/CMakeLists.txt` names, with their sources, relative to `ops`."""
    text = re.sub(r"#.*", "", (OPS / "CMakeLists.txt").read_text())
    lists: dict[str, list[str]] = {}
    found: dict[str, str | None] = {"scalar": None}
    architecture = None
    for condition, name, values in re.findall(
        r"CMAKE_SYSTEM_PROCESSOR MATCHES \"\^\((\w+)\|[^\"]*\"|\bset\((\w+)([^()]*)\)", text
    ):
        architecture = condition or architecture
        words = re.sub(r"\$\{(\w+)\}", lambda used: " ".join(lists.get(used[1], [])), values).split()
        lists[name] = words
        if name.startswith("FLAGS_"):
            found[name.removeprefix("FLAGS_")] = architecture
    shared = sorted(path.relative_to(OPS) for path in OPS.glob("*/*.simd.cpp"))
    result = {}
    for name, of in found.items():
        stems = lists.get(f"SIMD_{name}")
        own = sorted(path.relative_to(OPS) for path in OPS.rglob(f"kernels/**/*_{name}.cpp"))
        sources = [path for path in shared if stems is None or path.name.partition(".")[0] in stems]
        base = lists.get(f"IS_{name}", [None])[0]
        result[name] = Variant(of, tuple(lists.get(f"FLAGS_{name}", ())), base, (*sources, *own))
    return result


def variant_source(name: str, variant: Variant, source: Path) -> str:
    """Returns a file that compiles a source for a variant, and is empty on other architectures."""
    macros = feature_macros(variant)
    targets = [re.sub(r"^-m", "", flag) for flag in variant.flags if flag.startswith("-m")]
    lines = [f'#pragma GCC diagnostic ignored "-W{f[5:]}"' for f in variant.flags if f.startswith("-Wno-")]
    if targets:
        lines.append(f'#pragma GCC target("{",".join(targets)}")')
    for macro in macros:  # g++ reads the lines of a file before it heeds the pragma
        lines += [f"#ifndef {macro}", f"#define {macro} 1", "#endif"]
    lines += [f"#define ARMLLM_VARIANT {name}", f"#define ARMLLM_VARIANT_{name} 1"]
    if variant.base is not None:
        lines.append(f"#define ARMLLM_VARIANT_{variant.base} 1")
    lines.append(f'#include "{source}"')
    if variant.architecture is not None:
        lines = [f"#if defined({MACROS[variant.architecture]})", *lines, "#endif"]
    return "\n".join(lines) + "\n"


def feature_macros(variant: Variant) -> list[str]:
    """Returns the macros that a compiler defines for a variant's flags."""
    if variant.architecture == "x86_64":
        names = [flag[2:] for flag in variant.flags if flag.startswith("-m") and "=" not in flag]
        return [f"__{name.upper()}__" for name in (*(["avx"] if "avx2" in names else []), *names)]
    extensions = [name for flag in variant.flags for name in flag.split("+")[1:]]
    macros = [ARM_MACROS[name] for name in extensions]
    return macros + (["__ARM_FEATURE_SVE_MATMUL_INT8"] if {"sve", "i8mm"} <= set(extensions) else [])


def registered(text: str) -> str:
    """Returns C++ whose ops are registered in the namespace of a build."""
    changed, count = re.subn(
        r"STABLE_TORCH_LIBRARY(_IMPL)?\(armllm,", r"STABLE_TORCH_LIBRARY\1_EXPAND(TORCH_EXTENSION_NAME,", text
    )
    return f'#include "registration.h"\n{changed}' if count else text


def relative(text: str, depth: int) -> str:
    """Returns a Python module with relative imports, and with the ops of a build.

    Args:
        text: of a module of `ops`.
        depth: number of folders above it, the package included.
    """
    here = "." * depth
    text = re.sub(r"from torch_armllm\.ops import loader\n+LIBRARY_PATH = .*\nLIBRARY = .*\n+", "", text)
    text = re.sub(r'    "LIBRARY(_PATH)?",\n|import ctypes\n', "", text)
    text = re.sub(r"from torch_armllm\.(?:ops|system)\.", f"from {here}", text)
    text = re.sub(r"from torch_armllm\.ops import", f"from {here} import", text)
    text = text.replace("torch_armllm.ops", NAME).replace("``torch.ops.armllm``", "a kernel of the hub")
    text, uses = re.subn(r"torch\.ops\.armllm(?=[.,])", "_native", text)
    text, fakes = re.subn(r'register_fake\(f"armllm::\{name\}"', "register_fake(_prefixed(name)", text)
    library = 'torch.library.Library("armllm", "IMPL")'
    fakes += text.count(library)
    text = text.replace(library, 'torch.library.Library(_prefixed("").removesuffix("::"), "IMPL")')
    names = [
        *(["ops as _native"] if uses else []),
        *(["add_op_namespace_prefix as _prefixed"] if fakes else []),
    ]
    if names:
        line = f"from {here}_ops import {', '.join(names)}\n"
        text = re.sub(r"(?m)^import torch\n", f"import torch\n\n{line}", text, count=1)
    return text


def build_toml(repo_id: str, sources: list[str]) -> str:
    """Returns kernel-builder's configuration."""

    def listed(values: list[str]) -> str:
        return "".join(f'  "{value}",\n' for value in values)

    return (
        f'[general]\nname = "{NAME}"\nversion = {VERSION}\nedition = 5\nlicense = "Apache-2.0"\n'
        f'backends = ["cpu"]\n\n[general.hub]\nrepo-id = "{repo_id}"\n\n'
        '[torch]\nsrc = ["torch-ext/torch_binding.cpp"]\ninclude = ["torch-ext", "ops"]\n\n'
        f'[torch.stable-abi]\ncpu = "{OLDEST_TORCH}"\n\n'
        f'[kernel.{NAME}_cpu]\nbackend = "cpu"\ndepends = ["torch"]\ninclude = ["ops", "torch-ext"]\n'
        f"cxx-flags = [\n{listed(list(FLAGS))}]\nsrc = [\n{listed(sources)}]\n"
    )


def write(output: Path, repo_id: str) -> None:
    """Writes the layout into a folder, whose earlier contents are lost."""
    shutil.rmtree(output, ignore_errors=True)
    sources = []
    for path, text in files():
        target = output / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        if target.suffix in (".cpp", ".h", ".def") and path.parts[0] != "torch-ext":
            sources.append(path.as_posix())
    compiled = [each for each in sources if not each.endswith(".simd.cpp") and not _is_variant(each)]
    (output / "build.toml").write_text(build_toml(repo_id, compiled))
    (output / "CARD.md").write_text(CARD.format(repo_id=repo_id, version=VERSION))
    shutil.copy(ROOT / "LICENSE", output)


def files() -> Iterator[tuple[Path, str]]:
    """Yields the generated files but `build.toml` and the card, as paths below the output and their texts."""
    schemas = registered((OPS / "schemas.cpp").read_text())
    yield Path("torch-ext/torch_binding.cpp"), f"{schemas}\nREGISTER_EXTENSION(TORCH_EXTENSION_NAME)\n"
    for path in sorted([*OPS.rglob("*.cpp"), *OPS.rglob("*.h"), *OPS.rglob("*.def")]):
        if path.name != "schemas.cpp":
            yield Path("ops") / path.relative_to(OPS), registered(path.read_text())
    for name, variant in variants().items():
        for source in variant.sources:
            stem = source.name.removesuffix(".cpp").removesuffix(".simd").removesuffix(f"_{name}")
            yield Path("variants") / name / f"{stem}.cpp", variant_source(name, variant, source)
    package = Path("torch-ext") / NAME
    for path in sorted(OPS.rglob("*.py")):
        if path.name != "loader.py":
            module = path.relative_to(OPS)
            yield package / module, relative(path.read_text(), len(module.parts))
    yield package / "dtypes.py", (ROOT / "torch_armllm" / "system" / "dtypes.py").read_text()
    yield Path("tests/conftest.py"), CONFTEST
    yield Path("tests/test_ops.py"), TEST
    yield Path("flake.nix"), FLAKE


def _is_variant(source: str) -> bool:
    """True for a kernel that the files of `variants` include."""
    return source.startswith("ops/") and "/kernels/" in source and source.endswith(".cpp")


def main() -> None:
    """Writes the layout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "kernels-hub")
    parser.add_argument("--repo-id", default="torch-armllm/armllm", help="repository on the hub")
    options = parser.parse_args()
    write(options.output, options.repo_id)
    print(f"{options.output}: kernel-builder build-and-upload there")


if __name__ == "__main__":
    main()
