"""The one call: quantize a transformers model and run it by fused ops, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from torch_armllm.capture.export import CapturedGraph, CaptureError, capture
from torch_armllm.capture.markers.indexer import find_indexers, max_dense_length
from torch_armllm.capture.markers.mla import is_latent_attention
from torch_armllm.hf.base_model import body_of, longest_of
from torch_armllm.kv_cache.dtypes import KV_CACHE_DTYPES, check_kv_cache_dtype
from torch_armllm.kv_cache.shapes import LatentShape
from torch_armllm.ops import variants
from torch_armllm.passes import PassContext, run_passes
from torch_armllm.passes.lib.cache_layout import cache_layout
from torch_armllm.patching.forward import PatchedForward, with_gradients_by_modules
from torch_armllm.patching.state import STATE, PatchState, is_patched, patched_forward
from torch_armllm.plan.infer_cache import cache_shape_of
from torch_armllm.plan.make import make_plan
from torch_armllm.quant.inplace import quantize_by
from torch_armllm.quant.inspection import describe, float_bytes, is_packed
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
        raise ValueError(f"patch takes a transformers model; it got a {kind}")
    if model.get_output_embeddings() is None or body_of(model) is model or not model.can_generate():
        raise ValueError(f"{kind} is not a causal language model; load it with AutoModelForCausalLM")
    if is_patched(model):
        raise ValueError(f"this {kind} is patched already; call torch_armllm.unpatch(model) first")
    if model.training:
        raise ValueError(f"this {kind} is in training mode; call model.eval() first")
    foreign = getattr(model, "quantization_method", None) or getattr(
        model.config, "quantization_config", None
    )
    if not is_packed(model) and (foreign is not None or getattr(model, "is_quantized", False)):
        raise ValueError(
            f"this {kind} has weights quantized by {foreign}; torch_armllm.load(folder) reads what others "
            "quantized, or load it in BF16 or FP32 to patch it"
        )
    elsewhere = {str(p.device) for p in model.parameters() if p.device.type != "cpu"}
    if elsewhere:
        raise ValueError(
            f"this {kind} is on {', '.join(sorted(elsewhere))}; move it to the CPU with model.to('cpu')"
        )


def _is_adapted(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper of a layer."""
    return hasattr(module, "base_layer") and hasattr(module, "active_adapters")


def _bytes(model: nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.nbytes for t in tensors.values())


def _weight_owner(base: nn.Module, captured: CapturedGraph) -> Callable[[str, Tensor], None]:
    """Points modules at their share of a weight that a pass merged, so that nothing is held twice."""

    def move(attribute: str, view: Tensor) -> None:
        path, _, name = captured.names[attribute].rpartition(".")
        base.get_submodule(path)._buffers[name] = view

    return move


def _count_ops(module: fx.GraphModule) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        if schema.name.startswith("armllm::"):
            counts[schema.name.removeprefix("armllm::")] += 1
        elif schema.name == "aten::linear":
            counts["aten.linear"] += 1
    return dict(counts)


def _install(model: Any, report: Report, cache_dtype: torch.dtype | None) -> PatchedForward | None:
    """Captures the model and puts a plan in the place of its base model's forward."""
    base = body_of(model)
    try:
        indexers, dense = find_indexers(base), max_dense_length(base)
        if indexers and dense is None:
            raise CaptureError(f"{type(indexers[0]).__name__} chooses which tokens are attended to")
        captured = capture(model)
        layout = cache_layout(captured.graph_module)
        shape = cache_shape_of(base, captured.graph_module, layout, cache_dtype)
    except CaptureError as error:
        report.capture_reason = str(error)
        return None
    graph_module = captured.graph_module
    on_new_weight = _weight_owner(base, captured)
    context = PassContext(cache_dtype=cache_dtype, layout=layout, on_new_weight=on_new_weight)
    run_passes(graph_module, context)
    plan, why_not_native = make_plan(graph_module)
    if why_not_native is not None:
        report.notes.append(f"the graph runs node by node: {why_not_native}")
    longest = min((n for n in (longest_of(base), dense) if n is not None), default=None)
    if longest is not None:
        why = "attention is sparse" if longest == dense else "attention is chunked"
        report.notes.append(f"texts of more than {longest} tokens run module by module: {why}")
    apart = bool(indexers) or captured.repeats_attention
    vocabulary = model.get_input_embeddings().num_embeddings
    forward = PatchedForward(base, plan, shape, vocabulary, longest, apart)
    by_plan = with_gradients_by_modules(model, forward)
    report.captured = True
    report.kv_bytes = shape.bytes_per_token
    report.kv_bytes_expanded = (
        shape.expanded * shape.dtype.itemsize if isinstance(shape, LatentShape) else None
    )
    report.ops = _count_ops(graph_module)
    base.forward, model.forward = forward, by_plan
    return forward


def patch(
    model: Any,
    quantize: str | None = "int4",
    *,
    head: str | None = "int8",
    ignore: Sequence[str] = (),
    keep_original: bool = False,
    progress: bool = True,
    importance: bool = True,
    kv_cache: str | None = None,
    overrides: Mapping[str, str | None] | None = None,
    method: str = "mse",
    calibration: Tensor | None = None,
    allow_outliers: bool = False,
) -> Report:
    """Quantizes a transformers causal language model to INT4 and rewrites it to fused ops, in place.

    ``model(...)`` and ``model.generate(...)`` keep working and return what they returned, to rounding and
    quantization.  Calls that the fused step cannot serve (``output_attentions``, ``inputs_embeds``, …) run
    module by module, with one warning.  An error leaves the model as it was.

    Args:
        model: a transformers causal language model in evaluation mode, on the CPU, in float32, bfloat16 or
            float16.
        quantize: ``"int4"`` (the exact scheme g32i), ``"int8"``, the name of another scheme (``g32``,
            ``row``, …), or None to keep the weights as they are.
        head: the output head's scheme: ``"int8"``, an INT4 scheme, or None to leave it alone.
        ignore: shell-style patterns of layer names that must stay unquantized, such as ``"*.down_proj"``.
        keep_original: keeps the float weights, so that `unpatch` gives them back exactly.
        progress: shows a progress bar while quantizing.
        importance: quantizes with regard to what each input channel carries when the model reads random
            tokens: one pass over 512 of them saves a good part of what INT4 costs in accuracy.
        kv_cache: what keys and values are stored as: ``"int8"`` (one scale a token and head),
            ``"bfloat16"``, ``"float16"``, ``"float32"``, or None for the model's own dtype.
        overrides: schemes of layers that are to become something else, by shell-style pattern or by kind
            (``experts``, ``shared_experts``, ``attention``, ``mlp``, ``head``); None leaves them.  The last
            one that fits counts.
        method: ``"mse"`` searches scales, ``"rtn"`` takes them from the peaks.
        calibration: token ids ``(sequences, length)`` for methods that calibrate.
        allow_outliers: goes on where a layer's round-trip error is out of line with its scheme.

    Returns:
        What was covered by which op, what was left and why, sizes and errors; it prints as a table.

    Raises:
        ValueError: the model is not a causal language model, patched already, in training mode, not on the
            CPU, or quantized by other means; a weight is not finite; or an option is unknown.
    """
    _check_model(model)
    check_kv_cache_dtype(kv_cache)
    if kv_cache == "int8" and any(is_latent_attention(module) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} caches latents, which are not stored as int8; "
            "kv_cache takes bfloat16, float16 or float32 for it"
        )
    records = None
    if quantize is not None:
        recipe = Recipe(quantize, head, ignore, overrides or {}, method, allow_outliers)
        if is_packed(model):
            if quantize != "int4" or model.config.quantization_config.source is None:
                own = model.config.quantization_config
                recipe.check_packed(own.recipe, own.source)
        else:
            records = quantize_by(recipe, model, keep_original, progress, importance, calibration)
    report = fuse(model, kv_cache, records)
    model.__dict__[STATE].quantized = quantize is not None
    if hasattr(model, "hf_quantizer"):
        model.config.quantization_config.kv_cache = kv_cache
    return report


def fuse(model: Any, kv_cache: str | None, records: list[LayerRecord] | None) -> Report:
    """Rewrites a model to fused ops, its weights as they are.

    Args:
        model: a causal language model, quantized or not.
        kv_cache: see `patch`.
        records: of its layers, or None to look.

    Returns:
        The report; where the model cannot be captured, with the reason.
    """
    report = Report(variant=variants.machine().selected)
    report.layers = describe(model, "quantization is off") if records is None else records
    report.outliers = {record.name: expected for record, expected in find_outliers(report.layers)}
    report.bytes_before = float_bytes(model, _bytes(model))
    state = model.__dict__[STATE] = PatchState(body_of(model), None, is_packed(model), report)
    try:
        with torch.no_grad():
            state.forward = _install(model, report, None if kv_cache is None else KV_CACHE_DTYPES[kv_cache])
    except Exception as error:  # its modules still run: that is better than to lose a quantized model
        report.capture_reason = f"the rewrite failed with {type(error).__name__}: {error}"
        report.captured = False
    release_free_memory()
    collapse_packed(model)
    report.bytes_after = _bytes(model)
    return report


def unpatch(model: nn.Module) -> list[str]:
    """Takes `patch` back, in place.

    Returns:
        Names of the layers whose float weights are rounded ones, because the originals were not kept.

    Raises:
        ValueError: the model is not patched.
    """
    forward = patched_forward(model)
    state: PatchState = model.__dict__.pop(STATE)
    if forward is not None:
        del state.base.forward, model.forward
    return restore(model) if state.quantized else []
