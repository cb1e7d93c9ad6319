"""Finds the modules of a model that hold weight matrices, and decides which can be quantized."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from torch_armllm.hf.expert_detection import is_experts, read_layout
from torch_armllm.hf.expert_layout import ExpertLayout
from torch_armllm.hf.output_layer import output_layer_of
from torch_armllm.ops.linear import GROUP, PANEL
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.modules.tied_embedding import TiedEmbedding
from torch_armllm.quant.weight_reads import layers_read

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NARROW = 16
"""Layers with fewer inputs or outputs than this are not worth quantizing."""
_ROUTERS = re.compile(r"(^|_)(gate|router)$|^wg$")
_CHANGES = re.compile(r"(\w+\.\w+)\.weight(?:\.data)?\.(?:mul|div|add|sub|copy)_\(")
_PACKED = ("qweight", "weight_packed", "qzeros", "weight_scale", "packed_weight")


@dataclass(frozen=True)
class Layer:
    """A module with weight matrices.

    Attributes:
        name: path from the model's root.
        module: the module itself.
        kind: ``linear``, ``latent``, ``blocks``, ``head``, ``experts``, ``router`` or ``other``.
        reason: the reason why it stays unquantized, or None.
        layout: weight layout of experts that can be quantized.
    """

    name: str
    module: nn.Module
    kind: str
    reason: str | None = None
    layout: ExpertLayout | None = None

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Names of the module's parameters that quantizing replaces."""
        return self.layout.weights if self.layout is not None else ("weight",)

    def weights(self) -> list[Tensor]:
        """Returns the weights that quantizing replaces."""
        if self.kind == "experts" and self.layout is not None:
            return [getattr(self.module, name) for name in self.layout.weights]
        if is_linear(self.module):
            return [weight_of(self.module)]
        return [p for p in self.module.parameters(recurse=False) if p.dim() >= 2]

    def has_whole_groups(self) -> bool:
        """True if inputs of a linear layer or of experts are whole groups of 32, which can be rotated."""
        if self.layout is not None:
            return all(size % GROUP == 0 for size in self.layout.outer(self.weights()[1])[0].shape)
        return weight_of(self.module).shape[0 if isinstance(self.module, Conv1D) else 1] % GROUP == 0

    def matrices(self) -> list[list[Tensor]]:
        """Returns views (N, K) of the matrices that are packed: one, or each expert's, by their role."""
        if self.layout is None:
            weight = weight_of(self.module).detach()
            return [[weight.t() if isinstance(self.module, Conv1D) else weight]]
        inner, outer = self.weights()
        return [*self.layout.inner(inner), self.layout.outer(outer)]


def is_linear(module: nn.Module) -> bool:
    """True if a module computes ``x · Wᵀ + b`` from plain parameters: ``nn.Linear`` or GPT-2's ``Conv1D``."""
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    return isinstance(module, nn.Linear) and _computes_linear(module)


def _computes_linear(module: nn.Linear) -> bool:
    """True if a subclass with a forward of its own, such as Falcon's, computes ``x · Wᵀ + b``."""
    if module.weight is None or module.weight.device.type != "cpu":
        return False
    x = torch.linspace(-1.0, 1.0, 2 * module.in_features).view(1, 2, -1).to(module.weight.dtype)
    try:
        with torch.no_grad():
            actual = type(module).forward(module, x)
            expected = nn.functional.linear(x, module.weight, module.bias)
    except Exception:  # noqa: BLE001 - a forward with other arguments is no linear layer
        return False
    same = isinstance(actual, Tensor) and actual.shape == expected.shape
    return same and torch.allclose(actual.float(), expected.float(), rtol=2e-2, atol=1e-3)


_BLOCKS: dict[tuple[Any, ...], int] = {}


def block_count(module: nn.Module) -> int:
    """Returns the number n of diagonal blocks of a layer's weight; 1 for a layer that has none.

    Such a layer has tokens (…, n, K), and multiplies part i of each by block i of its rows, as the grouped
    output projection of DeepSeek-V4 does.  n is one of the module's own numbers.
    """
    if not isinstance(module, nn.Linear) or module.weight is None or module.bias is not None:
        return 1
    rows, columns = module.weight.shape
    numbers = sorted({n for n in vars(module).values() if type(n) is int and n > 1})
    key = (type(module), rows, columns, *numbers)
    if key not in _BLOCKS:
        counts = (n for n in numbers if rows % (PANEL * n) == 0 and _computes_blocks(module, n))
        _BLOCKS[key] = next(counts, 1)
    return _BLOCKS[key]


def _computes_blocks(module: nn.Linear, count: int) -> bool:
    """True if a subclass of ``nn.Linear`` computes the products of ``count`` blocks, with a random weight."""
    rows, columns = module.weight.shape
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=random, device="cpu")
    x = torch.randn(1, 2, count, columns, generator=random, device="cpu")
    try:
        with torch.no_grad():
            actual = torch.func.functional_call(module, {"weight": weight}, (x,))
    except Exception:  # noqa: BLE001 - a forward with other arguments multiplies no blocks
        return False
    expected = torch.einsum("btnk,nrk->btnr", x, weight.view(count, -1, columns))
    same = isinstance(actual, Tensor) and actual.shape == expected.shape
    return same and torch.allclose(actual, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def weight_of(module: nn.Module) -> Tensor:
    """Returns the weight of a module that `is_linear`."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _fits(name: str, pattern: str) -> bool:
    """True if a layer's name fits a pattern, or a name without wildcards is part of it, from dot to dot."""
    return fnmatchcase(name, pattern) or f".{pattern}." in f".{name}."


def find_layers(model: nn.Module, ignore: Sequence[str] = (), loading: bool = False) -> list[Layer]:
    """Lists every module with a weight matrix, except embeddings and quantized modules.

    Args:
        model: a transformers model on the CPU.
        ignore: shell-style patterns of layer names that stay unquantized, such as ``*.down_proj``; or names
            of modules: see `_fits`.
        loading: the model is still on the meta device.

    Raises:
        ValueError: a weight is not on the CPU, not a float, or quantized already; or a pattern fits no layer.
    """
    layers = [
        _classify(model, name, module, loading)
        for name, module in model.named_modules()
        if _holds_matrix(module)
    ]
    for pattern in ignore:
        if not any(_fits(layer.name, pattern) for layer in layers):
            raise ValueError(
                f"ignore pattern {pattern!r} fits no layer; layers are named like {layers[0].name!r}"
            )
    return [
        Layer(layer.name, layer.module, layer.kind, "left out on request")
        if any(_fits(layer.name, pattern) for pattern in ignore)
        else layer
        for layer in layers
    ]


def check_finite(layers: Sequence[Layer]) -> None:
    """Raises ValueError if a weight to be quantized holds a NaN or an infinity, and names its layer."""
    for layer in layers:
        if layer.reason is not None:
            continue
        for weight in layer.weights():
            low, high = torch.aminmax(weight.detach()) if weight.numel() else (weight.new_zeros(()),) * 2
            if not bool(low.isfinite() & high.isfinite()):
                index = tuple(int(axis[0]) for axis in torch.where(~weight.detach().isfinite()))
                raise ValueError(
                    f"the weight of {layer.name} holds {float(weight[index])} at {index}: the checkpoint is "
                    f"damaged; download it again, or leave the layer out with ignore=[{layer.name!r}]"
                )


class ModuleSlots:
    """The attributes of parent modules that hold each module of a model; a shared layer has several."""

    def __init__(self, model: nn.Module) -> None:
        self._parents: dict[int, list[tuple[nn.Module, str]]] = {}
        for parent in model.modules():
            # Not named_children(): it lists a child with two slots in one parent only once.
            for attribute, child in parent._modules.items():
                self._parents.setdefault(id(child), []).append((parent, attribute))

    def replace(self, old: nn.Module, new: nn.Module) -> None:
        """Sets ``new`` in every slot that held ``old``."""
        for parent, attribute in self._parents[id(old)]:
            setattr(parent, attribute, new)


def _holds_matrix(module: nn.Module) -> bool:
    if isinstance(module, (nn.Embedding, TiedEmbedding, QuantLinear, QuantExperts)):
        return False
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    if any(name in _PACKED for name in own):
        raise ValueError(
            f"{type(module).__name__} holds weights that are quantized already ({', '.join(own)}); "
            "load the model in bfloat16, float16 or float32"
        )
    return any(p.dim() >= 2 for p in module.parameters(recurse=False))


def _classify(model: nn.Module, name: str, module: nn.Module, loading: bool) -> Layer:
    for weight in module.parameters(recurse=False):
        _check(name, weight, loading)
    parent_name, _, attribute = name.rpartition(".")
    if is_experts(module):
        layout = read_layout(module)
        if isinstance(layout, str):
            return Layer(name, module, "experts", layout)
        return Layer(name, module, "experts", layout=layout)
    if _is_router(model, attribute, module):
        return Layer(name, module, "router", "it chooses experts: rounding it would change the choice")
    linear = is_linear(module)
    if not linear and block_count(module) == 1:
        return Layer(name, module, "other", f"{type(module).__name__} has no fused op")
    head = output_layer_of(model)
    parent = model.get_submodule(parent_name)
    kind = "head" if module is head else "latent" if is_up_projection(parent, attribute) else "linear"
    kind = kind if linear else "blocks"
    if min(weight_of(module).shape) < NARROW:
        return Layer(
            name, module, kind, f"it is too narrow to gain anything: {tuple(weight_of(module).shape)}"
        )
    parts = name.split(".")
    for depth in range(len(parts)):
        above: Any = type(model.get_submodule(".".join(parts[:depth])))
        if ".".join(parts[depth:]) in layers_read(above):
            return Layer(name, module, kind, f"{above.__name__} reads its weight without calling it")
        if depth + 1 < len(parts) and name.endswith(_changed_weights(above)):
            return Layer(name, module, kind, f"{above.__name__} changes its weight as it runs")
    return Layer(name, module, kind)


def is_up_projection(parent: nn.Module, attribute: str) -> bool:
    """True if a layer is the up-projection of transformers' latent attention."""
    return attribute == "kv_b_proj" and hasattr(parent, "expand_kv")


def _is_router(model: nn.Module, attribute: str, module: nn.Module) -> bool:
    if not is_linear(module):
        return bool(_ROUTERS.search(attribute) or re.search("Router|Gate$", type(module).__name__))
    # A wide linear layer called gate is no router: gated attention and some MLPs have one.
    config = getattr(model, "config", None)
    values = config.get_text_config().to_dict() if config is not None else {}
    counts = {value for key, value in values.items() if "expert" in key and isinstance(value, int)}
    return bool(_ROUTERS.search(attribute)) and _outputs(module) in counts


def _outputs(linear: nn.Module) -> int:
    return weight_of(linear).shape[1 if isinstance(linear, Conv1D) else 0]


def _check(name: str, weight: Tensor, loading: bool) -> None:
    if weight.device.type != ("meta" if loading else "cpu"):
        raise ValueError(
            f"{name} is on {weight.device}; move the model to the CPU with model.to('cpu') first"
        )
    if weight.dim() >= 2 and (weight.dtype not in FLOATS or type(weight) not in (nn.Parameter, Tensor)):
        raise ValueError(
            f"the weight of {name} is {type(weight).__name__} of {weight.dtype}, quantized already; "
            "load the model in bfloat16, float16 or float32"
        )


@cache
def _changed_weights(kind: type[nn.Module]) -> tuple[str, ...]:
    """Returns the name endings of layers whose weights a module changes in place, as RWKV does."""
    return tuple(f".{path}" for path in _CHANGES.findall(_source(kind)))  # type: ignore[arg-type]


@cache
def _source(kind: type[nn.Module]) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
