"""ik_llama.cpp by its own benchmark programs: it has no Python interface."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from bench.peers.setup import Setup
from bench.peers.work import STEPS, Work

PROGRAMS = ("llama-bench", "llama-batched-bench")


class IkLlama:
    """An engine that measures a workload by a program, which loads the model anew for it.

    Args:
        path: GGUF file.
        threads: number of computing threads.
        programs: folder of `PROGRAMS`.
    """

    def __init__(self, path: Path, threads: int, programs: Path) -> None:
        self.path, self.threads, self.programs = path.resolve(), threads, programs.resolve()

    def ways(self, work: Work) -> list[str]:
        """Return the names of its settings: weights repacked while loading, or as they are in the file."""
        return ["repacked", "as stored"]

    def measure(self, work: Work, way: str, least: float) -> dict[str, float]:
        """Return tokens a second, of at least ``least`` seconds as far as the programs can repeat."""
        repack = way == "repacked"
        if work.kind == "prefill":
            return self._bench(repack, "-p", str(work.size), "-n", "0")
        if work.kind == "decode" and work.size == 1:
            return self._bench(repack, "-p", "0", "-n", "0", "-gp", f"{work.context},{STEPS}")
        if work.kind == "decode":
            return self._batched(repack, work)
        raise ValueError(f"its programs cannot measure {work.name}")

    def _bench(self, repack: bool, *tests: str) -> dict[str, float]:
        options = ["-r", "3", "-fmoe", "1", "-rtr", "1" if repack else "0", "-o", "json"]
        output = self._run("llama-bench", "-t", str(self.threads), *tests, *options).stdout
        (result,) = json.loads(output[output.index("[") :])
        return {"tok_s": float(result["avg_ts"])}

    def _batched(self, repack: bool, work: Work) -> dict[str, float]:
        cells = work.size * (work.context + STEPS) + 256
        shape = ["-npp", str(work.context), "-ntg", str(STEPS // 2), "-npl", str(work.size)]
        options = ["-t", str(self.threads), "-c", str(cells), *shape, *(["-rtr"] if repack else [])]
        output = self._run("llama-batched-bench", *options).stderr
        rows = [line.strip("|").split("|") for line in output.splitlines() if line.startswith("|")]
        names = [name.strip() for name in rows[0]]
        return {"tok_s": float(rows[-1][names.index("S_TG t/s")])}

    def _run(self, program: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.programs / program), "-m", str(self.path), *options]
        with tempfile.TemporaryDirectory() as folder:  # for the logs that they write
            result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}: {result.stderr[-400:]}")
        return result


def load(setup: Setup) -> IkLlama:
    """Load the engine."""
    assert setup.programs is not None
    return IkLlama(setup.gguf(), setup.threads, setup.programs)
