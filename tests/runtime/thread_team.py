"""Builds and runs thread_team_test.cpp under ThreadSanitizer.

python -m tests.runtime.thread_team [--runs 20000] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_FOLDER = Path(__file__).parent
_OPS = _FOLDER.parents[1] / "ops"
_CLOCK = "_ZNSt6chrono3_V212steady_clock3nowEv"  # std::chrono::steady_clock::now()


class Unavailable(Exception):
    """ThreadSanitizer cannot be used on this machine."""


def build(folder: Path) -> Path:
    """Compiles the program into a folder; returns its path.

    Raises:
        Unavailable: the compiler has no ThreadSanitizer.
        CalledProcessError: the program does not compile.
    """
    compiler, program = os.environ.get("CXX", "g++"), folder / "thread_team_test"
    sanitize = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread"]
    (folder / "empty.cpp").write_text("int main() {}")
    trial = [compiler, *sanitize, str(folder / "empty.cpp"), "-o", str(folder / "empty")]
    if subprocess.run(trial, capture_output=True).returncode:
        raise Unavailable(f"{compiler} cannot link ThreadSanitizer")
    sources = [*sorted(_FOLDER.glob("*.cpp")), _OPS / "runtime/task_set.cpp"]
    headers = [f"-I{path}" for path in (_FOLDER / "torch_stub", _OPS, _FOLDER)]
    link = [f"-Wl,--wrap={_CLOCK}", "-Wl,--wrap=pread", "-rdynamic", "-ldl"]
    warnings = ["-Wall", "-Wextra"]
    command = [compiler, *sanitize, *warnings, *headers, *map(str, sources), "-o", str(program), *link]
    subprocess.run(command, check=True)
    return program


def run(program: Path, runs: int, seed: int) -> str:
    """Runs the program; returns its output.

    Raises:
        Unavailable: this kernel places memory where ThreadSanitizer does not expect it.
        RuntimeError: a data race, or a wrong result.
    """
    command = [str(program), str(runs), str(seed)]
    # without random addresses, which some kernels place where ThreadSanitizer does not expect them
    for prefix in ([], ["setarch", platform.machine(), "-R"]):
        if prefix and shutil.which(prefix[0]) is None:
            break
        done = subprocess.run([*prefix, *command], capture_output=True, text=True)
        if "unexpected memory mapping" not in done.stderr:
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}")
            return done.stdout
    raise Unavailable("ThreadSanitizer does not run on this kernel: unexpected memory mapping")


def main() -> int:
    """Runs the program as often as the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(run(build(Path(folder)), options.runs, options.seed), end="")
        except (Unavailable, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
