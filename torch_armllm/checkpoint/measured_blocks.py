"""Sensitivities of the layers of a checkpoint that is read block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_armllm.checkpoint.block_reader import BlockReader
from torch_armllm.checkpoint.streamed_calibration import load_around_stages, stage_blocks
from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.calibrated.sensitivity import LayerSensitivity, Sensitivity
from torch_armllm.quant.mixed_bits import CANDIDATES
from torch_armllm.system.allocator import release_free_memory
from torch_armllm.system.progress import progress_bar


def measured_by_blocks(
    model: Any, reader: BlockReader, layers: Sequence[Layer], tokens: Tensor, progress: bool = True
) -> list[LayerSensitivity]:
    """Returns the sensitivities of layers, with one decoder layer in memory at a time.

    Args:
        model: a model on the meta device.
        reader: loads its blocks.
        layers: the layers to measure.
        tokens: token ids ``(sequences, length)``; about a thousand tokens are used.
        progress: shows a bar.

    Raises:
        NotByLayersError: the decoder layers do not run one after the other.
    """
    load_around_stages(model, reader)
    sensitivity = Sensitivity(model, layers, CANDIDATES, tokens, on_meta=True)
    reader.release()
    for block in progress_bar(stage_blocks(model, reader), show=progress, desc="Measuring", unit="layer"):
        reader.load(block)
        sensitivity.run()
        reader.release()
        release_free_memory()
    load_around_stages(model, reader, head=True)
    result = sensitivity.result()
    reader.release()
    return result
