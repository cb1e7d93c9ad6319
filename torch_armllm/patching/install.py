"""The plan of a model of one stack, put in the place of its base model's ``forward``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torch_armllm.capture.export import CaptureError
from torch_armllm.capture.markers.indexer import dense_limit, find_indexers
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.hf.replacements import Replacements
from torch_armllm.kv_cache.shapes import StatesOnlyShape, latent_groups
from torch_armllm.ops.op_call import OpCall
from torch_armllm.patching.build_plan import BuiltPlan, build_plan
from torch_armllm.patching.forwards.calls import Calls, TokenCalls
from torch_armllm.patching.forwards.decoder_calls import DecoderCalls, Limits
from torch_armllm.patching.forwards.forward import PatchedForward, with_gradients_by_modules
from torch_armllm.patching.forwards.nested_text import has_nested_text, with_texts_by_ids
from torch_armllm.patching.forwards.padding import gap_limit
from torch_armllm.patching.forwards.text_calls import TextCalls
from torch_armllm.patching.generation.generate import PatchedGenerate
from torch_armllm.quant.inspection import is_packed


@dataclass
class Installed:
    """A plan in the place of modules.

    Attributes:
        kind: of the model.
        forward: the new ``forward`` of its base model, or of its decoder.
        rounding: see `BuiltPlan`.
        ops: see `Report.ops`.
        kv_bytes, kv_bytes_expanded: see `Report`.
        notes: remarks for the report.
        encoder: the new ``forward`` of the encoder of a model of two stacks; None if it keeps its own.
    """

    kind: ModelKind
    forward: PatchedForward[TokenCalls]
    rounding: float
    ops: dict[str, int]
    kv_bytes: int = 0
    kv_bytes_expanded: int | None = None
    notes: list[str] = field(default_factory=list)
    encoder: PatchedForward[Calls] | None = None


def install(kind: ModelKind, cache_dtype: torch.dtype | None, replaced: Replacements) -> Installed:
    """Captures a model and replaces its base model's ``forward`` by a plan.

    Args:
        kind: of a model of one stack.
        cache_dtype: dtype of the KV cache; None for the dtype of the keys.
        replaced: gets what is replaced.

    Raises:
        CaptureError: no plan computes what the model does.
    """
    model, base = kind.model, kind.base
    built = build_plan(kind, is_packed(model), cache_dtype)
    if built.looks_ahead and kind.predicts_tokens:
        raise CaptureError(f"{kind.name} predicts next tokens, but its tokens attend to later ones")
    notes = list(built.notes)
    shape, most = built.shape, built.most_tokens
    max_length = min((n for n in (kind.chunk_size, most) if n is not None), default=None)
    if max_length is not None:
        why = "attention is chunked" if max_length != most else built.length_reason or dense_limit(base)
        notes.append(f"texts of more than {max_length} tokens run module by module: {why}")
    if cache_dtype is not None and isinstance(shape, StatesOnlyShape):
        notes.append("kv_cache_dtype has no effect: all layers are recurrent, and have no keys and values")
    forward: PatchedForward[TokenCalls]
    decoding = None
    if built.looks_ahead:
        texts = TextCalls(kind, built.plan, shape, max_length, _has_window(built.graph))
        forward = PatchedForward(texts)
    else:
        decoder = DecoderCalls(kind, built.plan, shape, max_length, _limits(kind, built))
        forward = decoding = PatchedForward(decoder)
    by_plan = with_gradients_by_modules(model, forward)
    if has_nested_text(model):
        by_plan = with_texts_by_ids(model, by_plan)
    if not calls_base(kind):
        raise CaptureError(
            f"the forward of {kind.name} calls parts of its {type(base).__name__} itself, and so would not "
            "call a plan"
        )
    replaced.put(base, "forward", forward)
    if not kind.is_bare:
        replaced.put(model, "forward", by_plan)
    if decoding is not None and kind.generates and "generate" not in model.__dict__:  # or it brings its own
        replaced.put(model, "generate", PatchedGenerate(model, decoding))
    latents = latent_groups(shape)
    return Installed(
        kind,
        forward,
        built.rounding,
        op_counts(built.graph),
        0 if built.looks_ahead else shape.bytes_per_token,
        sum(g.expanded * g.dtype.itemsize for g in latents) if latents else None,
        notes,
    )


def _limits(kind: ModelKind, built: BuiltPlan) -> Limits:
    """Returns what the plan of a decoder computes otherwise than its modules."""
    needs_recompute = bool(find_indexers(kind.base)) or built.has_other_cache or bool(built.shape.states)
    return Limits(
        needs_recompute,
        begins_at_zero=_begins_at_zero(built.graph),
        gap_limit=0 if needs_recompute else gap_limit(built.graph),
        reads_hidden=kind.predicts_tokens,
        refusal="tokens of a prompt attend to later ones" if kind.prompts_look_ahead else None,
    )


class _Called(Exception):
    """The base model was called."""


def calls_base(kind: ModelKind) -> bool:
    """True if a model calls its base model; False if it calls parts of it itself, past a plan."""

    def end(*_: Any, **__: Any) -> None:
        raise _Called

    with Replacements() as ending:
        ending.put(kind.base, "forward", end)
        try:
            kind.model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
        except _Called:
            return True
        finally:
            ending.undo()
    return False


def op_counts(module: fx.GraphModule) -> dict[str, int]:
    """Returns the number of calls of each op of a rewritten graph, and of float linear layers."""
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


def _begins_at_zero(module: fx.GraphModule) -> bool:
    """True if a recurrent layer treats position 0 in another way."""
    scans = (n for n in module.graph.nodes if n.target is torch.ops.armllm.selective_scan.default)
    return any(OpCall(node).normalize for node in scans)


def _has_window(module: fx.GraphModule) -> bool:
    """True if the tokens of a layer attend to their neighbors only."""
    op = torch.ops.armllm.paged_attention.default
    return any(OpCall(node).window > 0 for node in module.graph.find_nodes(op="call_function", target=op))
