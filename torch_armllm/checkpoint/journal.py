"""What a run from folder to folder has done so far: shards on disk, and a file that says what they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from torch_armllm.quant.report import LayerRecord
from torch_armllm.system.files import atomic_file

NAME = "quantizing.json"
INDEX = "model.safetensors.index.json"
_VERSION = 1
_SHARD = 1 << 28
"""Bytes of finished tensors that wait in memory for a file of their own."""


class Journal:
    """Keeps the finished blocks of a run; what was kept is there again after an interruption.

    Attributes:
        records: of the finished layers.
        modules: what `config.json` is to say of them: see `describe_modules`.
    """

    def __init__(self, folder: Path, source: Mapping[str, Any], restart: bool) -> None:
        """Opens the journal of a folder, or begins one.

        Args:
            folder: where the model is written; it is made.
            source: what the model is made from, as JSON types: see `fingerprint`.
            restart: forgets what an unfinished run left there.

        Raises:
            ValueError: the folder holds something else, or an unfinished run from another source.
        """
        self._folder = folder
        self._file = folder / NAME
        self._waiting: dict[str, Tensor] = {}
        self._blocks: set[str] = set()
        self._kept: dict[str, Any] = {
            "version": _VERSION,
            "source": dict(source),
            "blocks": [],
            "records": [],
            "modules": {},
            "tensors": {},
            "bytes": 0,
        }
        folder.mkdir(parents=True, exist_ok=True)
        if self._file.exists():
            self._open(restart)
        elif any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty: name a new folder")
        self.records = [LayerRecord(**record) for record in self._kept["records"]]
        self.modules: dict[str, dict[str, Any]] = self._kept["modules"]

    def _open(self, restart: bool) -> None:
        kept = json.loads(self._file.read_text())
        if restart:
            for name in {*kept["tensors"].values(), NAME}:
                (self._folder / name).unlink(missing_ok=True)
            return
        for what in ("version", "source"):
            if kept[what] != self._kept[what]:
                raise ValueError(
                    f"{self._folder} holds an unfinished run of another checkpoint or method, or with other "
                    "texts, or the checkpoint has changed since: begin anew with restart=True (--restart), "
                    "or name another folder"
                )
        self._kept = kept

    def holds(self, block: str) -> bool:
        """Whether a block is done."""
        return block in self._kept["blocks"]

    def add(
        self,
        block: str,
        tensors: Mapping[str, Tensor],
        records: Sequence[LayerRecord],
        modules: Mapping[str, Any],
    ) -> None:
        """Takes a finished block, and writes a shard when enough has come together."""
        self._waiting.update((name, tensor.contiguous()) for name, tensor in tensors.items())
        self._blocks.add(block)
        self.records += records
        self.modules.update(modules)
        if sum(tensor.nbytes for tensor in self._waiting.values()) >= _SHARD:
            self.write()

    def write(self) -> None:
        """Writes what waits, and then says so: an interruption between the two loses a shard, never mixes."""
        if not self._blocks:
            return
        kept = self._kept
        if self._waiting:
            name = f"model-{len(set(kept['tensors'].values())) + 1:05d}.safetensors"
            save_file(self._waiting, self._folder / name, {"format": "pt"})
            kept["bytes"] += sum(tensor.nbytes for tensor in self._waiting.values())
            kept["tensors"].update(dict.fromkeys(self._waiting, name))
        kept["blocks"] += sorted(self._blocks)
        kept["records"] = [asdict(record) for record in self.records]
        with atomic_file(self._file) as scratch:
            scratch.write_text(json.dumps(kept))
        self._waiting, self._blocks = {}, set()

    def finish(self) -> int:
        """Writes the index of all shards; returns the bytes of the model."""
        self.write()
        total: int = self._kept["bytes"]
        index = {"metadata": {"total_size": total}, "weight_map": self._kept["tensors"]}
        (self._folder / INDEX).write_text(json.dumps(index, indent=1))
        return total

    def close(self) -> None:
        """Forgets the journal: the model is whole."""
        self._file.unlink(missing_ok=True)


def fingerprint(folder: Path, files: Sequence[Path]) -> dict[str, Any]:
    """What tells whether a checkpoint is the same as before: its configuration, its files' sizes, times."""
    stats = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    return {"config": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(), "files": stats}
