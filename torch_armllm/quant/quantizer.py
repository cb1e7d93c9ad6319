"""Quantising a model in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from torch_armllm.hf.config import ArmInt4Config
from torch_armllm.hf.quantizer import attach
from torch_armllm.memory import release_free_memory
from torch_armllm.quant.importance import input_energies
from torch_armllm.quant.layers import Layer, Places, find_layers
from torch_armllm.quant.modules import QuantExperts, QuantLinear
from torch_armllm.quant.replacement import Replacement, replacement
from torch_armllm.quant.scheme import Scheme
from torch_armllm.quant.schemes import scheme_named
from torch_armllm.quant.spool import Spool
from torch_armllm.report import LayerRecord


@torch.no_grad()
def quantize(
    model: nn.Module,
    scheme: str = "g32i",
    head: str | None = "int8",
    ignore: Sequence[str] = (),
    keep_original: bool = False,
    progress: bool = True,
    importance: bool = True,
) -> list[LayerRecord]:
    """Replaces the linear layers and the experts of a transformers model by quantised ones, in place.

    All or nothing: what replaces the layers is made one by one and waits in a `Spool`, and the float weights
    are freed when all of it is there, so that an error leaves the model as it was and the peak memory is that
    of the model and one layer.  What expands the latents of latent attention becomes INT8: it is a few per
    cent of the weights, and used along both of its axes.  Norms and routers stay as they are, and so do
    embeddings, except that one which is tied to an INT8 head shares the head's weights and keeps the eight
    bits that they leave: see `TiedEmbedding`.

    Args:
        model: a transformers model on the CPU with bfloat16, float16 or float32 weights.
        scheme: of the linear layers and the experts: any of `SCHEMES` but ``int8``.
        head: of the output head: ``int8``, one of the above, or None to leave it alone.
        ignore: shell-style patterns of layer names that must stay as they are, such as ``*.down_proj``.
        keep_original: keeps the float weights for `restore`.
        progress: shows a bar.
        importance: runs the model once on random tokens, and lets errors in the search of scales count by
            what each input channel then carries; see `torch_armllm.quant.importance`.

    Returns:
        A record for every layer with a weight matrix, those that were left alone included.

    Raises:
        ValueError: there is no such scheme; or a weight is not on the CPU, not finite, or quantised already.
    """
    if any(isinstance(module, (QuantLinear, QuantExperts)) for module in model.modules()):
        raise ValueError(
            "the model is quantised already; take it back with torch_armllm.unpatch(model) first"
        )
    layers, handlers = choose_layers(model, scheme, head, ignore)
    refuse_damaged(layers)
    energies = input_energies(model, layers) if importance else {}
    spool = Spool()
    made: dict[str, Replacement] = {}
    wanted = [layer for layer in layers if layer.reason is None]
    for layer in tqdm(wanted, desc="Quantising", unit="layer", disable=not progress):
        energy = energies.get(id(layer.module))
        made[layer.name] = replacement(model, layer, handlers[layer.kind], energy, keep_original, spool)
        release_free_memory()
    hung = Places(model)
    records = [
        commit(layer, made[layer.name], spool, hung) if layer.name in made else untouched(layer)
        for layer in layers
    ]
    if isinstance(model, PreTrainedModel):
        attach(model, ArmInt4Config(scheme, head, ignore))
    return records


def choose_layers(
    model: nn.Module, scheme: str, head: str | None, ignore: Sequence[str], loading: bool = False
) -> tuple[list[Layer], dict[str, Scheme]]:
    """The layers of a model, those to be left marked with the reason, and the scheme for each kind of layer.

    Raises:
        ValueError: there is no such scheme; or a layer is not on the CPU or quantised by other means.
    """
    body = scheme_named(scheme)
    if scheme == "int8":
        raise ValueError("scheme 'int8' is for the head; the other layers take g32i, row, g32 and the like")
    last = scheme_named(head) if head is not None else None
    layers = find_layers(model, ignore, loading)
    if last is None:
        layers = [
            replace(layer, reason="left out on request")
            if layer.kind == "head" and not layer.reason
            else layer
            for layer in layers
        ]
    return layers, {
        "linear": body,
        "latent": scheme_named("int8"),
        "experts": body,
        "head": last or body,
    }


def refuse_damaged(layers: Sequence[Layer]) -> None:
    """Raises ValueError for the first weight to be quantised that is not finite: before anything is done."""
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


def commit(layer: Layer, found: Replacement, spool: Spool, hung: Places) -> LayerRecord:
    """Hangs a replacement into the model and frees the float weights."""
    new, sharer = found.module, found.sharer
    record = found.record(layer)
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
    return record


def untouched(layer: Layer) -> LayerRecord:
    """The record of a layer that is left as it is."""
    weights = layer.weights()
    size = sum(weight.nbytes for weight in weights)
    dtype = str(weights[0].dtype).removeprefix("torch.")
    count = sum(weight.numel() for weight in weights)
    return LayerRecord(layer.name, layer.kind, "torch", dtype, count, size, size, None, layer.reason)
