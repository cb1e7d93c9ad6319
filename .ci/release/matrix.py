"""The wheel in clean environments of several versions of Python, torch and transformers.

    python .ci/release/matrix.py dist/*.whl              all rows whose Python is on this machine
    python .ci/release/matrix.py dist/*.whl --rows 3.11/2.13.0+cpu/5.21.0 ...
    python .ci/release/matrix.py dist/*.whl --markdown   the table for docs/reference/compatibility.md

A row is Python/torch/transformers, where `newest` is what the index has today.  Each gets an environment of
its own in build/matrix, with the wheel, its extra `serve` and nothing of the checkout; `first_use.py` runs
there without a compiler.  The environment is removed afterwards.  On x86-64 the default index has torch with
CUDA, several gigabytes a row: name an index of CPU builds with TORCH_INDEX where there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "matrix"
ROWS = (
    "3.10/2.10.0/5.21.0",  # the oldest of each
    "3.11/2.13.0/5.21.0",
    "3.11/2.13.0/5.24.0",  # the pinned ones: .ci/constraints.txt
    "3.12/2.12.1/5.23.0",
    "3.13/2.15.0/5.24.0",
    "3.14/newest/newest",
)


def interpreter(version: str) -> str | None:
    """The program of a Python version, where this machine has it."""
    for program in (f"python{version}", sys.executable):
        found = shutil.which(program)
        if found:
            said = subprocess.run(
                [found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                capture_output=True,
                text=True,
            )
            if said.stdout.strip() == version:
                return found
    return None


def requirement(package: str, version: str) -> str:
    """The requirement that pip gets."""
    return package if version == "newest" else f"{package}=={version}"


def try_row(wheel: Path, row: str, keep: bool) -> dict[str, Any]:
    """Outcome of one row: versions and steps, or the reason why the environment could not be made."""
    python, torch, transformers = row.split("/")
    program = interpreter(python)
    if program is None:
        return {"row": row, "skipped": f"no Python {python} on this machine"}
    home = WORK / row.replace("/", "-")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    begin = time.monotonic()
    try:
        subprocess.check_call([program, "-m", "venv", home / "env"])
        pip = [home / "env/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        index = os.environ.get("TORCH_INDEX")
        caches = ["--no-cache-dir"]
        torch_only = [*(["--index-url", index] if index else []), *caches, requirement("torch", torch)]
        for wanted in (
            torch_only,
            [
                *caches,
                requirement("transformers", transformers),
                f"{wheel}[serve]",
                requirement("torch", torch),
            ],
        ):
            done = subprocess.run([*map(str, pip), *wanted], capture_output=True, text=True)
            if done.returncode:
                return {"row": row, "skipped": done.stderr.strip().splitlines()[-1]}
        size = sum(f.stat().st_size for f in (home / "env").rglob("*") if f.is_file() and not f.is_symlink())
        installed = time.monotonic() - begin
        done = subprocess.run(
            [home / "env/bin/python", Path(__file__).with_name("first_use.py")],
            cwd=home,
            env={"PATH": str(home / "env/bin"), "HOME": str(home), "HF_HUB_OFFLINE": "1", "LANG": "C.UTF-8"},
            capture_output=True,
            text=True,
        )
        try:
            report = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            report = {"steps": {"start": {"failed": (done.stdout + done.stderr)[-2000:]}}}
        return {"row": row, "megabytes": size >> 20, "install_seconds": round(installed), **report}
    finally:
        if not keep:
            shutil.rmtree(home, ignore_errors=True)


def outcome(result: dict[str, Any]) -> str:
    """A few words on a row."""
    if "skipped" in result:
        return f"not run: {result['skipped']}"
    failed = {name: step["failed"] for name, step in result["steps"].items() if "failed" in step}
    return "; ".join(f"{name} failed: {text}" for name, text in failed.items()) or "all steps passed"


def markdown(results: list[dict[str, Any]]) -> str:
    """The results as a table."""
    lines = ["| Python | torch | transformers | machine | outcome |", "|---|---|---|---|---|"]
    for result in results:
        python, torch, transformers = result["row"].split("/")
        found = [
            result.get("python", python),
            result.get("torch", torch),
            result.get("transformers", transformers),
        ]
        lines.append(f"| {' | '.join(found)} | {result.get('machine', '')} | {outcome(result)} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the rows; returns 1 if a step failed in one that could be set up, or if none could."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, nargs="+", help="built wheels; the one of this machine is taken")
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="PYTHON/TORCH/TRANSFORMERS")
    parser.add_argument("--markdown", action="store_true", help="print a table in place of JSON")
    parser.add_argument("--keep", action="store_true", help="keep the environments in build/matrix")
    options = parser.parse_args()
    machine = os.uname().machine
    wheels = [wheel.resolve() for wheel in options.wheel if wheel.name.endswith(f"_{machine}.whl")]
    if len(wheels) != 1:
        parser.error(
            f"one wheel for {machine} was expected, {len(wheels)} were given; run `make wheel` first"
        )
    results = []
    for row in options.rows:
        results.append(try_row(wheels[0], row, options.keep))
        print(f"{row}: {outcome(results[-1])}", file=sys.stderr, flush=True)
    print(markdown(results) if options.markdown else json.dumps(results, indent=1))
    ran = [result for result in results if "skipped" not in result]
    return 0 if ran and all(outcome(result) == "all steps passed" for result in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
