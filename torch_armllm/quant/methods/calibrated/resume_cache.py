"""Integers that were found before an interruption, in a folder."""

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


class ResumeCache:
    """Keeps the integers of every layer that is done; a second run finds them there.

    What a layer becomes depends on its weights, on the texts, on the model, and on what became of the layers
    before it: all of that is in the names of the files, so that nothing else is ever found there.
    """

    def __init__(self, folder: Path, tokens: Tensor, model: str) -> None:
        """Takes the folder, which is made, the token ids and what else tells one run from another."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._before = hashlib.sha256(tokens.numpy().tobytes() + model.encode())
        self._name = ""
        self._key = ""
        self._chunks: dict[str, int] = {}

    def rounding(
        self, layer: str, scheme: Scheme, weight: str, expert: int, find: Callable[[], Rounding]
    ) -> Rounding:
        """A rounding that looks here first; ``find`` makes the one that it stands for."""
        if layer != self._name:
            self._before.update(f"{layer}:{scheme.name};".encode())
            self._name, self._key, self._chunks = layer, self._before.hexdigest()[:32], {}
        part = f"{weight}-{expert}"
        chunks = json.loads(self._done.read_text()) if self._done.exists() else {}
        found = None if part in chunks else find()
        chunk = self._chunks[part] = chunks[part] if found is None else found.chunk
        return _CachedRounding(self._folder, f"{self._key}-{part}", chunk, found, find)

    def finish(self, layer: str) -> None:
        """Notes that a layer is done."""
        if layer == self._name:
            with atomic_file(self._done) as scratch:
                scratch.write_text(json.dumps(self._chunks))

    @property
    def _done(self) -> Path:
        return self._folder / f"{self._key}.json"


class _CachedRounding(Rounding):
    """Rounds what was not rounded before."""

    def __init__(
        self, folder: Path, key: str, chunk: int, found: Rounding | None, find: Callable[[], Rounding]
    ) -> None:
        self.chunk = chunk
        self._folder, self._key, self._found, self._find = folder, key, found, find
        self._lock = threading.Lock()

    def rows(self, weight: Tensor, scheme: Scheme) -> Quantized:
        rows = hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest()[:32]
        file = self._folder / f"{self._key}-{rows}.pt"
        if file.exists():
            return Quantized(**torch.load(file))
        with self._lock:  # weights have changed since, or rows are cut for other threads
            if self._found is None:
                self._found = self._find()
        made = self._found.rows(weight, scheme)
        with atomic_file(file) as scratch:
            torch.save(asdict(made), scratch)
        return made
