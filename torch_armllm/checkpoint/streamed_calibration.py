"""Calibrating a model that is never in memory as a whole: what is between its blocks, and on the disk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_armllm.checkpoint.block_reader import BlockReader
from torch_armllm.hf.base_model import body_of
from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.calibrated.base import Staged
from torch_armllm.quant.methods.calibrated.layerwise import decoder_layers
from torch_armllm.quant.methods.registry import make_method
from torch_armllm.system.files import atomic_file

_STATES = "calibrating-{}.pt"
_TOKENS = "calibrating-tokens.pt"


class Hollow:
    """A method that calibrates with the blocks of a checkpoint as they come.

    What leaves a decoder layer is kept in the folder of the new model, so that a run after an interruption
    goes on behind it.

    Attributes:
        method: which is told of the layers.
    """

    def __init__(
        self, model: Any, reader: BlockReader, layers: Sequence[Layer], name: str, tokens: Tensor, out: Path
    ) -> None:
        """Takes a model on the meta device, the reader that fills it and token ids (sequences, length).

        Raises:
            ValueError: the model cannot be run layer by layer.
        """
        self._out = out
        stages = decoder_layers(model)
        inside = {id(module): index for index, stage in enumerate(stages) for module in stage.modules()}
        modules = {block: model.get_submodule(block) for block in reader.blocks}
        self._stages = {b: inside[id(module)] for b, module in modules.items() if id(module) in inside}
        body = {id(module) for module in body_of(model).modules()}
        _compute_buffers(model)
        for block, module in modules.items():
            if block not in self._stages and id(module) in body:
                reader.load(block)
        method = make_method(name, model, layers, calibration=tokens, hollow=True)
        reader.release()
        assert isinstance(method, Staged)
        self.method = method
        self._last = len(stages) - 1

    def go_on(self, done: Sequence[str]) -> None:
        """Goes on behind the blocks that an earlier run has finished."""
        finished = max((self._stages[block] for block in done if block in self._stages), default=-1)
        if 0 <= finished < self._last:
            self.method.stages.restore(torch.load(self._out / _STATES.format(finished)))
        self.method.go_on(finished)

    def finish(self, block: str) -> None:
        """Runs a block whose layers are done, and keeps what leaves it; to be called before it is written."""
        stage = self._stages.get(block)
        if stage is not None and stage < self._last:
            self.method.finish(stage)
            file = self._out / _STATES.format(stage)
            with atomic_file(file) as scratch:
                torch.save(self.method.stages.state(), scratch)

    def written(self, block: str) -> None:
        """Forgets what only the block needed; to be called when it is written."""
        stage = self._stages.get(block, 0)
        (self._out / _STATES.format(stage - 1)).unlink(missing_ok=True)


def keep_tokens(out: Path, tokens: Tensor) -> None:
    """Keeps the texts of a run beside what it has done."""
    torch.save(tokens, out / _TOKENS)


def kept_tokens(out: Path) -> Tensor | None:
    """The texts of the unfinished run in a folder."""
    file = out / _TOKENS
    return torch.load(file) if file.exists() else None


def forget(out: Path) -> None:
    """Removes all that this module left in a folder."""
    for file in out.glob("calibrating-*"):
        file.unlink()


def tokens_hash(tokens: Tensor) -> str:
    """What tells texts from others."""
    return hashlib.sha256(tokens.contiguous().numpy().tobytes()).hexdigest()


def _compute_buffers(model: Any) -> None:
    """Gives buffers that no checkpoint holds their values, as transformers' loader does."""
    for module in model.modules():
        empty = {
            name: buffer
            for name, buffer in module._buffers.items()
            if name in module._non_persistent_buffers_set and buffer is not None and buffer.is_meta
        }
        for name, buffer in empty.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        if empty:
            model._init_weights(module)
