"""Models that `patch` takes."""

from __future__ import annotations

from typing import Any

from torch import nn

from torch_armllm.capture.markers.compression import is_compressor
from torch_armllm.capture.markers.mla import is_latent_attention
from torch_armllm.hf.model_kind import ModelKind, kind_of
from torch_armllm.hf.sizes import attention_sizes
from torch_armllm.ops.attention import check_int4_size
from torch_armllm.patching.state import is_patched
from torch_armllm.quant.inspection import is_packed


def checked_kind(model: nn.Module) -> ModelKind:
    """Returns the kind of a model that `patch` takes as it is.

    Raises:
        ValueError: it does not.
    """
    from transformers import PreTrainedModel

    name = type(model).__name__
    adapted = [at for at, module in model.named_modules() if _is_adapted(module)]
    if adapted:
        raise ValueError(
            f"this {name} has adapters that are not merged ({adapted[0]} is the first of {len(adapted)}); "
            "a patched model would not see them change: merge them first, model = model.merge_and_unload()"
        )
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"patch needs a transformers model, got a {name}")
    kind = kind_of(model)
    kind.check()
    if is_patched(model):
        raise ValueError(f"this {name} is patched already; call torch_armllm.unpatch(model) first")
    if model.training:
        raise ValueError(f"this {name} is in training mode; call model.eval() first")
    foreign = getattr(model, "quantization_method", None) or getattr(
        model.config, "quantization_config", None
    )
    if not is_packed(model) and (foreign is not None or getattr(model, "is_quantized", False)):
        raise ValueError(
            f"this {name} has weights quantized by {foreign}; torch_armllm.load(folder) reads "
            "such weights, or load it in BF16 or FP32 to patch it"
        )
    elsewhere = {str(p.device) for p in model.parameters() if p.device.type != "cpu"}
    if elsewhere:
        raise ValueError(
            f"this {name} is on {', '.join(sorted(elsewhere))}; move it to the CPU with model.to('cpu')"
        )
    return kind


def check_cache_dtype(kind: ModelKind, kv_cache_dtype: str | None) -> None:
    """Raises ValueError if the keys and values, or what a model caches in their place, cannot have a dtype.

    Args:
        kind: of the model.
        kv_cache_dtype: the full name of a dtype; None for the model's own.
    """
    if kv_cache_dtype is not None and kind.has_two_stacks:
        raise ValueError(
            f"{kind.name} keeps the keys and values of its encoder in the model's own dtype; "
            "leave kv_cache_dtype out"
        )
    _check_latent_dtype(kind.model, kv_cache_dtype)
    if kv_cache_dtype == "int4" and (sizes := attention_sizes(kind.model.config)) is not None:
        check_int4_size(sizes.head_size)  # before minutes are spent on the weights


def _is_adapted(module: nn.Module) -> bool:
    """True if a module is a layer wrapped by PEFT."""
    return hasattr(module, "base_layer") and hasattr(module, "active_adapters")


def _check_latent_dtype(model: Any, kv_cache_dtype: str | None) -> None:
    """Raises if the model caches latents or compressed entries, which cannot have the dtype."""
    if kv_cache_dtype not in ("int8", "int4"):
        return
    has_entries = any(is_compressor(module) for module in model.modules())
    if has_entries or (kv_cache_dtype == "int4" and any(map(is_latent_attention, model.modules()))):
        raise ValueError(
            f"{type(model).__name__} caches {'compressed entries' if has_entries else 'latents'}, which are "
            f"not stored as {kv_cache_dtype}; set kv_cache_dtype to bfloat16, float16 or float32"
            + ("" if has_entries else ", or to int8")
        )
