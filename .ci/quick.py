"""Runs the tests that a change is most likely to break, in about a minute.

    python .ci/quick.py [--since REVISION] [PYTEST ARGUMENTS]

A change is what differs from a revision (default: HEAD), untracked files included.  First come tests that
were changed, then those that import a changed module, then those that import a module that does, and so on;
files of compiled ops count as the Python package of their folder.  One tiny model of each kind runs first,
whatever was changed.  Tests that do not begin within the time are left out, and counted as skipped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "lint"))
from imports import imports_of, modules  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 35
"""Time in which tests may begin: imports take some seconds before, and the last tests end after."""
FILES = 20
"""Most files of tests: to collect more takes longer than the tests that would still run."""
KINDS = (
    "tests/patching/test_parity.py::test_quantized_steps_run_natively_and_are_deterministic[llama]",
    "tests/patching/test_parity.py::test_quantized_steps_run_natively_and_are_deterministic[qwen3_moe]",
    "tests/patching/test_mla_models.py::test_quantized_plan_agrees_with_its_modules[deepseek_v2]",
    "tests/engine/test_recurrent_models.py::test_batched_and_chunked_bits_equal_those_alone[qwen3_5_moe_text]",
    "tests/patching/test_encoders.py::test_bfloat16_and_int4",
    "tests/patching/test_encoder_decoders.py::test_a_row_has_the_same_bits_alone_and_in_a_batch",
    "tests/engine/images/test_pictures.py::test_chat_takes_pictures",
)
"""A tiny model end to end of each kind: dense, experts, latent attention, hybrid, encoder, encoder and
decoder, images."""


def main() -> int:
    """Runs the tests; returns pytest's exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--since", default="HEAD", metavar="REVISION")
    options, further = parser.parse_known_args()
    changed = [ROOT / name for name in _changed(options.since)]
    chosen = nearest_tests(changed, imports_by_file())
    said = f"{len(changed)} changed files, {len(chosen)} files of tests that read them"
    print(f"{said}; the nearest {FILES} run" if len(chosen) > FILES else said, flush=True)
    names = [str(path.relative_to(ROOT)) for path in chosen[:FILES]]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    command += ["--no-loadscope-reorder", "--budget", str(SECONDS)]
    command += ["-m", "not slow and not model and not builds", *further, *KINDS, *names]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _changed(since: str) -> list[str]:
    """Returns the names of changed and new files that still exist."""
    listed = (("diff", "--name-only", "--diff-filter=d", since), ("ls-files", "-o", "--exclude-standard"))
    texts = (
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for command in listed
    )
    return sorted({name for text in texts for name in text.splitlines()})


def imports_by_file() -> dict[Path, set[Path]]:
    """Returns the files of this project that each Python file of the package and the tests imports."""
    known = modules(ROOT)
    for path in (ROOT / "tests").rglob("*.py"):
        known[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    return {
        path: {known[each.imported] for each in imports_of(module, path, known)} - {path}
        for module, path in known.items()
    }


def nearest_tests(changed: Iterable[Path], imports: Mapping[Path, set[Path]]) -> list[Path]:
    """Returns the test files that import changed files, directly or not, the nearest first."""
    importers: dict[Path, set[Path]] = {}
    for importer, imported in imports.items():
        for path in imported:
            importers.setdefault(path, set()).add(importer)
    reached = {path for each in changed for path in _python_files(each) if path in imports}
    ordered: list[Path] = []
    seen: set[Path] = set()
    while reached:
        seen |= reached
        tests = (path for path in reached if path.name.startswith("test_") and ROOT / "tests" in path.parents)
        ordered += sorted(tests, key=lambda path: path.stat().st_size)
        reached = {importer for path in reached for importer in importers.get(path, ())} - seen
    return ordered


def _python_files(path: Path) -> list[Path]:
    """Returns a Python file itself, or the package of a compiled op."""
    if path.suffix == ".py":
        return [path]
    return [path.parent / "__init__.py"] if ROOT / "ops" in path.parents else []


if __name__ == "__main__":
    sys.exit(main())
