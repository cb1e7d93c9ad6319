"""Quantising a model in place, and taking it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from torch_armllm.hf.config import ArmInt4Config
from torch_armllm.hf.quantizer import attach, detach
from torch_armllm.memory import release_free_memory
from torch_armllm.ops.linear import interleave_panels
from torch_armllm.quant.embedding import TiedEmbedding, can_share
from torch_armllm.quant.experts import parameter
from torch_armllm.quant.importance import input_energies
from torch_armllm.quant.layers import Layer, Places, find_layers, weight_of
from torch_armllm.quant.modules import QuantExperts, QuantLinear
from torch_armllm.quant.packing import quantize_matrices, quantize_matrix
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
    # The head first: it is the largest, and nothing else waits in memory yet.
    wanted = sorted((x for x in layers if x.reason is None), key=lambda x: x.kind != "head")
    for layer in tqdm(wanted, desc="Quantising", unit="layer", disable=not progress):
        energy = energies.get(id(layer.module))
        found = replacement(model, layer, handlers[layer.kind], energy, keep_original)
        spool.store(found.module)
        made[layer.name] = found
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


@dataclass(frozen=True)
class Replacement:
    """What will stand in a layer's place.

    Attributes:
        module: of packed weights.
        op: the op that it calls.
        sharer: an embedding that will share its weights.
        keep: the layer keeps its float weights.
    """

    module: QuantLinear | QuantExperts
    op: str
    sharer: nn.Embedding | None = None
    keep: bool = False

    def record(self, layer: Layer) -> LayerRecord:
        """What the report says of the layer; to be called while it still has its float weights."""
        weights = layer.weights()
        count, before = sum(w.numel() for w in weights), sum(w.nbytes for w in weights)
        new = self.module
        after = sum(buffer.nbytes for buffer in new.buffers())
        return LayerRecord(layer.name, layer.kind, self.op, new.scheme, count, before, after, new.error)


def replacement(
    model: nn.Module, layer: Layer, scheme: Scheme, importance: Tensor | None, keep: bool
) -> Replacement:
    """Makes what is to stand in a layer's place; nothing changes yet.

    Args:
        model: the model, for embeddings that are tied to the layer.
        layer: the layer.
        scheme: its scheme.
        importance: see `quantize`.
        keep: its float weights are to be kept.
    """
    try:
        new, op = quantize_layer(layer, scheme, importance)
    except ValueError as error:
        raise ValueError(f"{layer.name}: {error}") from error
    own = {id(weight) for weight in layer.weights()}
    tied = [m for m in model.modules() if isinstance(m, nn.Embedding) and id(m.weight) in own]
    share = bool(tied) and not keep and isinstance(new, QuantLinear) and can_share(tied[0], new)
    return Replacement(new, op, tied[0] if share else None, keep or (bool(tied) and not share))


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
    new = found.module
    spool.load(new)
    record = found.record(layer)
    if found.sharer is not None:
        assert isinstance(new, QuantLinear)
        hung.replace(found.sharer, TiedEmbedding(found.sharer, new))
        found.sharer._parameters["weight"] = None
    hung.replace(layer.module, new)
    if not found.keep:
        for name in layer.layout.weights if layer.layout is not None else ("weight",):
            setattr(layer.module, name, None)
    release_free_memory()
    return record


@torch.no_grad()
def restore(model: nn.Module) -> list[str]:
    """Puts float modules back in the place of the quantised ones.

    Returns:
        Names of the modules whose originals were not kept: their weights are what the integers stand for.
    """
    rounded: list[str] = []
    hung = Places(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, TiedEmbedding):
            weight = nn.Parameter(module.dequantize(), requires_grad=False)
            for owner in (module.shell, module.head_shell):
                assert owner is not None
                owner._parameters["weight"] = weight
            hung.replace(module, module.shell)
            rounded.append(name)
    for name, module in list(model.named_modules()):
        if not isinstance(module, (QuantLinear, QuantExperts)):
            continue
        shell = module.shell
        assert shell is not None, f"{name} was not made by quantize()"
        if isinstance(module, QuantLinear):
            if shell.weight is None:
                weight = module.dequantize()
                _give(
                    shell, "weight", weight.t().contiguous() if isinstance(shell, Conv1D) else weight, module
                )
                rounded.append(name)
        elif (layout := module.layout) is not None and getattr(shell, layout.weights[0]) is None:
            for attribute, value in zip(layout.weights, layout.store(*module.dequantize()), strict=True):
                _give(shell, attribute, value, module)
            rounded.append(name)
        if isinstance(module, QuantLinear) and module.bias is not None:
            shell.bias = module.bias
        elif isinstance(module, QuantExperts) and module.layout is not None:
            module.layout.store_biases(shell, module.gate_up_bias, module.down_bias)
        shell.train(module.training)
        hung.replace(module, shell)
    if isinstance(model, PreTrainedModel):
        detach(model)
    return rounded


def untouched(layer: Layer) -> LayerRecord:
    """The record of a layer that is left as it is."""
    weights = layer.weights()
    size = sum(weight.nbytes for weight in weights)
    dtype = str(weights[0].dtype).removeprefix("torch.")
    count = sum(weight.numel() for weight in weights)
    return LayerRecord(layer.name, layer.kind, "torch", dtype, count, size, size, None, layer.reason)


def quantize_layer(
    layer: Layer, scheme: Scheme, importance: Tensor | None
) -> tuple[QuantLinear | QuantExperts, str]:
    """Makes the module that replaces a layer, and names its op; the layer is left as it is."""
    if layer.kind == "experts":
        new: QuantLinear | QuantExperts = _quantize_experts(layer, scheme, importance)
        op = "int4_moe"
    else:
        new = _quantize_linear(layer.module, scheme, importance)
        op = "int8_linear" if scheme.name == "int8" else "int4_linear"
    new.train(layer.module.training)
    return new, op


def _quantize_linear(module: nn.Module, scheme: Scheme, importance: Tensor | None) -> QuantLinear:
    weight = weight_of(module).detach()
    weight = weight.t() if isinstance(module, Conv1D) else weight
    packed, error = quantize_matrix(weight, scheme, importance)
    bias = module.bias
    assert bias is None or isinstance(bias, Tensor)
    rows, columns = weight.shape
    return QuantLinear(packed, columns, rows, scheme.name, bias, error, module, weight.dtype)


def _quantize_experts(layer: Layer, scheme: Scheme, importance: Tensor | None) -> QuantExperts:
    module, layout = layer.module, layer.layout
    assert layout is not None
    inner, outer = (parameter(module, name) for name in layout.weights)
    made = [quantize_matrices(part, scheme, importance) for part in layout.inner(inner)]
    downs = layout.outer(outer)
    down, down_error = quantize_matrices(downs, scheme)
    hidden, intermediate = downs[0].shape
    biases = layout.biases(module)
    errors = [*(error for _, error in made), down_error]
    return QuantExperts(
        interleave_panels(made[0][0], made[1][0]) if layout.gated else made[0][0],
        down,
        intermediate,
        hidden,
        scheme.name,
        layout.activation,
        layout.limit,
        *biases,
        # The matrices have the same number of weights and nearly the same norm.
        error=(sum(error**2 for error in errors) / len(errors)) ** 0.5,
        shell=module,
        float_dtype=outer.dtype,
        layout=layout,
    )


def _give(shell: nn.Module, name: str, value: Tensor, module: QuantLinear | QuantExperts) -> None:
    setattr(shell, name, nn.Parameter(value.to(module.float_dtype), requires_grad=False))
