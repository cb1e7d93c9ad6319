"""Quantizing a model in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torch_armllm.quant.attach import attach
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.layers import Layer, Places, find_layers
from torch_armllm.quant.methods.registry import make_method
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.outliers import refuse_outliers
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.replacement import Replacement, replacement
from torch_armllm.quant.report import LayerRecord
from torch_armllm.quant.spill_file import Spool
from torch_armllm.system.allocator import release_free_memory
from torch_armllm.system.dtypes import dtype_name
from torch_armllm.system.progress import progress_bar


@torch.no_grad()
def quantize(
    model: nn.Module,
    scheme: str = "g32i",
    head: str | None = "int8",
    ignore: Sequence[str] = (),
    keep_original: bool = False,
    progress: bool = True,
    importance: bool = True,
    *,
    overrides: Mapping[str, str | None] | None = None,
    method: str = "mse",
    calibration: Tensor | None = None,
    allow_outliers: bool = False,
    resume: Path | None = None,
) -> list[LayerRecord]:
    """Replaces the linear layers and the experts of a transformers model by quantized ones, in place.

    All or nothing: what replaces the layers is made one by one and waits in a `Spool`, and the float weights
    are freed when all of it is there, so that an error leaves the model as it was and the peak memory is that
    of the model and one layer.  What expands the latents of latent attention becomes INT8: it is a few per
    cent of the weights, and used along both of its axes.  Norms and routers stay as they are, and so do
    embeddings, except that one which is tied to an INT8 head shares the head's weights and keeps the eight
    bits that they leave: see `TiedEmbedding`.

    Args:
        model: a transformers model on the CPU with bfloat16, float16 or float32 weights.
        scheme: of the linear layers and the experts: any of `SCHEMES`.
        head: of the output head: one of them, or None to leave it alone.
        ignore: shell-style patterns of layer names that must stay as they are, such as ``*.down_proj``.
        keep_original: keeps the float weights for `restore`.
        progress: shows a bar.
        importance: runs the model once on random tokens, and lets errors in the search of scales count by
            what each input channel then carries; see `quant.methods.importance`.  For ``mse`` alone.
        overrides: schemes of layers that are to become something else, by pattern or kind: see `Recipe`.
        method: ``mse`` searches scales, ``rtn`` takes them from the peaks, ``gptq`` and ``awq`` calibrate.
        calibration: token ids ``(sequences, length)`` for the methods that calibrate.
        allow_outliers: goes on where a layer's error is out of line with its scheme.
        resume: a folder in which ``gptq`` keeps what it has found: after an interruption, the same call goes
            on from there.  It can be deleted when the model is saved.

    Returns:
        A record for every layer with a weight matrix, those that were left alone included.

    Raises:
        ValueError: there is no such scheme or method; a pattern fits nothing; a weight is not on the CPU, not
            finite, or quantized already; or a layer's error is out of line: see `find_outliers`.
    """
    recipe = Recipe(scheme, head, ignore, overrides or {}, method, allow_outliers)
    return quantize_by(recipe, model, keep_original, progress, importance, calibration, resume)


@torch.no_grad()
def quantize_by(
    recipe: Recipe,
    model: nn.Module,
    keep_original: bool = False,
    progress: bool = True,
    importance: bool = True,
    calibration: Tensor | None = None,
    resume: Path | None = None,
) -> list[LayerRecord]:
    """Quantizes by a recipe; see `quantize`."""
    if any(isinstance(module, (QuantLinear, QuantExperts)) for module in model.modules()):
        raise ValueError(
            "the model is quantized already; take it back with torch_armllm.unpatch(model) first"
        )
    layers, schemes = recipe.assign(find_layers(model, recipe.ignore))
    refuse_damaged(layers)
    wanted = [layer for layer in layers if layer.name in schemes]
    method = make_method(recipe.method, model, wanted, importance, calibration, resume)
    spool = Spool()
    made: dict[str, Replacement] = {}
    try:
        for layer in progress_bar(method.order(wanted), show=progress, desc="Quantizing", unit="layer"):
            found = replacement(model, layer, schemes[layer.name], method, keep_original, spool)
            made[layer.name] = found
            method.took(layer, found.module, spool)
            release_free_memory()
        records = [
            made[layer.name].record(layer) if layer.name in made else untouched(layer) for layer in layers
        ]
        if not recipe.allow_outliers:
            refuse_outliers(records)
    except BaseException:
        method.abandon()
        raise
    method.commit()
    hung = Places(model)
    for layer in wanted:
        commit(layer, made[layer.name], spool, hung)
    if isinstance(model, PreTrainedModel):
        attach(model, ArmInt4Config(**recipe.to_dict()))
    return records


def refuse_damaged(layers: Sequence[Layer]) -> None:
    """Raises ValueError for the first weight to be quantized that is not finite: before anything is done."""
    for layer in layers:
        if layer.reason is not None:
            continue
        for weight in layer.weights():
            low, high = torch.aminmax(weight.detach()) if weight.numel() else (weight.new_zeros(()),) * 2
            if not bool(low.isfinite() & high.isfinite()):
                place = tuple(int(axis[0]) for axis in torch.where(~weight.detach().isfinite()))
                raise ValueError(
                    f"the weight of {layer.name} holds {float(weight[place])} at {place}: the checkpoint is "
                    f"damaged; get it anew, or leave the layer out with ignore=[{layer.name!r}]"
                )


def commit(layer: Layer, found: Replacement, spool: Spool, hung: Places) -> None:
    """Hangs a replacement into the model and frees the float weights."""
    new, sharer = found.module, found.sharer
    hung.replace(layer.module, new)
    if not found.keep:
        for name in layer.layout.weights if layer.layout is not None else ("weight",):
            setattr(layer.module, name, None)
    if sharer is not None:
        hung.replace(sharer.shell, sharer)
        sharer.shell._parameters["weight"] = None
    spool.load(new)
    if sharer is not None:
        assert isinstance(new, QuantLinear)
        spool.load(sharer)
        sharer.share(new)
    release_free_memory()


def untouched(layer: Layer) -> LayerRecord:
    """The record of a layer that is left as it is."""
    weights = layer.weights()
    size = sum(weight.nbytes for weight in weights)
    dtype = dtype_name(weights[0].dtype)
    count = sum(weight.numel() for weight in weights)
    return LayerRecord(layer.name, layer.kind, "torch", dtype, count, size, size, None, layer.reason)
