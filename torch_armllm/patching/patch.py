"""Quantizes a transformers model and rewrites it to fused ops, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from torch_armllm.capture.export import CaptureError
from torch_armllm.capture.markers.compression import is_compressor
from torch_armllm.capture.markers.indexer import dense_limit, find_indexers
from torch_armllm.capture.markers.mla import is_latent_attention
from torch_armllm.capture.tracing_memory import released_tracing_memory
from torch_armllm.hf.base_model import base_model_of, max_length_of
from torch_armllm.kv_cache.budget import shape_by_config
from torch_armllm.kv_cache.dtypes import KV_CACHE_DTYPES, full_kv_cache_dtype
from torch_armllm.kv_cache.shapes import StatesOnlyShape, latent_groups
from torch_armllm.lora.slots import AdapterSlots, add_slots
from torch_armllm.ops import variants
from torch_armllm.ops.attention import check_int4_size
from torch_armllm.patching.build_plan import build_plan
from torch_armllm.patching.copies import GET_STATE, keep_apart
from torch_armllm.patching.encoder_forward import EncoderForward
from torch_armllm.patching.forward import PatchedForward, with_gradients_by_modules
from torch_armllm.patching.generation.generate import PatchedGenerate
from torch_armllm.patching.model_kind import (
    check_kind,
    has_two_stacks,
    misuse,
    predicts_tokens,
    results_of,
)
from torch_armllm.patching.nested_text import has_nested_text, with_texts_by_ids
from torch_armllm.patching.op_counts import op_counts
from torch_armllm.patching.padding import gap_limit
from torch_armllm.patching.prefix_forward import PrefixForward, causal_prefixes, is_prefix_model
from torch_armllm.patching.stacks import install_stacks
from torch_armllm.patching.state import STATE, PatchState, is_patched, patched_forward
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.inspection import describe, float_bytes, is_packed
from torch_armllm.quant.methods.base import CALIBRATED
from torch_armllm.quant.outliers import find_outliers
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.report import LayerRecord, Report
from torch_armllm.quant.restore import restore
from torch_armllm.system.allocator import release_free_memory
from torch_armllm.system.huge_pages import collapse_packed


def _check_model(model: nn.Module) -> None:
    from transformers import PreTrainedModel

    kind = type(model).__name__
    adapted = [name for name, module in model.named_modules() if _is_adapted(module)]
    if adapted:
        raise ValueError(
            f"this {kind} has adapters that are not merged ({adapted[0]} is the first of {len(adapted)}); "
            "a patched model would not see them change: merge them first, model = model.merge_and_unload()"
        )
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"patch needs a transformers model, got a {kind}")
    check_kind(model)
    if is_patched(model):
        raise ValueError(f"this {kind} is patched already; call torch_armllm.unpatch(model) first")
    if model.training:
        raise ValueError(f"this {kind} is in training mode; call model.eval() first")
    foreign = getattr(model, "quantization_method", None) or getattr(
        model.config, "quantization_config", None
    )
    if not is_packed(model) and (foreign is not None or getattr(model, "is_quantized", False)):
        raise ValueError(
            f"this {kind} has weights quantized by {foreign}; torch_armllm.load(folder) reads "
            "such weights, or load it in BF16 or FP32 to patch it"
        )
    elsewhere = {str(p.device) for p in model.parameters() if p.device.type != "cpu"}
    if elsewhere:
        raise ValueError(
            f"this {kind} is on {', '.join(sorted(elsewhere))}; move it to the CPU with model.to('cpu')"
        )


def _is_adapted(module: nn.Module) -> bool:
    """True if a module is a layer wrapped by PEFT."""
    return hasattr(module, "base_layer") and hasattr(module, "active_adapters")


def _bytes(model: nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.nbytes for t in tensors.values())


def _begins_at_zero(module: fx.GraphModule) -> bool:
    """True if a recurrent layer treats position 0 in another way."""
    scans = (n for n in module.graph.nodes if n.target is torch.ops.armllm.selective_scan.default)
    return any(normalize for n in scans for normalize in n.args[9:10])


def _has_window(module: fx.GraphModule) -> bool:
    """True if the tokens of a layer attend to their neighbors only."""
    op = torch.ops.armllm.paged_attention.default
    return any(node.args[8] > 0 for node in module.graph.find_nodes(op="call_function", target=op))


def _install(model: Any, report: Report, cache_dtype: torch.dtype | None) -> PatchedForward | None:
    """Captures the model and replaces its base model's ``forward`` by a plan; None if capture fails."""
    base = base_model_of(model)
    try:
        with causal_prefixes(model):
            built = build_plan(model, is_packed(model), cache_dtype)
    except CaptureError as error:
        report.capture_reason = str(error)
        return None
    report.notes += built.notes
    if built.looks_ahead and predicts_tokens(model):
        report.capture_reason = (
            f"{type(model).__name__} predicts next tokens, but its tokens attend to later ones"
        )
        return None
    shape, most = built.shape, built.most_tokens
    max_length = min((n for n in (max_length_of(base), most) if n is not None), default=None)
    if max_length is not None:
        why = "attention is chunked" if max_length != most else built.length_reason or dense_limit(base)
        report.notes.append(f"texts of more than {max_length} tokens run module by module: {why}")
    if cache_dtype is not None and isinstance(shape, StatesOnlyShape):
        report.notes.append(
            "kv_cache_dtype has no effect: all layers are recurrent, and have no keys and values"
        )
    needs_recompute = bool(find_indexers(base)) or built.has_other_cache or bool(shape.states)
    vocabulary = model.get_input_embeddings().num_embeddings
    forward: PatchedForward
    if built.looks_ahead:
        forward = EncoderForward(base, built.plan, shape, vocabulary, max_length, _has_window(built.graph))
    else:
        make = PrefixForward if is_prefix_model(model) else PatchedForward
        forward = make(
            *(base, built.plan, shape, vocabulary, max_length, needs_recompute), _begins_at_zero(built.graph)
        )
        forward.gap_limit = 0 if needs_recompute else gap_limit(built.graph)
    expected = None if predicts_tokens(model) else results_of(model)
    is_nested = has_nested_text(model)
    base.forward = forward
    report.capture_reason = misuse(model, forward, expected)
    if report.capture_reason is not None:
        del base.forward
        return None
    by_plan = with_gradients_by_modules(model, forward)
    if is_nested:
        by_plan = with_texts_by_ids(model, by_plan)
    report.captured = True
    report.kv_bytes = 0 if built.looks_ahead else shape.bytes_per_token
    latents = latent_groups(shape)
    report.kv_bytes_expanded = sum(g.expanded * g.dtype.itemsize for g in latents) if latents else None
    report.ops = op_counts(built.graph)
    if base is not model:
        model.forward = by_plan
    if model.can_generate() and "generate" not in model.__dict__:  # a checkpoint may bring code of its own
        model.generate = PatchedGenerate(model, forward)
    return forward


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
    module by module, with one warning per reason.  If `patch` raises an error, the model is unchanged.

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
    _check_model(model)
    kv_cache_dtype = full_kv_cache_dtype(kv_cache_dtype)
    if kv_cache_dtype is not None and has_two_stacks(model):
        raise ValueError(
            f"{type(model).__name__} keeps the keys and values of its encoder in the model's own dtype; "
            "leave kv_cache_dtype out"
        )
    _check_latent_dtype(model, kv_cache_dtype)
    if kv_cache_dtype == "int4" and (shape := shape_by_config(model.config, torch.uint8)) is not None:
        check_int4_size(shape.head_size)  # before minutes are spent on the weights
    records = None
    quantized = quantization is not None
    if quantization == "auto":
        quantization = None if is_packed(model) else "int4" if predicts_tokens(model) else "int8"
    if quantization is not None:
        recipe = Recipe.of(quantization)
        if not is_packed(model):
            records = quantize(
                model, recipe, keep_original=keep_original, progress=progress, calibration=calibration
            )
        elif quantization != "int4" or model.config.quantization_config.source is None:
            packed = model.config.quantization_config
            recipe.check_packed(packed.recipe, packed.source)
    if adapter_slots is not None:
        add_slots(model, adapter_slots)
    report = fuse(model, kv_cache_dtype, records)
    model.__dict__[STATE].quantized = quantized
    if hasattr(model, "hf_quantizer"):
        model.config.quantization_config.kv_cache_dtype = kv_cache_dtype
        model.config.quantization_config.fuse = True  # a folder that is saved now loads patched
    return report


def fuse(model: Any, kv_cache_dtype: str | None, records: list[LayerRecord] | None) -> Report:
    """Rewrites a model to fused ops; the weights do not change.

    Args:
        model: a causal language model, quantized or not.
        kv_cache_dtype: see `patch`.
        records: records of its layers; None: determined from the model.

    Returns:
        The report; if the model cannot be captured, it states the reason.
    """
    cache_dtype = None if kv_cache_dtype is None else KV_CACHE_DTYPES[kv_cache_dtype]
    report = Report(variant=variants.machine().compiled)
    report.layers = describe(model, "quantization is off") if records is None else records
    calibrated = is_packed(model) and model.config.quantization_config.recipe.method in CALIBRATED
    outliers = find_outliers(report.layers, calibrated)
    report.outliers = {record.name: expected for record, expected in outliers}
    report.bytes_before = float_bytes(model, _bytes(model))
    base = model.get_decoder() if has_two_stacks(model) else base_model_of(model)
    state = model.__dict__[STATE] = PatchState(base, None, is_packed(model), report)
    try:
        with torch.no_grad(), released_tracing_memory():
            if has_two_stacks(model):
                state.forward, state.encoder = install_stacks(model, report)
            else:
                state.forward = _install(model, report, cache_dtype)
    except Exception as error:  # the quantized modules still run, so keep the quantized model
        report.capture_reason = f"the rewrite failed with {type(error).__name__}: {error}"
        report.captured = False
    release_free_memory()
    collapse_packed(model)
    report.bytes_after = _bytes(model)
    if state.forward is not None:
        keep_apart((model, state.base, state.encoder))
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


def patch_with_slots(model: Any, kv_cache_dtype: str | None, sizes: AdapterSlots) -> Report:
    """Rewrites a patched model once more, with slots for adapters; the weights do not change.

    Args:
        model: a patched model, such as one that was loaded from a folder of packed weights.
        kv_cache_dtype: see `patch`.
        sizes: of the slots.

    Raises:
        ValueError: the model is not patched, or has no quantized layers.
    """
    state = remove_plan(model)
    add_slots(model, sizes)
    report = fuse(model, kv_cache_dtype, state.report.layers)
    model.__dict__[STATE].quantized = state.quantized
    return report


def remove_plan(model: nn.Module) -> PatchState:
    """Gives a model its own ``forward`` and ``generate`` back; returns what its patch was.

    Raises:
        ValueError: the model is not patched.
    """
    forward = patched_forward(model)
    state: PatchState = model.__dict__.pop(STATE)
    if forward is not None:
        for module in {id(each): each for each in (state.base, model)}.values():
            del module.forward
            module.__dict__.pop(GET_STATE, None)
        if isinstance(model.__dict__.get("generate"), PatchedGenerate):
            del model.generate
    if state.encoder is not None:
        del state.encoder.forward
        state.encoder.__dict__.pop(GET_STATE, None)
    return state
