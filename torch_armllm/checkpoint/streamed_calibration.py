"""Calibration of a model that is read block by block, and never in memory as a whole."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_armllm.checkpoint.block_reader import BlockReader
from torch_armllm.checkpoint.journal import Journal
from torch_armllm.hf.base_model import base_model_of
from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.base import CALIBRATED, Method
from torch_armllm.quant.methods.calibrated.base import CalibratedMethod
from torch_armllm.quant.methods.calibrated.layerwise import decoder_layers
from torch_armllm.quant.methods.registry import make_method
from torch_armllm.quant.recipe import Recipe
from torch_armllm.system.tensor_files import save_tensors

logger = logging.getLogger(__name__)

_STATES = "calibrating-{}.pt"
_TOKENS = "calibrating-tokens.pt"


class NoCalibration:
    """Stands in for `StreamedCalibration` where the method does not calibrate.

    Attributes:
        method: the method.
        fingerprint: empty: no input of the run beside the checkpoint.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        self.fingerprint: dict[str, Any] = {}

    def resume(self, finished: Sequence[str]) -> None:
        """Does nothing."""

    def finish_block(self, block: str) -> None:
        """Does nothing."""

    def commit_block(self, block: str, journal: Journal) -> None:
        """Does nothing."""


class StreamedCalibration:
    """Runs a calibrating method over the blocks of a checkpoint as they are read.

    The output of the last finished decoder layer is saved in the folder of the new model, from which an
    interrupted run resumes.

    Attributes:
        method: the calibrating method.
        fingerprint: the hash of the calibration tokens, for the journal.
    """

    def __init__(
        self,
        model: Any,
        reader: BlockReader,
        layers: Sequence[Layer],
        recipe: Recipe,
        tokens: Tensor | None,
        out: Path,
    ) -> None:
        """Prepares a method.

        Args:
            model: a model on the meta device.
            reader: loads its blocks.
            layers: the layers to quantize.
            recipe: names the method.
            tokens: token ids ``(sequences, length)``; None for a method that measures random tokens.
            out: the folder of the new model.

        Raises:
            NotByLayersError: the model cannot be run layer by layer.
        """
        self._out = out
        self._tokens = tokens
        self.fingerprint = {} if tokens is None else {"calibration": tokens_hash(tokens)}
        self._stages = stage_blocks(model, reader)
        load_around_stages(model, reader)
        statistics = recipe.importance is not False
        method = make_method(
            recipe.method, model, layers, statistics, tokens, on_meta=True, rotate=recipe.rotate
        )
        reader.release()
        assert isinstance(method, CalibratedMethod)
        self.method = method
        self._started: float | None = None
        self._last = len(method.stages.modules) - 1

    def resume(self, finished: Sequence[str]) -> None:
        """Saves the tokens, and continues after the blocks that an earlier run has finished."""
        if self._tokens is not None:
            save_tensors(self._tokens, self._out / _TOKENS)
        last = max((self._stages[block] for block in finished if block in self._stages), default=-1)
        if 0 <= last < self._last:
            self.method.stages.restore(torch.load(self._out / _STATES.format(last)))
        self.method.resume(last)
        self._started = time.monotonic()

    def finish_block(self, block: str) -> None:
        """Runs a quantized decoder layer and saves its output; called before the block is written."""
        stage = self._stages.get(block)
        if stage is not None and stage < self._last:
            self.method.finish(stage)
            file = self._out / _STATES.format(stage)
            save_tensors(self.method.stages.state(), file)

    def commit_block(self, block: str, journal: Journal) -> None:
        """Writes the block's shard, and removes the output of the layer before it."""
        journal.write()
        stage = self._stages.get(block, 0)
        (self._out / _STATES.format(stage - 1)).unlink(missing_ok=True)
        if block in self._stages and self._started is not None:
            self._estimate(time.monotonic() - self._started, stage)
            self._started = None

    def _estimate(self, seconds: float, stage: int) -> None:
        """Logs how much longer the run takes, if that is more than a minute."""
        rest = seconds * (self._last - stage)
        if rest > 60:
            logger.info(
                "a decoder layer takes %.0f s: about %.0f min for the other %d%s",
                seconds,
                rest / 60,
                self._last - stage,
                " (quantize --fast takes seconds)" if self.method.name in CALIBRATED else "",
            )


def stage_blocks(model: Any, reader: BlockReader) -> dict[str, int]:
    """Returns the index of the decoder layer that a block is, by the block's name; others have none."""
    stages = decoder_layers(model)
    inside = {id(module): index for index, stage in enumerate(stages) for module in stage.modules()}
    modules = {block: model.get_submodule(block) for block in reader.blocks}
    return {block: inside[id(module)] for block, module in modules.items() if id(module) in inside}


def load_around_stages(model: Any, reader: BlockReader, head: bool = False) -> None:
    """Loads the embeddings and norms around the decoder layers, and the ``head`` if told to."""
    stages = stage_blocks(model, reader)
    base_model = {id(module) for module in base_model_of(model).modules()}
    _compute_buffers(model)
    for block in reader.blocks:
        if block not in stages and (head or id(model.get_submodule(block)) in base_model):
            reader.load(block)


def saved_tokens(out: Path) -> Tensor | None:
    """Returns the calibration tokens of the unfinished run in a folder; None if there are none."""
    file = out / _TOKENS
    return torch.load(file) if file.exists() else None


def remove_calibration_files(out: Path) -> None:
    """Removes all files that this module wrote into a folder."""
    for file in out.glob("calibrating-*"):
        file.unlink()


def tokens_hash(tokens: Tensor) -> str:
    """Returns a hash of token ids."""
    return hashlib.sha256(tokens.contiguous().numpy().tobytes()).hexdigest()


def _compute_buffers(module: Any, owner: Any = None) -> None:
    """Computes the buffers that no checkpoint holds, as transformers' loader does.

    Args:
        module: with its children.
        owner: the innermost model that holds it, which knows how; None: it is itself the first.
    """
    owner = module if hasattr(module, "_init_weights") else owner
    empty = {
        name: buffer
        for name, buffer in module._buffers.items()
        if name in module._non_persistent_buffers_set and buffer is not None and buffer.is_meta
    }
    for name, buffer in empty.items():
        module._buffers[name] = torch.empty_like(buffer, device="cpu")
    if empty:
        owner._init_weights(module)
    for child in module.children():
        _compute_buffers(child, owner)
