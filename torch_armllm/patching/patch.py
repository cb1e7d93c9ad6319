"""Quantizes a transformers model and rewrites it to fused ops, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.capture.export import CaptureError
from torch_armllm.capture.tracing_memory import released_tracing_memory
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.hf.releases import warn_if_newer
from torch_armllm.hf.replacements import Replacements
from torch_armllm.kv_cache.dtypes import KV_CACHE_DTYPES, full_kv_cache_dtype
from torch_armllm.lora.slots import AdapterSlots, add_slots, check_recipe
from torch_armllm.ops import variants
from torch_armllm.patching.copies import keep_apart
from torch_armllm.patching.install import install
from torch_armllm.patching.patchable import check_cache_dtype, checked_kind
from torch_armllm.patching.stacks import install_stacks
from torch_armllm.patching.state import STATE, PatchState, patch_state
from torch_armllm.patching.trial.trial import fault_of
from torch_armllm.quant.auto import resolve_auto
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.inspection import describe, float_bytes, is_packed
from torch_armllm.quant.methods.base import CALIBRATED
from torch_armllm.quant.outliers import find_outliers
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.report import LayerRecord, Report
from torch_armllm.quant.restore import restore
from torch_armllm.system.allocator import release_free_memory
from torch_armllm.system.default_dtype import Float32ByDefault
from torch_armllm.system.huge_pages import collapse_packed


def _bytes(model: nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.nbytes for t in tensors.values())


@Float32ByDefault()
def patch(
    model: Any,
    quantization: str | Recipe | None = "auto",
    *,
    kv_cache_dtype: str | None = None,
    keep_original: bool = False,
    progress: bool = True,
    calibration: Tensor | None = None,
    adapter_slots: AdapterSlots | None = None,
) -> Report:
    """Quantizes a transformers model to INT4 or INT8 and rewrites it to fused ops, in place.

    ``model(...)`` and ``model.generate(...)`` keep working and return the same, up to rounding and
    quantization.  Calls that the fused step cannot serve (``output_attentions``, ``inputs_embeds``, …) run
    module by module, with one warning per reason.  At the end the finished model is tried: where it computes
    something else by its plan than by its modules, the modules stay, and the report says why.

    If `patch` raises an error, the model is unchanged.  Ctrl-C after its weights were quantized leaves them
    so, without a plan; another call makes it.

    Args:
        model: a transformers causal language model in evaluation mode, on the CPU, in float32, bfloat16 or
            float16; or a bare decoder or encoder of text (``AutoModel``), a classifier, a tagger or a reward
            model that is made of one, or an encoder with a head for masked tokens.
        quantization: ``"int4"`` (the exact scheme g32iz), ``"int8"``, the name of another scheme (``g32``,
            ``row``, …), a `Recipe`, or None to keep the weights as they are; ``"auto"``: ``"int4"`` for
            models that predict tokens, ``"int8"`` for the others, and packed weights as they are.
        kv_cache_dtype: element type of the KV cache: ``"int8"`` (with one scale per token and head, or with
            two for the latents of a token), ``"int4"`` (less accurate, not for latents), ``"bfloat16"``,
            ``"float16"``, ``"float32"``, or None for the model's own dtype.
        keep_original: keep the float weights, so that `unpatch` restores them exactly.
        progress: show a progress bar while quantizing.
        calibration: token ids ``(sequences, length)`` for the methods that calibrate.
        adapter_slots: slots for LoRA adapters that the linear layers get; None: none.

    Returns:
        The report: result of each layer, reasons of unquantized layers, sizes and errors.  It prints as a
        table.

    Raises:
        ValueError: the model is no decoder or encoder of text, is patched already, is in training mode, is
            not on the CPU, has unmerged adapters, or was quantized by another tool; a weight is not finite;
            or an option is unknown.
    """
    kind = checked_kind(model)
    kv_cache_dtype = full_kv_cache_dtype(kv_cache_dtype)
    check_cache_dtype(kind, kv_cache_dtype)
    records = None
    quantized = quantization is not None
    packed = is_packed(model)
    quantization = resolve_auto(quantization, kind.predicts_tokens, packed)
    if quantization is not None:
        recipe = Recipe.of(quantization)
        if not packed:
            if adapter_slots is not None:
                check_recipe(recipe)  # before minutes are spent on the weights
            records = quantize(
                model, recipe, keep_original=keep_original, progress=progress, calibration=calibration
            )
        elif quantization != "int4" or model.config.quantization_config.source is None:
            own = model.config.quantization_config
            recipe.check_packed(own.recipe, own.source)
    if adapter_slots is not None:
        add_slots(model, adapter_slots)
    report = fuse(kind, kv_cache_dtype, records)
    model.__dict__[STATE].quantized = quantized
    if hasattr(model, "hf_quantizer"):
        model.config.quantization_config.kv_cache_dtype = kv_cache_dtype
        model.config.quantization_config.fuse = True  # a folder that is saved now loads patched
    return report


def fuse(kind: ModelKind, kv_cache_dtype: str | None, records: list[LayerRecord] | None) -> Report:
    """Rewrites a model to fused ops; the weights do not change.

    Args:
        kind: of a model, quantized or not.
        kv_cache_dtype: see `patch`.
        records: records of its layers; None: determined from the model.

    Returns:
        The report; if the model cannot be captured, it states the reason.
    """
    warn_if_newer()
    model = kind.model
    cache_dtype = None if kv_cache_dtype is None else KV_CACHE_DTYPES[kv_cache_dtype]
    report = Report(variant=variants.machine().compiled)
    report.layers = describe(model, "quantization is off") if records is None else records
    calibrated = is_packed(model) and model.config.quantization_config.recipe.method in CALIBRATED
    outliers = find_outliers(report.layers, calibrated)
    report.outliers = {record.name: expected for record, expected in outliers}
    report.bytes_before = float_bytes(model, _bytes(model))
    with Replacements() as replaced:
        forward = None
        try:
            with torch.no_grad(), released_tracing_memory():
                if kind.has_two_stacks:
                    installed = install_stacks(kind, replaced)
                else:
                    installed = install(kind, cache_dtype, replaced)
            if (fault := fault_of(installed)) is not None:
                raise CaptureError(fault)
        except CaptureError as reason:
            report.capture_reason = str(reason)
        except Exception as error:  # the quantized modules still run, so keep the quantized model
            report.capture_reason = f"the rewrite failed with {type(error).__name__}: {error}"
        else:
            forward = installed.forward
            report.captured, report.ops = True, installed.ops
            report.kv_bytes, report.kv_bytes_expanded = installed.kv_bytes, installed.kv_bytes_expanded
            report.notes += installed.notes
        if forward is None:
            replaced.undo()
        release_free_memory()
        collapse_packed(model)
        report.bytes_after = _bytes(model)
        replaced.put(model, STATE, PatchState(kind, forward, is_packed(model), report, replaced))
        keep_apart(replaced)
    return report


def unpatch(model: nn.Module) -> list[str]:
    """Undoes `patch`, in place.

    Returns:
        Names of the layers whose float weights remain rounded, because the originals were not kept.

    Raises:
        ValueError: the model is not patched.
    """
    state = remove_plan(model)
    return restore(model) if state.quantized else []


@Float32ByDefault()
def patch_with_slots(model: Any, kv_cache_dtype: str | None, sizes: AdapterSlots) -> Report:
    """Rewrites a patched model once more, with slots for adapters; the weights do not change.

    Args:
        model: a patched model, such as one that was loaded from a folder of packed weights.
        kv_cache_dtype: see `patch`.
        sizes: of the slots.

    Raises:
        ValueError: the model is not patched, or has no quantized layers.
    """
    patch_state(model)  # raises unless it is patched
    add_slots(model, sizes)  # first: it may refuse them, and the plan stays then
    state = remove_plan(model)
    report = fuse(state.kind, kv_cache_dtype, state.report.layers)
    model.__dict__[STATE].quantized = state.quantized
    return report


def remove_plan(model: nn.Module) -> PatchState:
    """Gives a model its own ``forward`` and ``generate`` back; returns what its patch was.

    Raises:
        ValueError: the model is not patched.
    """
    state = patch_state(model)
    state.replaced.undo()
    return state
