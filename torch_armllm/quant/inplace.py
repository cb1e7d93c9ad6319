"""Quantizes a model in place."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torch_armllm.quant.attach import attach
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.inspection import is_packed
from torch_armllm.quant.layers import check_finite
from torch_armllm.quant.methods.importance import random_tokens
from torch_armllm.quant.methods.registry import make_method
from torch_armllm.quant.mixed_bits import budget, candidates, measured, with_bits
from torch_armllm.quant.quantization import Quantization
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.report import LayerRecord
from torch_armllm.quant.restore import remember_scalings
from torch_armllm.system.default_dtype import Float32ByDefault
from torch_armllm.system.progress import progress_bar
from torch_armllm.system.sigint import interrupts_held


@torch.no_grad()
@Float32ByDefault()
def quantize(
    model: nn.Module,
    quantization: str | Recipe = "int4",
    *,
    keep_original: bool = False,
    progress: bool = True,
    calibration: Tensor | None = None,
    resume: Path | None = None,
) -> list[LayerRecord]:
    """Replaces the linear layers and the experts of a transformers model by quantized ones, in place.

    All or nothing: packed weights wait in a `SpillFile` until all layers are packed; only then are the float
    weights freed.  So an error leaves the model as it was, and the peak memory is that of the float model and
    one layer.

    The up-projection of latent attention becomes INT8, since it is summed over both of its axes; it holds a
    few per cent of the weights.  Norms and routers stay as they are.  Embeddings do too, except an embedding
    that is tied to an INT8 head: it shares the head's weights and keeps the remaining eight bits, see
    `TiedEmbedding`.

    Args:
        model: a transformers model on the CPU with bfloat16, float16 or float32 weights.
        quantization: the name of a scheme, or a `Recipe`.
        keep_original: keep the float weights, for `restore`.
        progress: show a progress bar.
        calibration: token ids ``(sequences, length)`` for the methods that calibrate, and for `Recipe.bits`,
            which measures on random tokens without them.
        resume: a folder in which ``gptq`` stores finished layers; after an interruption, the same call
            continues from there.  It can be deleted once the model is saved.

    Returns:
        A record of every layer with a weight matrix, unquantized ones included.

    Raises:
        ValueError: a scheme or method is unknown; a pattern matches no layer; a weight is not on the CPU, not
            finite, or quantized already; or a layer's error is out of line: see `find_outliers`.
    """
    recipe = Recipe.of(quantization)
    if is_packed(model):
        raise ValueError("the model is quantized already; call torch_armllm.unpatch(model) first")
    run = Quantization(model, recipe, keep_original=keep_original)
    check_finite(run.layers)
    if recipe.bits is not None:
        room = budget(run)
        tokens = random_tokens(model) if calibration is None else calibration
        run.assign(with_bits(recipe, measured(model, candidates(run), tokens), room))
        calibration = calibration if run.calibrated else None
    statistics = recipe.importance is not False
    run.method = make_method(recipe, model, run.selected, calibration, statistics=statistics, resume=resume)
    try:
        order = run.method.order(run.selected)
        for layer in progress_bar(order, show=progress, desc="Quantizing", unit="layer"):
            run.pack(layer)
        run.refuse_outliers()
    except BaseException:
        run.method.abandon()
        raise
    records = run.records
    with interrupts_held():  # the float weights are freed one by one: half of them would be neither
        run.method.commit()
        remember_scalings(model, run.method.scaled)
        for layer in run.selected:
            run.commit(layer)
        if isinstance(model, PreTrainedModel):
            attach(model, ArmInt4Config(run.recipe))
    return records
