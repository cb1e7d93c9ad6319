"""Packing the layers of a model while a foreign checkpoint is read, and the call that does all of it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel

from torch_armllm.checkpoint.formats.base import Foreign
from torch_armllm.checkpoint.formats.integer_weight import Integers, Lazy, Rows
from torch_armllm.checkpoint.formats.pack_modules import packed_experts, packed_linear
from torch_armllm.checkpoint.layer_loader import LayerLoader
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.layers import Layer
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.replacement import Replacement
from torch_armllm.quant.report import LayerRecord
from torch_armllm.quant.skeleton import placeholder
from torch_armllm.system.allocator import release_free_memory


class ForeignLoader(LayerLoader):
    """Packs integers as they come, and leaves the floats that the checkpoint left, but for the head.

    A weight of integers whose layer has no op for them, or that is no layer's, becomes floats again.
    """

    def __init__(self, model: nn.Module, config: ArmInt4Config) -> None:
        super().__init__(model, config)
        self._integers: dict[str, dict[str, Integers]] = {}
        self._left: dict[str, str] = {}
        self._plain: dict[str, nn.Module] = {}
        for layer in self._layers:
            if layer.reason is not None and layer.kind != "experts":
                self._plain[f"{layer.name}.weight"] = layer.module
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                self._plain[f"{name}.weight"] = module

    def wants(self, name: str) -> bool:  # noqa: D102
        return super().wants(name) or name in self._plain

    @torch.no_grad()
    def take(self, name: str, weight: Tensor) -> None:  # noqa: D102
        attribute = name.rpartition(".")[2]
        layer = self._wanted.get(name)
        if layer is None:
            self._keep(self._plain[name], attribute, weight)
        elif isinstance(weight, Integers):
            self._hold(layer, attribute, weight)
        elif layer.kind == "head":
            super().take(name, weight)
        else:
            self._left[layer.name] = f"the checkpoint left it in {str(weight.dtype).removeprefix('torch.')}"
            self._keep(layer.module, attribute, weight)

    @torch.no_grad()
    def finish(self) -> list[LayerRecord]:  # noqa: D102
        self._layers = [
            replace(layer, reason=self._left.get(layer.name, layer.reason)) for layer in self._layers
        ]
        return super().finish()

    def _keep(self, module: nn.Module, attribute: str, weight: Tensor | Integers | Rows) -> None:
        """Gives a module a float weight."""
        # Buffers that no file holds, such as the scale of Gemma's embeddings, are still to be filled.
        module._is_hf_initialized = not any(True for _ in module.buffers(recurse=False))  # type: ignore[assignment]
        dtype = module.get_parameter(attribute).dtype
        value = weight.to(dtype) if isinstance(weight, Tensor) else weight.as_type(dtype)
        kept = nn.Parameter(value, requires_grad=False)
        kept._is_hf_initialized = True  # type: ignore[attr-defined]
        module._parameters[attribute] = kept

    def _hold(self, layer: Layer, attribute: str, weight: Integers) -> None:
        """Keeps integers until their layer has all of them, and packs it then."""
        module = layer.module
        expected = module.get_parameter(attribute)
        held = self._integers.setdefault(layer.name, {})
        held[attribute] = weight
        module._parameters[attribute] = placeholder(expected)
        try:
            if self._error is not None:
                raise self._error
            if weight.shape != expected.shape:
                raise ValueError(
                    f"{layer.name}.{attribute} has the shape {tuple(weight.shape)} in the checkpoint and "
                    f"{tuple(expected.shape)} in the model: config.json belongs to another checkpoint"
                )
            if len(held) == len(layer.weights()):
                made = _packed(layer, held)
                self._made[layer.name] = made, made.record(layer)
        except ValueError as error:
            self._error = error
        release_free_memory()


def _packed(layer: Layer, held: dict[str, Integers]) -> Replacement:
    new: QuantLinear | QuantExperts
    try:
        if layer.layout is not None:
            new, op = packed_experts(layer, *(held[name] for name in layer.layout.weights)), "int4_moe"
        else:
            new = packed_linear(layer, held["weight"])
            op = "int8_linear" if new.scheme == "int8" else "int4_linear"
    except (ValueError, RuntimeError) as error:  # the op that packs raises the latter
        raise ValueError(f"{layer.name}: {error}") from error
    held.clear()
    return Replacement(new.train(layer.module.training), op)


def load_foreign(
    foreign: Foreign, config: ArmInt4Config | None, dtype: torch.dtype | str = "auto"
) -> PreTrainedModel:
    """Loads a checkpoint that another tool quantized into packed modules, layer by layer, and patches it.

    Args:
        foreign: the checkpoint.
        config: ``head``, ``ignore``, ``kv_cache`` and ``fuse``; what was quantized keeps its scheme.  Of a
            decoded checkpoint, how its floats are quantized anew; None: they stay, and nothing is patched.
        dtype: of what is not quantized, and of what the model computes; ``auto``: the checkpoint's own.

    Raises:
        ValueError: a weight is missing, damaged or stored in a way that cannot be read.
    """
    assert config is not None or foreign.decoded
    options: dict[str, Any] = {}
    if config is not None:
        config.source = None if foreign.decoded else foreign.method
        options["quantization_config"] = config
    model_class, model_config = _model_of(foreign.config)
    model: PreTrainedModel = model_class.from_pretrained(
        None,
        config=model_config,
        state_dict=foreign.weights,
        dtype=_dtype(foreign) if dtype == "auto" else dtype,
        **options,
    )
    model.name_or_path = model.config.name_or_path = foreign.place
    if model.can_generate():
        with contextlib.suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(foreign.place)
    report = None if config is None else model.hf_quantizer.report
    if report is not None:
        report.notes += foreign.notes + foreign.rounded.notes
        if foreign.decoded:
            report.notes.append(f"errors are against the weights that {foreign.method} stored")
    return model.eval()


def _model_of(config: PreTrainedConfig) -> tuple[Any, PreTrainedConfig]:
    """The class of a language model, or of the one in a model of several kinds, and what configures it."""
    for part in (config, config.get_text_config(decoder=True)):
        if type(part) in MODEL_FOR_CAUSAL_LM_MAPPING:
            found = MODEL_FOR_CAUSAL_LM_MAPPING[type(part)]
            own = found.config_class
            inner = own is not None and own == part.sub_configs.get("text_config")
            return found, part.get_text_config() if inner else part
    raise ValueError(f"{type(config).__name__} is not the configuration of a causal language model")


def _dtype(foreign: Foreign) -> torch.dtype:
    """The type that the configuration names, or that of the floats that were left."""
    named = foreign.config.dtype or foreign.config.get_text_config(decoder=True).dtype
    if isinstance(named, torch.dtype):
        return named
    for weight in foreign.weights.values():
        if not isinstance(weight, Lazy) and (dtype := weight[:0].dtype).is_floating_point:
            assert isinstance(dtype, torch.dtype)
            return dtype
    return torch.bfloat16
