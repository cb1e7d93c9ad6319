"""Everything that an engine needs to load a model of the comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.peers.shapes import Shape


def family(engine: str) -> str:
    """Return an engine's name without the recipe that may follow: ``ours`` of ``ours:g32i``."""
    return engine.partition(":")[0]


@dataclass(frozen=True)
class Setup:
    """An engine's model and limits.

    Attributes:
        engine: name on the command line.
        shape: the model.
        threads: number of computing threads.
        cache: folder where models are kept.
        programs: folder of the engine's programs, if it is not a library.
    """

    engine: str
    shape: Shape
    threads: int
    cache: Path
    programs: Path | None = None

    def gguf(self) -> Path:
        """Return the ``Q4_0`` file of the model with random weights; the first call writes it."""
        from bench.gguf_writer import write_random

        path = self.cache / self.shape.name / "q4_0.gguf"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(".new")
            write_random(scratch, self.shape)
            scratch.rename(path)
        return path
