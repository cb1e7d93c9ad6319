"""Models of any shape with random packed weights: speed does not depend on the weights' values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from torch_armllm.hf.names import TIED
from torch_armllm.ops.linear import GROUP, PANEL
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.layers import find_layers
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.modules.tied_embedding import can_share
from torch_armllm.quant.packing import pack
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.schemes.base import Quantized
from torch_armllm.quant.schemes.registry import DEFAULT, scheme_named
from torch_armllm.quant.skeleton import build_skeleton

_SHARD = 1 << 30
_DEVIATION = 0.02
_PANELS = 64
"""Different panels per row length; all matrices with that row length repeat them."""


def save_random_model(
    config: PreTrainedConfig, folder: Path, scheme: str = DEFAULT, head: str | None = "int8"
) -> None:
    """Writes a quantized model with random weights in ``save_pretrained`` format; never makes float weights.

    Routers are random too, so tokens spread evenly over the experts.  A folder that already holds such a
    model of the same configuration is not written again.

    Args:
        config: configuration of the model; its dtype defaults to bfloat16.
        folder: output folder; it is created.
        scheme: scheme of linear layers and experts, with one float scale a row, such as ``int4`` or ``row``.
        head: such a scheme, of the output head; None: it stays float.

    Raises:
        ValueError: the scheme is not supported, or a layer cannot be quantized.
    """
    for name in (scheme, head):
        if name is not None and scheme_named(name).span:
            raise ValueError(f"random weights need a scheme with one float scale a row, not {name!r}")
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.bfloat16)
    recipe = Recipe(scheme, head, method="rtn")  # which scales no channels
    modules = _packed_modules(model, recipe)
    config.quantization_config = ArmInt4Config(recipe, modules=modules).to_dict()
    described = config.to_json_string()
    done = folder / "config.json"
    if done.exists() and done.read_text() == described:
        return
    folder.mkdir(parents=True, exist_ok=True)
    build_skeleton(model, ArmInt4Config(recipe, modules=modules))
    _save_shards(_tensors(model, torch.Generator().manual_seed(0)), folder)
    done.write_text(described)  # written last: marks the folder as complete


def _packed_modules(model: nn.Module, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Returns every layer to quantize, with its scheme."""
    layers, schemes = recipe.assign(find_layers(model, (), loading=True))
    modules: dict[str, dict[str, Any]] = {}
    for layer in layers:
        if layer.reason is not None:
            continue
        name = schemes[layer.name].name
        modules[layer.name] = {"scheme": name, "error": 0.0}
        own = {id(weight) for weight in layer.weights()}
        for path, module in model.named_modules():
            if isinstance(module, nn.Embedding) and id(module.weight) in own and can_share(module, name):
                modules[path] = {"scheme": TIED}
    return modules


def _tensors(model: nn.Module, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of the checkpoint in turn."""
    pools: dict[tuple[str, int], Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in _packed_buffers(module):
            key = module.scheme, _columns(module, name)
            if key not in pools:
                pools[key] = _random_panels(*key, generator)
            count = buffer[..., 0].numel()
            chosen = torch.randint(_PANELS, (count,), generator=generator)
            yield f"{prefix}.{name}", pools[key][chosen].view(buffer.shape)
    for name, tensor in model.state_dict().items():
        if not name.endswith("_packed"):
            yield name, _random_values(name, tensor, generator)


def _packed_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    if not isinstance(module, (QuantLinear, QuantExperts)):
        return []
    return [
        (name, buffer) for name, buffer in module.named_buffers(recurse=False) if name.endswith("_packed")
    ]


def _columns(module: nn.Module, name: str) -> int:
    if isinstance(module, QuantLinear):
        return module.in_features
    assert isinstance(module, QuantExperts)
    return module.intermediate_dim if name.startswith("down") else module.hidden_dim


def _random_panels(scheme: str, columns: int, generator: torch.Generator) -> Tensor:
    handler = scheme_named(scheme)
    traits, half = handler.traits, 1 << handler.traits.bits - 1
    rows, groups = PANEL * _PANELS, -(-columns // GROUP)
    unit = min(half / 3.2, 32.0)
    q = (torch.randn(rows, columns, generator=generator) * unit).round().clamp(-half, half - 1)
    multipliers = zeros = None
    if most := min(traits.largest_multiplier, 14):  # the largest of g32iz
        least = 1 << (most - 1).bit_length() - 1  # the upper half of what its bits can tell apart
        multipliers = torch.randint(least, most + 1, (rows, groups), dtype=torch.uint8, generator=generator)
        unit *= (least + most) / 2
        if traits.signed_multipliers:
            signs = torch.randint(0, 2, (rows, groups), dtype=torch.int8, generator=generator) * 2 - 1
            multipliers = multipliers.to(torch.int8) * signs
    if traits.zero_points:
        narrow = traits.has_narrow_zero_points
        shape = (rows, groups) if narrow else (rows,)
        zeros = torch.randint(6, 10, shape, dtype=torch.uint8, generator=generator)
        q += zeros.repeat_interleave(GROUP, 1)[:, :columns] if narrow else zeros[:, None]
    scales = torch.full((rows,), _DEVIATION / unit)
    q = q.clamp(handler.lowest, handler.highest).to(torch.int8)
    return pack(Quantized(scheme, q, scales, multipliers, zeros))


def _random_values(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.dtype.is_floating_point:
        return torch.randint(-128, 128, tensor.shape, generator=generator).to(tensor.dtype)
    if tensor.dim() < 2:
        return (
            torch.zeros_like(tensor, device="cpu")
            if name.endswith("bias")
            else torch.ones_like(tensor, device="cpu")
        )
    values = torch.empty(tensor.shape, dtype=torch.float32).normal_(0, _DEVIATION, generator=generator)
    return values.to(tensor.dtype)


def _save_shards(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Writes files of about 1 GiB each, and their index."""
    shard: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    count = size = total = 0

    def write() -> None:
        nonlocal shard, count, size
        count += 1
        file = f"model-{count:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard, size = {}, 0

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > _SHARD:
            write()
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    write()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
