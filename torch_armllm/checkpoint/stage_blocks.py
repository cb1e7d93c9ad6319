"""The decoder layers of a checkpoint that is read block by block, to be run one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_armllm.checkpoint.block_reader import BlockReader
from torch_armllm.hf.base_model import base_model_of
from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.calibrated.layerwise import decoder_layers
from torch_armllm.quant.methods.calibrated.sensitivity import LayerSensitivity, Sensitivity
from torch_armllm.quant.mixed_bits import CANDIDATES
from torch_armllm.system.allocator import release_free_memory
from torch_armllm.system.progress import progress_bar


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
