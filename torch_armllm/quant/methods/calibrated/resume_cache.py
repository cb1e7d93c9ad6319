"""A folder of finished layers, from which an interrupted run resumes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from torch_armllm.quant.schemes.base import Quantized, Rounding, Scheme
from torch_armllm.system.files import atomic_file
from torch_armllm.system.tensor_files import save_tensors


class ResumeCache:
    """Stores the integers of every finished layer, for a second run.

    The integers of a layer depend on its weights, the texts, the model, and the schemes of the layers before
    it.  File names are hashes of all of these, so a lookup never returns the integers of another run.
    """

    def __init__(self, folder: Path, tokens: Tensor, model: str) -> None:
        """Opens the folder; ``tokens`` and ``model`` (its ``str``) are part of every file name."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._before = hashlib.sha256(tokens.numpy().tobytes() + model.encode())
        self._name = ""
        self._key = ""
        self._chunks: dict[str, int] = {}

    def rounding(
        self, layer: str, scheme: Scheme, weight: str, expert: int, find: Callable[[], Rounding]
    ) -> Rounding:
        """Returns a rounding that reads cached integers; ``find`` creates the one for missing integers."""
        if layer != self._name:
            self._before.update(f"{layer}:{scheme.name};".encode())
            self._name, self._key, self._chunks = layer, self._before.hexdigest()[:32], {}
        part = f"{weight}-{expert}"
        chunks = json.loads(self._done.read_text()) if self._done.exists() else {}
        rounding = None if part in chunks else find()
        chunk = self._chunks[part] = chunks[part] if rounding is None else rounding.chunk
        return _CachedRounding(self._folder, f"{self._key}-{part}", chunk, rounding, find)

    def finish(self, layer: str) -> None:
        """Marks a layer as finished."""
        if layer == self._name:
            with atomic_file(self._done) as scratch:
                scratch.write_text(json.dumps(self._chunks))

    @property
    def _done(self) -> Path:
        return self._folder / f"{self._key}.json"


class _CachedRounding(Rounding):
    """Reads cached rows, and rounds and caches the missing ones."""

    def __init__(
        self, folder: Path, key: str, chunk: int, rounding: Rounding | None, find: Callable[[], Rounding]
    ) -> None:
        self.chunk = chunk
        self._folder, self._key, self._rounding, self._find = folder, key, rounding, find
        self._lock = threading.Lock()

    def rows(self, weight: Tensor, scheme: Scheme) -> Quantized:
        rows = hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest()[:32]
        file = self._folder / f"{self._key}-{rows}.pt"
        if file.exists():
            return Quantized(**torch.load(file))
        with (
            self._lock
        ):  # cached rows can miss: the weights have changed, or another thread count cuts other rows
            if self._rounding is None:
                self._rounding = self._find()
        quantized = self._rounding.rows(weight, scheme)
        save_tensors(asdict(quantized), file)
        return quantized
