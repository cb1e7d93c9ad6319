"""Loading of third-party checkpoints into packed layers."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel

from torch_armllm.checkpoint.formats.integer_weight import IntegerWeight, LazyRows, LazyWeight
from torch_armllm.checkpoint.formats.pack_modules import packed_experts, packed_linear
from torch_armllm.checkpoint.formats.third_party_checkpoint import ThirdPartyCheckpoint
from torch_armllm.checkpoint.incoming import ACTIVATION_SCALES, Incoming, check_incoming
from torch_armllm.checkpoint.layer_loader import LayerLoader
from torch_armllm.checkpoint.left_out import LeftOut
from torch_armllm.checkpoint.loaded_values import check_small_tensors
from torch_armllm.checkpoint.model_config import config_errors
from torch_armllm.hf.model_kind import kind_of
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.layers import Layer
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.replacement import Replacement
from torch_armllm.quant.report import LayerRecord
from torch_armllm.quant.skeleton import placeholder
from torch_armllm.system.allocator import release_free_memory
from torch_armllm.system.dtypes import dtype_name


class ThirdPartyLoader(LayerLoader):
    """Packs integer weights as they are read; floats of the checkpoint stay floats, except the head.

    An integer weight becomes floats if its layer has no quantized op, or if it belongs to no layer.
    """

    def __init__(self, model: nn.Module, config: ArmInt4Config) -> None:
        super().__init__(model, config)
        self._integers: dict[str, dict[str, IntegerWeight]] = {}
        self._unquantized: dict[str, str] = {}
        self._plain: dict[str, nn.Module] = {}
        for layer in self._run.layers:
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
        layer = self._layer_of.get(name)
        if layer is None:
            self._keep(self._plain[name], name, weight)
        elif isinstance(weight, IntegerWeight):
            self._hold(layer, attribute, weight)
        elif layer.kind == "head":
            super().take(name, weight)
        else:
            self._unquantized[layer.name] = f"the checkpoint left it in {dtype_name(weight.dtype)}"
            self._keep(layer.module, name, weight)

    @torch.no_grad()
    def finish(self) -> list[LayerRecord]:  # noqa: D102
        self._run.layers = [
            replace(layer, reason=self._unquantized.get(layer.name, layer.reason))
            for layer in self._run.layers
        ]
        return super().finish()

    def _keep(self, module: nn.Module, name: str, weight: Tensor | IntegerWeight | LazyRows) -> None:
        """Stores a float weight in a module; `finish` raises an error of its shape."""
        attribute = name.rpartition(".")[2]
        # transformers has yet to fill buffers that no file holds, such as the scale of Gemma's embeddings.
        module._is_hf_initialized = not any(True for _ in module.buffers(recurse=False))  # type: ignore[assignment]
        expected = module.get_parameter(attribute)
        if weight.shape != expected.shape:
            self._error = self._error or _misfit(name, weight, expected)
            module._parameters[attribute] = placeholder(expected)
            return
        dtype = expected.dtype
        value = weight.to(dtype) if isinstance(weight, Tensor) else weight.as_type(dtype)
        parameter = nn.Parameter(value, requires_grad=False)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        module._parameters[attribute] = parameter

    def _hold(self, layer: Layer, attribute: str, weight: IntegerWeight) -> None:
        """Holds integers until their layer is complete, then packs it."""
        module = layer.module
        expected = module.get_parameter(attribute)
        integers = self._integers.setdefault(layer.name, {})
        integers[attribute] = weight
        module._parameters[attribute] = placeholder(expected)
        try:
            if self._error is not None:
                raise self._error
            if weight.shape != expected.shape:
                raise _misfit(f"{layer.name}.{attribute}", weight, expected)
            if len(integers) == len(layer.weights()):
                self._run.add(layer, _packed(layer, integers))
        except ValueError as error:
            self._error = error
        release_free_memory()


def _misfit(name: str, weight: Tensor | IntegerWeight | LazyRows, expected: Tensor) -> ValueError:
    return ValueError(
        f"{name} has the shape {tuple(weight.shape)} in the checkpoint and {tuple(expected.shape)} in the "
        "model: config.json belongs to another checkpoint"
    )


def _packed(layer: Layer, integers: dict[str, IntegerWeight]) -> Replacement:
    new: QuantLinear | QuantExperts
    try:
        if layer.layout is not None:
            new, op = packed_experts(layer, *(integers[name] for name in layer.layout.weights)), "int4_moe"
        else:
            new = packed_linear(layer, integers["weight"])
            op = "int8_linear" if new.scheme == "int8" else "int4_linear"
    except (ValueError, RuntimeError) as error:  # the packing op raises RuntimeError
        raise ValueError(f"{layer.name}: {error}") from error
    integers.clear()
    return Replacement(new.train(layer.module.training), op)


def load_third_party(
    checkpoint: ThirdPartyCheckpoint, config: ArmInt4Config | None, dtype: torch.dtype | str = "auto"
) -> PreTrainedModel:
    """Loads a third-party checkpoint into packed modules, layer by layer, and patches the model.

    Args:
        checkpoint: the opened checkpoint.
        config: its ``head``, ``ignore``, ``kv_cache_dtype`` and ``fuse`` apply; quantized weights keep their
            scheme.  A dequantized checkpoint is quantized by all of it; None: it stays floats, and the model
            is not patched.
        dtype: of the float weights and the activations; ``auto``: the checkpoint's own.

    Raises:
        ValueError: a weight is missing, damaged or stored in a way that cannot be read.
    """
    assert config is not None or checkpoint.dequantized
    options: dict[str, Any] = {}
    if config is not None:
        config.source = None if checkpoint.dequantized else checkpoint.method
        config.stored = checkpoint.stored
        config.whole = checkpoint.config
        options["quantization_config"] = config
    with config_errors(checkpoint.source):
        model_class, model_config = _model_of(checkpoint.config)
        model, info = model_class.from_pretrained(
            None,
            config=model_config,
            state_dict=checkpoint.weights,
            dtype=_dtype(checkpoint) if dtype == "auto" else dtype,
            output_loading_info=True,
            **options,
        )
    missing = info["missing_keys"] if config is None else ()  # the quantizer has looked for others
    left_out = LeftOut(model, checkpoint.config, checkpoint.stored)
    check_incoming(
        Incoming(
            checkpoint.source,
            type(model).__name__,
            missing=missing,
            unread=[name for name in info["unexpected_keys"] if name not in left_out],
            stored=checkpoint.stored,
            irrelevant=(ACTIVATION_SCALES,),
            read=lambda name: checkpoint.weights[name][...],
        )
    )
    if config is None:
        check_small_tensors(model, lambda name: checkpoint.source)
    model.name_or_path = model.config.name_or_path = checkpoint.source
    # a hub would be asked for a file's name
    if kind_of(model).generates and not Path(checkpoint.source).is_file():
        with contextlib.suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(checkpoint.source)
    report = None if config is None else model.hf_quantizer.report
    if report is not None:
        report.notes += checkpoint.notes + checkpoint.requantizer.notes
        if checkpoint.dequantized:
            report.notes.append(f"errors are against the weights that {checkpoint.method} stored")
    return model.eval()


def _model_of(config: PreTrainedConfig) -> tuple[Any, PreTrainedConfig]:
    """Returns the class and configuration of a language model, or of the one in a multimodal model."""
    for part in (config, config.get_text_config(decoder=True)):
        if type(part) in MODEL_FOR_CAUSAL_LM_MAPPING:
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(part)]
            own = model_class.config_class
            inner = own is not None and own == part.sub_configs.get("text_config")
            return model_class, part.get_text_config() if inner else part
    raise ValueError(f"{type(config).__name__} is not the configuration of a causal language model")


def _dtype(checkpoint: ThirdPartyCheckpoint) -> torch.dtype:
    """Returns the dtype of the configuration, else that of the checkpoint's float weights."""
    named = checkpoint.config.dtype or checkpoint.config.get_text_config(decoder=True).dtype
    if isinstance(named, torch.dtype):
        return named
    for weight in checkpoint.weights.values():
        if not isinstance(weight, LazyWeight) and (dtype := weight[:0].dtype).is_floating_point:
            assert isinstance(dtype, torch.dtype)
            return dtype
    return torch.bfloat16
