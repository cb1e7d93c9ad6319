"""The plan of a model of one stack, put in the place of its base model's ``forward``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torch_armllm.capture.export import CaptureError
from torch_armllm.capture.markers.indexer import dense_limit, find_indexers
from torch_armllm.hf.base_model import base_model_of, max_length_of
from torch_armllm.kv_cache.shapes import StatesOnlyShape, latent_groups
from torch_armllm.ops.op_call import OpCall
from torch_armllm.patching.build_plan import build_plan
from torch_armllm.patching.encoder_forward import EncoderForward
from torch_armllm.patching.forward import PatchedForward, with_gradients_by_modules
from torch_armllm.patching.generation.generate import PatchedGenerate
from torch_armllm.patching.model_kind import predicts_tokens
from torch_armllm.patching.module_fallback import ModuleFallback
from torch_armllm.patching.nested_text import has_nested_text, with_texts_by_ids
from torch_armllm.patching.op_counts import op_counts
from torch_armllm.patching.padding import gap_limit
from torch_armllm.patching.prefix_forward import PrefixForward, causal_prefixes, is_prefix_model
from torch_armllm.patching.replacements import Replacements
from torch_armllm.quant.inspection import is_packed


@dataclass
class Installed:
    """A plan in the place of modules.

    Attributes:
        forward: the new ``forward`` of its base model, or of its decoder.
        rounding: see `BuiltPlan`.
        ops: see `Report.ops`.
        kv_bytes, kv_bytes_expanded: see `Report`.
        notes: remarks for the report.
        encoder: the new ``forward`` of the encoder of a model of two stacks; None if it keeps its own.
    """

    forward: PatchedForward
    rounding: float
    ops: dict[str, int]
    kv_bytes: int = 0
    kv_bytes_expanded: int | None = None
    notes: list[str] = field(default_factory=list)
    encoder: ModuleFallback | None = None


def install(model: Any, cache_dtype: torch.dtype | None, replaced: Replacements) -> Installed:
    """Captures a model and replaces its base model's ``forward`` by a plan.

    Args:
        model: a model of one stack.
        cache_dtype: dtype of the KV cache; None for the dtype of the keys.
        replaced: gets what is replaced.

    Raises:
        CaptureError: no plan computes what the model does.
    """
    base = base_model_of(model)
    with causal_prefixes(model):
        built = build_plan(model, is_packed(model), cache_dtype)
    if built.looks_ahead and predicts_tokens(model):
        raise CaptureError(
            f"{type(model).__name__} predicts next tokens, but its tokens attend to later ones"
        )
    notes = list(built.notes)
    shape, most = built.shape, built.most_tokens
    max_length = min((n for n in (max_length_of(base), most) if n is not None), default=None)
    if max_length is not None:
        why = "attention is chunked" if max_length != most else built.length_reason or dense_limit(base)
        notes.append(f"texts of more than {max_length} tokens run module by module: {why}")
    if cache_dtype is not None and isinstance(shape, StatesOnlyShape):
        notes.append("kv_cache_dtype has no effect: all layers are recurrent, and have no keys and values")
    needs_recompute = bool(find_indexers(base)) or built.has_other_cache or bool(shape.states)
    vocabulary = model.get_input_embeddings().num_embeddings
    forward: PatchedForward
    if built.looks_ahead:
        forward = EncoderForward(base, built.plan, shape, vocabulary, max_length, _has_window(built.graph))
    else:
        make = PrefixForward if is_prefix_model(model) else PatchedForward
        forward = make(
            base,
            built.plan,
            shape,
            vocabulary,
            max_length,
            needs_recompute,
            _begins_at_zero(built.graph),
        )
        forward.gap_limit = 0 if needs_recompute else gap_limit(built.graph)
        forward.reads_hidden = predicts_tokens(model)
    is_nested = has_nested_text(model)
    by_plan = with_gradients_by_modules(model, forward)
    if is_nested:
        by_plan = with_texts_by_ids(model, by_plan)
    generates = model.can_generate() and "generate" not in model.__dict__  # a checkpoint may bring its own
    replaced.put(base, "forward", forward)
    if not forward.is_called_by(model):
        kind, inner = type(model).__name__, type(base).__name__
        raise CaptureError(
            f"the forward of {kind} calls parts of its {inner} itself, and so would not call a plan"
        )
    if base is not model:
        replaced.put(model, "forward", by_plan)
    if generates:
        replaced.put(model, "generate", PatchedGenerate(model, forward))
    latents = latent_groups(shape)
    return Installed(
        forward,
        built.rounding,
        op_counts(built.graph),
        0 if built.looks_ahead else shape.bytes_per_token,
        sum(g.expanded * g.dtype.itemsize for g in latents) if latents else None,
        notes,
    )


def _begins_at_zero(module: fx.GraphModule) -> bool:
    """True if a recurrent layer treats position 0 in another way."""
    scans = (n for n in module.graph.nodes if n.target is torch.ops.armllm.selective_scan.default)
    return any(OpCall(node).normalize for node in scans)


def _has_window(module: fx.GraphModule) -> bool:
    """True if the tokens of a layer attend to their neighbors only."""
    op = torch.ops.armllm.paged_attention.default
    return any(OpCall(node).window > 0 for node in module.graph.find_nodes(op="call_function", target=op))
