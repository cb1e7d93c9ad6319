"""Quantising a model in place, and taking it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.pytorch_utils import Conv1D

from torch_armllm.memory import release_free_memory
from torch_armllm.ops.linear import interleave_panels
from torch_armllm.quant.embedding import TiedEmbedding, can_share
from torch_armllm.quant.experts import WEIGHTS
from torch_armllm.quant.importance import input_energies
from torch_armllm.quant.layers import Layer, Places, find_layers, weight_of
from torch_armllm.quant.modules import QuantExperts, QuantLinear
from torch_armllm.quant.packing import quantize_matrices, quantize_matrix
from torch_armllm.quant.scheme import Scheme
from torch_armllm.quant.schemes import scheme_named
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

    The layers are taken one by one and each float weight is freed at once, so that the peak memory is that of
    the model and one layer.  Norms and routers stay as they are, and so do embeddings, except that one which
    is tied to an INT8 head shares the head's weights and keeps the eight bits that they leave: see
    `TiedEmbedding`.

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
    body = scheme_named(scheme)
    if scheme == "int8":
        raise ValueError("scheme 'int8' is for the head; the other layers take g32i, row, g32 and the like")
    last = scheme_named(head) if head is not None else None
    if any(isinstance(module, (QuantLinear, QuantExperts)) for module in model.modules()):
        raise ValueError(
            "the model is quantised already; take it back with torch_armllm.unpatch(model) first"
        )
    layers = find_layers(model, ignore)
    if last is None:
        layers = [
            Layer(x.name, x.module, x.kind, "left out on request") if x.kind == "head" and not x.reason else x
            for x in layers
        ]
    tied = {id(module.weight): module for module in model.modules() if isinstance(module, nn.Embedding)}
    energies = input_energies(model, layers) if importance else {}
    hung = Places(model)
    records = []
    bar = tqdm(layers, desc="Quantising", unit="layer", disable=not progress)
    for layer in bar:
        if layer.reason is not None:
            records.append(_left(layer))
            continue
        parameters = layer.weights()
        before = sum(weight.nbytes for weight in parameters)
        count = sum(weight.numel() for weight in parameters)
        embedding = next((tied[id(weight)] for weight in parameters if id(weight) in tied), None)
        keep = keep_original or embedding is not None
        del parameters
        try:
            handler = last if layer.kind == "head" and last else body
            new, op = _quantize_layer(layer, handler, keep, energies.get(id(layer.module)))
        except ValueError as error:
            raise ValueError(f"{layer.name}: {error}") from error
        after = sum(buffer.nbytes for buffer in new.buffers())
        hung.replace(layer.module, new)
        if (
            embedding is not None
            and isinstance(new, QuantLinear)
            and not keep_original
            and can_share(embedding, new)
        ):
            hung.replace(embedding, TiedEmbedding(embedding, new))
            _strip(embedding)
            _strip(layer.module)
            del embedding
        release_free_memory()
        records.append(LayerRecord(layer.name, layer.kind, op, new.scheme, count, before, after, new.error))
    return records


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
        elif shell.gate_up_proj is None:
            assert module.layout is not None
            gate_up, down = module.layout.store(*module.dequantize())
            _give(shell, "gate_up_proj", gate_up, module)
            _give(shell, "down_proj", down, module)
            rounded.append(name)
        if isinstance(module, QuantLinear) and module.bias is not None:
            shell.bias = module.bias
        shell.train(module.training)
        hung.replace(module, shell)
    return rounded


def _strip(module: nn.Module) -> None:
    module._parameters["weight"] = None


def _left(layer: Layer) -> LayerRecord:
    weights = layer.weights()
    size = sum(weight.nbytes for weight in weights)
    dtype = str(weights[0].dtype).removeprefix("torch.")
    count = sum(weight.numel() for weight in weights)
    return LayerRecord(layer.name, layer.kind, "torch", dtype, count, size, size, None, layer.reason)


def _quantize_layer(
    layer: Layer, scheme: Scheme, keep: bool, importance: Tensor | None
) -> tuple[QuantLinear | QuantExperts, str]:
    """Makes the module that replaces a layer; strips the old one of its weights unless they are kept."""
    if layer.kind == "experts":
        new: QuantLinear | QuantExperts = _quantize_experts(layer, scheme, importance)
        names, op = WEIGHTS, "int4_moe"
    else:
        new = _quantize_linear(layer.module, scheme, importance)
        names, op = ("weight",), "int8_linear" if scheme.name == "int8" else "int4_linear"
    new.train(layer.module.training)
    if not keep:
        for name in names:
            setattr(layer.module, name, None)
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
    gates, ups = layout.gate_up(module)
    downs = layout.down(module)
    gate, gate_error = quantize_matrices(gates, scheme, importance)
    up, up_error = quantize_matrices(ups, scheme, importance)
    down, down_error = quantize_matrices(downs, scheme)
    hidden, intermediate = downs[0].shape
    biases = layout.biases(module)
    return QuantExperts(
        interleave_panels(gate, up),
        down,
        intermediate,
        hidden,
        scheme.name,
        layout.activation,
        layout.limit,
        *biases,
        # The three matrices have the same number of weights and nearly the same norm.
        error=((gate_error**2 + up_error**2 + down_error**2) / 3) ** 0.5,
        shell=module,
        float_dtype=downs[0].dtype,
        layout=layout,
    )


def _give(shell: nn.Module, name: str, value: Tensor, module: QuantLinear | QuantExperts) -> None:
    setattr(shell, name, nn.Parameter(value.to(module.float_dtype), requires_grad=False))


def describe(model: nn.Module, reason: str) -> list[LayerRecord]:
    """Records of all layers of a model that is left as it is.

    Args:
        model: a transformers model on the CPU.
        reason: why nothing is quantised.
    """
    return [_left(replace(layer, reason=layer.reason or reason)) for layer in find_layers(model)]
