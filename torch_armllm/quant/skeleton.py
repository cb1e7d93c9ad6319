"""The saved form of a quantized model: packed buffers by module name, the same on every CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from torch_armllm.hf.expert_detection import is_experts, read_layout
from torch_armllm.hf.expert_layout import parameter
from torch_armllm.hf.names import TIED, WIDE
from torch_armllm.hf.output_layer import output_layer_of
from torch_armllm.ops.linear import GROUP
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.layers import ModuleSlots, block_count, is_linear, weight_of
from torch_armllm.quant.modules.experts import PackedExperts, QuantExperts
from torch_armllm.quant.modules.linear import Form, Origin, QuantLinear
from torch_armllm.quant.modules.tied_embedding import SHARED_SCHEMES, TiedEmbedding
from torch_armllm.quant.offset_norm import is_wide, widen
from torch_armllm.quant.packing import empty_panels


def describe_modules(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns scheme, round-trip error and sizes of every packed module, and the float32 norms, by name.

    Panels are padded, so that their shapes do not tell the sizes.
    """
    described: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, TiedEmbedding):
            described[name] = {"scheme": TIED}
        elif is_wide(module):
            described[name] = {"scheme": WIDE}
        elif isinstance(module, (QuantLinear, QuantExperts)):
            error = None if module.error is None else round(module.error, 6)
            described[name] = {"scheme": module.scheme, "error": error, "sizes": _sizes(module)}
            if isinstance(module, QuantLinear) and module.order is not None:
                described[name]["ordered"] = True
            if isinstance(module, QuantLinear) and module.digits > 1:
                described[name]["digits"] = module.digits
            if module.rotated:
                described[name]["rotated"] = True
            if isinstance(module, QuantLinear) and module.blocks > 1:
                described[name]["blocks"] = module.blocks
    return described


def build_skeleton(model: nn.Module, config: ArmInt4Config) -> None:
    """Puts packed modules without weights into a model on the meta device.

    Raises:
        ValueError: the configuration names modules that the model does not have or that cannot be packed.
    """
    if config.modules is None:
        raise ValueError(
            "the quantization_config in config.json has no 'modules': save the model again by save_pretrained"
        )
    slots = ModuleSlots(model)
    own = dict(model.named_modules(remove_duplicate=False))
    embeddings = []
    for name, saved in config.modules.items():
        shell = own.get(name)
        if shell is None or shell is model:
            raise ValueError(
                f"quantization_config names the module {name!r}, which {type(model).__name__} does not have: "
                "config.json belongs to another model or to another version of transformers"
            )
        if saved.get("scheme") == TIED:
            embeddings.append(shell)
        elif saved.get("scheme") == WIDE:
            if not any(parameter is not None for parameter in shell._parameters.values()):
                raise ValueError(
                    f"quantization_config says that the weight of {name} is float32, but a "
                    f"{type(shell).__name__} has none: config.json belongs to another model"
                )
            widen(shell)
        else:
            packed = _empty(name, shell, saved)
            if saved.get("sizes", _sizes(packed)) != _sizes(packed):
                raise ValueError(
                    f"{name} has the sizes {_sizes(packed)} by the other fields of config.json, and "
                    f"{saved['sizes']} were saved: config.json is damaged, or belongs to another checkpoint"
                )
            slots.replace(shell, packed)
    head: Any = output_layer_of(model)
    for shell in embeddings:
        if not isinstance(shell, nn.Embedding) or not isinstance(head, QuantLinear):
            raise ValueError("quantization_config ties an embedding to a head that is not quantized")
        if head.scheme not in SHARED_SCHEMES:
            raise ValueError(
                f"quantization_config ties an embedding to a head of scheme {head.scheme!r}; "
                f"it can be tied to {' or '.join(SHARED_SCHEMES)}"
            )
        slots.replace(shell, TiedEmbedding(shell, head))
        shell._parameters["weight"] = None


def finish_skeleton(model: Any) -> None:
    """Removes placeholders, and makes tied embeddings and heads share the loaded weights."""
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.__dict__.pop("weight", None)
    embedding, head = model.get_input_embeddings(), output_layer_of(model)
    if isinstance(embedding, TiedEmbedding):
        embedding.share(head)
    elif isinstance(head, QuantLinear) and model.config.get_text_config().tie_word_embeddings:
        head.shell._parameters["weight"] = embedding.weight  # type: ignore[union-attr]  # there is one


def forget_ties(model: Any) -> None:
    """Removes packed weights from the ties that transformers knows."""
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied:
        model.all_tied_weights_keys = {a: b for a, b in tied.items() if a in own and b in own}


def _sizes(module: QuantLinear | QuantExperts) -> list[int]:
    """Returns (N, K) of a linear; experts, intermediate and hidden size of experts."""
    if isinstance(module, QuantLinear):
        return [module.out_features, module.in_features]
    return [module.num_experts, module.intermediate_dim, module.hidden_dim]


def _unrotatable(name: str, layers: str) -> ValueError:
    return ValueError(
        f"quantization_config says that {name} is rotated, which {layers} cannot be: config.json belongs to "
        "another model"
    )


def _empty(name: str, shell: nn.Module, saved: dict[str, Any]) -> QuantLinear | QuantExperts:
    """Returns a packed module on the meta device that replaces ``shell``, which loses its weights."""
    packed_module: QuantLinear | QuantExperts
    scheme, error, digits = str(saved.get("scheme")), saved.get("error", 0.0), saved.get("digits", 1)
    allowed = (1, 2) if is_linear(shell) else (1,)
    if isinstance(digits, bool) or not isinstance(digits, int) or digits not in allowed:
        raise ValueError(
            f"quantization_config says that {name} has {digits!r} digits; it can have "
            f"{' or '.join(map(str, allowed))}"
        )
    blocks = saved.get("blocks", 1)
    if blocks != 1 and not (scheme == "int8" and type(blocks) is int and block_count(shell) == blocks):
        raise ValueError(
            f"quantization_config says that {name} has {blocks!r} blocks of scheme {scheme!r}, but a "
            f"{type(shell).__name__} multiplies none or others: config.json belongs to another model"
        )
    rotated = saved.get("rotated", False)
    if not isinstance(rotated, bool):
        raise ValueError(f"quantization_config says that {name} has rotated={rotated!r}: it is true or false")
    if is_linear(shell) or blocks != 1:
        weight = weight_of(shell)
        rows, columns = weight.shape[::-1] if isinstance(shell, Conv1D) else weight.shape
        if rotated and (columns % GROUP or saved.get("ordered") or blocks != 1):
            raise _unrotatable(name, f"layers with blocks, an order of columns or {columns} features")
        packed = empty_panels((), rows, columns, scheme)
        bias: Any = shell.bias
        order = torch.empty(columns, dtype=torch.int32, device="meta") if saved.get("ordered") else None
        origin, form = Origin(shell, weight.dtype, error), Form(order, digits, blocks, rotated)
        packed_module = QuantLinear(packed, columns, rows, scheme, bias, origin, form)
        names: tuple[str, ...] = ("weight",)
    elif is_experts(shell) and not isinstance(layout := read_layout(shell), str):
        downs = layout.outer(parameter(shell, "down_proj"))
        hidden, intermediate = downs[0].shape
        if rotated and (hidden % GROUP or intermediate % GROUP):
            raise _unrotatable(name, f"experts of {hidden} and {intermediate} features")
        weights = PackedExperts(
            empty_panels((len(downs),), intermediate, hidden, scheme, 2 if layout.gated else 1),
            empty_panels((len(downs),), hidden, intermediate, scheme),
            layout.biases(shell),
        )
        origin = Origin(shell, downs[0].dtype, error)
        packed_module = QuantExperts(weights, intermediate, hidden, scheme, layout, origin, rotated)
        names = layout.weights
    else:
        raise ValueError(
            f"quantization_config says that {name} is packed, but a {type(shell).__name__} cannot be packed"
        )
    for attribute in names:
        shell._parameters[attribute] = None
    if is_linear(shell):
        packed_module.__dict__["weight"] = placeholder(weight)
    packed_module.train(shell.training)
    return packed_module


def placeholder(weight: torch.Tensor) -> nn.Parameter:
    """Returns a stand-in for a weight while loading: transformers would initialize a missing weight."""
    empty = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
    empty._is_hf_initialized = True  # type: ignore[attr-defined]
    return empty
