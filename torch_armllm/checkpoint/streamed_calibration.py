"""Calibration of a model that is read block by block, and never in memory as a whole."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_armllm.checkpoint.block_reader import BlockReader
from torch_armllm.checkpoint.journal import Journal
from torch_armllm.checkpoint.stage_blocks import load_around_stages, stage_blocks
from torch_armllm.quant.methods.base import CALIBRATED
from torch_armllm.quant.methods.calibrated.base import CalibratedMethod
from torch_armllm.quant.methods.calibrated.layerwise import NotByLayersError
from torch_armllm.quant.methods.registry import make_method
from torch_armllm.quant.quantization import Quantization
from torch_armllm.system.tensor_files import save_tensors

logger = logging.getLogger(__name__)

_STATES = "calibrating-{}.pt"
_TOKENS = "calibrating-tokens.pt"


class Calibration:
    """Does nothing as blocks are read: the method of `Quantization` needs no run of the model.

    Attributes:
        fingerprint: inputs of the run beside the checkpoint, for the journal.
    """

    fingerprint: Mapping[str, Any] = {}

    def resume(self, finished: Sequence[str]) -> None:
        """Continues after the blocks that an earlier run has finished."""

    def finish_block(self, block: str) -> None:
        """Called when the layers of a block are quantized, before it is written."""

    def commit_block(self, block: str, journal: Journal) -> None:
        """Called when a block is in the journal."""


class StreamedCalibration(Calibration):
    """Runs a calibrating method over the blocks of a checkpoint as they are read.

    The output of the last finished decoder layer is saved in the folder of the new model, from which an
    interrupted run resumes.
    """

    def __init__(self, run: Quantization, reader: BlockReader, tokens: Tensor | None, out: Path) -> None:
        """Prepares the method of a run.

        Args:
            run: of a model on the meta device.
            reader: loads its blocks.
            tokens: token ids ``(sequences, length)``; None for a method that measures random tokens.
            out: the folder of the new model.

        Raises:
            NotByLayersError: the model cannot be run layer by layer.
        """
        self._out = out
        self._tokens = tokens
        self.fingerprint = {} if tokens is None else {"calibration": tokens_hash(tokens)}
        self._stages = stage_blocks(run.model, reader)
        load_around_stages(run.model, reader)
        statistics = run.recipe.importance is not False
        method = make_method(run.recipe, run.model, run.selected, tokens, statistics=statistics, on_meta=True)
        reader.release()
        assert isinstance(method, CalibratedMethod)
        run.method = self._method = method
        self._started: float | None = None
        self._last = len(method.stages.modules) - 1

    def resume(self, finished: Sequence[str]) -> None:
        """Saves the tokens, too."""
        if self._tokens is not None:
            save_tensors(self._tokens, self._out / _TOKENS)
        last = max((self._stages[block] for block in finished if block in self._stages), default=-1)
        if 0 <= last < self._last:
            self._method.stages.restore(torch.load(self._out / _STATES.format(last)))
        self._method.resume(last)
        self._started = time.monotonic()

    def finish_block(self, block: str) -> None:
        """Runs a quantized decoder layer and saves its output."""
        stage = self._stages.get(block)
        if stage is not None and stage < self._last:
            self._method.finish(stage)
            file = self._out / _STATES.format(stage)
            save_tensors(self._method.stages.state(), file)

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
                " (quantize --fast takes seconds)" if self._method.name in CALIBRATED else "",
            )


def choose_method(run: Quantization, reader: BlockReader, tokens: Tensor | None, out: Path) -> Calibration:
    """Sets the method of a run, and returns what it does as blocks are read: see `StreamedCalibration`."""
    recipe = run.recipe
    if run.calibrated and tokens is not None:
        return StreamedCalibration(run, reader, tokens, out)
    measures = recipe.method == "mse" and recipe.importance is not False
    if measures and (tokens is None or recipe.bits is not None):
        try:
            return StreamedCalibration(run, reader, None, out)
        except NotByLayersError as error:
            logger.warning("%s: weights are rounded without input statistics", error)
    given = tokens if run.calibrated or recipe.bits is None else None  # otherwise, they are for the bits
    run.method = make_method(recipe, run.model, run.selected, given)
    return Calibration()


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
