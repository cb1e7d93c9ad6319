"""Progress of a run from folder to folder: shards on disk, and a JSON file that lists them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from torch_armllm.checkpoint.saved_metadata import make_record
from torch_armllm.checkpoint.shard import write_shard
from torch_armllm.quant.report import LayerRecord
from torch_armllm.system.files import atomic_file, scratch_name

NAME = "quantizing.json"
INDEX = "model.safetensors.index.json"
_VERSION = 1
_SHARD = 1 << 28
"""Bytes of finished tensors per shard."""


class Journal:
    """Records the finished blocks of a run, so that an interrupted run can resume.

    Attributes:
        folder: the folder of the new model.
        records: the records of the finished layers.
        modules: their entries in `config.json`, see `describe_modules`.
        overrides: the overrides that were chosen for the run, or None; see `Recipe.bits`.
    """

    def __init__(self, folder: Path, source: Mapping[str, Any], restart: bool) -> None:
        """Opens the journal of a folder, or begins one.

        Args:
            folder: the folder of the new model; it is created.
            source: the inputs of the run, as JSON types.
            restart: discards an unfinished run in the folder.

        Raises:
            ValueError: the folder holds something else, or an unfinished run from another source.
        """
        self.folder = folder
        self._file = folder / NAME
        self._waiting: dict[str, Tensor] = {}
        self._blocks: set[str] = set()
        self._new_modules: dict[str, Any] = {}
        self._content: dict[str, Any] = {
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
        elif any(path.name != scratch_name(NAME) for path in folder.iterdir()):
            raise ValueError(f"{folder} is not empty: name a new folder")
        self._save()  # before all other files: a run that ends early leaves a folder that is known as its own
        self.records = [LayerRecord(**record) for record in self._content["records"]]
        self.modules: dict[str, dict[str, Any]] = self._content["modules"]
        self.overrides: dict[str, str | None] | None = self._content.get("overrides")

    def _open(self, restart: bool) -> None:
        for scratch in self.folder.glob(".tmp*"):  # of safetensors, in a run that was killed
            scratch.unlink()
        content = json.loads(self._file.read_text())
        if restart:
            for shard in self.folder.glob("model-*.safetensors"):
                shard.unlink()
            return
        for key in ("version", "source"):
            if content[key] != self._content[key]:
                raise ValueError(
                    f"{self.folder} holds an unfinished run of another checkpoint or method, or with other "
                    "calibration tokens, or the checkpoint has changed since: start over with restart=True "
                    "(--restart), or name another folder"
                )
        self._content = content

    def choose(self, overrides: Mapping[str, str | None]) -> None:
        """Saves the overrides that were chosen for the run."""
        self.overrides = self._content["overrides"] = dict(overrides)
        self._save()

    def holds(self, block: str) -> bool:
        """True if a block is finished."""
        return block in self._content["blocks"]

    def add(
        self,
        block: str,
        tensors: Mapping[str, Tensor],
        records: Sequence[LayerRecord],
        modules: Mapping[str, Any],
    ) -> None:
        """Adds a finished block, and writes a shard once enough tensors are waiting."""
        self._waiting.update((name, tensor.contiguous()) for name, tensor in tensors.items())
        self._blocks.add(block)
        self.records += records
        self.modules.update(modules)
        self._new_modules.update(modules)
        if sum(tensor.nbytes for tensor in self._waiting.values()) >= _SHARD:
            self.write()

    def write(self) -> None:
        """Writes the waiting tensors to a shard, then the journal; an interruption between loses a shard."""
        if not self._blocks:
            return
        content = self._content
        if self._waiting:
            name = f"model-{len(set(content['tensors'].values())) + 1:05d}.safetensors"
            record = make_record(self._waiting, self._new_modules)
            write_shard(self._waiting, self.folder / name, {"format": "pt", **record})
            content["bytes"] += sum(tensor.nbytes for tensor in self._waiting.values())
            content["tensors"].update(dict.fromkeys(self._waiting, name))
        content["blocks"] += sorted(self._blocks)
        content["records"] = [asdict(record) for record in self.records]
        self._save()
        self._waiting, self._blocks, self._new_modules = {}, set(), {}

    def _save(self) -> None:
        with atomic_file(self._file) as scratch:
            scratch.write_text(json.dumps(self._content))

    def finish(self) -> int:
        """Writes the index of all shards, and returns the bytes of the model."""
        self.write()
        total: int = self._content["bytes"]
        index = {"metadata": {"total_size": total}, "weight_map": self._content["tensors"]}
        (self.folder / INDEX).write_text(json.dumps(index, indent=1))
        return total

    def close(self) -> None:
        """Removes the journal: the model is complete."""
        self._file.unlink(missing_ok=True)
