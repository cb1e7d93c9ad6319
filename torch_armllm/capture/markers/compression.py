"""Marker ops of attention to compressed entries, and the modules that insert them.

A compressor turns each window of a layer's tokens into one key, which is its value too; attention reads it
beside the layer's last tokens.  Some compressors have an indexer, which selects entries for each token.  Such
a module is recognized by its parts, and replaced during capture if it computes the same as the markers do for
a few random tokens.

A marker has a row for every token: that of an entry is the row of the last token of its window, and the rows
of other tokens are zeros.  A graph then has no other dimension than that of tokens.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from torch_armllm.capture.markers.declare import marker
from torch_armllm.capture.output_check import lowest_first
from torch_armllm.ops.compress.reference import compressed
from torch_armllm.ops.select.reference import highest, index_scores

_PARTS = ("compress_rate", "head_dim", "kv_proj", "gate_proj", "position_bias", "kv_norm", "rotary_emb")
_INDEXER_PARTS = (*_PARTS, "index_topk", "num_heads", "q_b_proj", "scorer")
_WINDOWS = 3
_PROBES = 3
_FOUND = "entries_for_attention"


@marker(
    "window_entries(Tensor kv, Tensor gate, Tensor bias, Tensor weight, Tensor cos, Tensor sin, float eps)"
    " -> Tensor",
    lambda a: a.kv.new_empty(1, a.kv.shape[1], a.weight.shape[0]),
)
def window_entries(
    kv: Tensor, gate: Tensor, bias: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Tensor:
    """Compresses each window of one sequence; the reference implementation.

    Args:
        kv: ``(1, T, parts · size)``; see :func:`torch_armllm.ops.compress.compress_windows`.
        gate: likewise.
        bias: ``(rate, parts · size)``, whose rows are the tokens of a window.
        weight: ``(size,)``, of the norm.
        cos: ``(1, T, pairs)``: rotation of the entry that a token completes.
        sin: likewise.
        eps: added to the mean square of the norm.

    Returns:
        ``(1, T, size)`` in the dtype of ``kv``.
    """
    rate, size = bias.shape[0], weight.shape[0]
    span = rate * (bias.shape[1] // size)
    out = kv.new_zeros(1, kv.shape[1], size)
    for last in range(rate - 1, kv.shape[1], rate):
        rows = slice(max(last - span + 1, 0), last + 1)
        turn = cos[0, last].float(), sin[0, last].float()
        out[0, last] = compressed(kv[0, rows], gate[0, rows], bias, weight, *turn, eps).to(out.dtype)
    return out


def _complete(tokens: int, rate: int) -> Tensor:
    """Returns bool ``(T, T)``: whether a token sees the entry whose window another token completes."""
    ends = torch.arange(tokens) % rate == rate - 1
    return ends & torch.ones(tokens, tokens, dtype=torch.bool).tril()


@marker(
    "entry_selection(Tensor q, Tensor entries, Tensor weights, float scale, int top_k, int rate) -> Tensor",
    lambda a: a.q.new_empty((1, a.q.shape[1], a.q.shape[1]), dtype=torch.bool),
)
def entry_selection(
    q: Tensor, entries: Tensor, weights: Tensor, scale: float, top_k: int, rate: int
) -> Tensor:
    """Selects for each token the entries of the highest scores; the reference implementation.

    Args:
        q: queries ``(1, T, heads, head_size)``.
        entries: ``(1, T, head_size)``, see `window_entries`.
        weights: weights of the heads ``(1, T, heads)``.
        scale: factor of the products.
        top_k: most entries that a token selects.
        rate: tokens of a window.

    Returns:
        bool ``(1, T, T)``: for each token, the last tokens of the windows that it selects.
    """
    seen = _complete(q.shape[1], rate)
    scores = index_scores(q[0], weights[0], entries[0], scale).masked_fill(~seen, float("-inf"))
    chosen = highest(scores, min(top_k, q.shape[1]))
    return (torch.zeros_like(seen).scatter(-1, chosen, True) & seen)[None]


@marker(
    "attention_to_entries(Tensor q, Tensor kv, Tensor entries, int layer, float scale, int window,"
    " Tensor? sinks, int rate, Tensor? selected=None) -> Tensor",
    lambda a: a.q.new_empty(1, a.q.shape[2], a.q.shape[1], a.q.shape[3]),
)
def attention_to_entries(
    q: Tensor,
    kv: Tensor,
    entries: Tensor,
    layer: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
    rate: int,
    selected: Tensor | None = None,
) -> Tensor:
    """Attends to a token's last tokens and to entries, in float32; the reference implementation.

    Args:
        q: queries, ``(1, heads, T, size)``.
        kv: keys, which are values too, ``(1, 1, T, size)``.
        entries: likewise ``(1, T, size)``, see `window_entries`.
        layer: index of the cache layer; unused here.
        scale: factor of the scores.
        window: number of visible tokens up to a query's own.
        sinks: extra logits ``(heads,)`` that take part in the softmax and have no value.
        rate: tokens of an entry's window.
        selected: the entries that each token attends to, as `entry_selection` returns them; None: all that
            are complete.

    Returns:
        ``(1, T, heads, size)`` in the dtype of ``q``.
    """
    tokens = q.shape[2]
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = _complete(tokens, rate) if selected is None else selected[0]
    hidden = torch.cat([(distance < 0) | (distance >= window), ~seen], 1)
    rows = torch.cat([kv[0, 0], entries[0]]).float()
    scores = (q[0].float() @ rows.T * scale).masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, tokens, 1)], 2)
    out = scores.softmax(2)[..., : 2 * tokens] @ rows
    return out.transpose(0, 1)[None].contiguous().to(q.dtype)


def entry_attentions(module: fx.GraphModule) -> list[fx.Node]:
    """Returns the markers of attention to entries in a captured graph, in order."""
    return [n for n in module.graph.nodes if n.target is torch.ops.armllm.attention_to_entries.default]


class _Compressor:
    """Replacement of a compressor's ``forward``.

    It returns no keys.  The entries are left for the attention function, which finds them by `found_entries`.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(
        self, hidden: Tensor, q_residual: Tensor, position_ids: Tensor, cache: Any, layer: Any
    ) -> Any:
        module = self.module
        if cache is not None:
            return type(module).forward(module, hidden, q_residual, position_ids, cache, layer)
        entries, selected = marked(module, hidden, q_residual, position_ids)
        module.__dict__[_FOUND] = entries, selected, int(module.compress_rate)
        return hidden.new_zeros(1, 1, 0, entries.shape[2]), None


def _entries_of(module: Any, hidden: Tensor, position_ids: Tensor) -> Tensor:
    """Returns the entries of a compressor or an indexer."""
    first = position_ids - (int(module.compress_rate) - 1)  # of the window that a token completes
    cos, sin = module.rotary_emb(hidden, position_ids=first, layer_type=module.rope_layer_type)
    entries: Tensor = torch.ops.armllm.window_entries(
        module.kv_proj(hidden),
        module.gate_proj(hidden),
        module.position_bias,
        module.kv_norm.weight,
        cos,
        sin,
        float(module.kv_norm.variance_epsilon),
    )
    return entries


def marked(
    module: Any, hidden: Tensor, q_residual: Tensor, position_ids: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Returns a compressor's entries, and what its indexer selects, by markers."""
    entries, indexer = _entries_of(module, hidden, position_ids), getattr(module, "indexer", None)
    if indexer is None:
        return entries, None
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    turns = indexer.rotary_emb(hidden, position_ids=position_ids, layer_type=indexer.rope_layer_type)
    sizes = (1, hidden.shape[1], -1, indexer.head_dim)
    q = rotate(indexer.q_b_proj(q_residual).view(sizes).transpose(1, 2), *turns).transpose(1, 2)
    scorer = indexer.scorer
    weights = scorer.weights_proj(hidden).float() * scorer.weights_scaling
    selected = torch.ops.armllm.entry_selection(
        q,
        _entries_of(indexer, hidden, position_ids),
        weights,
        float(scorer.softmax_scale),
        int(indexer.index_topk),
        int(indexer.compress_rate),
    )
    return entries, selected


def is_compressor(module: nn.Module) -> bool:
    """True if a module has the parts of a compressor of keys; an indexer's own compressor is a part of it."""
    if not all(hasattr(module, part) for part in _PARTS) or hasattr(module, "scorer"):
        return False
    indexer = getattr(module, "indexer", None)
    return indexer is None or all(hasattr(indexer, part) for part in _INDEXER_PARTS)


def inside_compressors(base: nn.Module) -> set[nn.Module]:
    """Returns the compressors of a model that the markers can replace, and all their parts."""
    return {part for module in base.modules() if is_replaceable(module) for part in module.modules()}


@torch.no_grad()
def is_replaceable(module: nn.Module) -> bool:
    """True if a module is a compressor that computes what the markers do.

    In a quantized layer, rounding may change a token, so a compressor and its markers have to agree on one of
    a few random inputs.
    """
    if not is_compressor(module):
        return False
    try:
        return any(_agree(module, seed) for seed in range(_PROBES))
    except Exception:  # noqa: BLE001 - a module with other arguments
        return False


def _agree(module: Any, seed: int) -> bool:
    rate = int(module.compress_rate)
    tokens, random = _WINDOWS * rate + 1, torch.Generator().manual_seed(seed)
    dtype = next(module.parameters()).dtype
    if (norm := getattr(module.kv_proj, "weight", None)) is not None and norm.is_floating_point():
        dtype = norm.dtype
    hidden = torch.randn(1, tokens, module.kv_proj.in_features, generator=random).to(dtype)
    indexer = getattr(module, "indexer", None)
    residual = hidden
    if indexer is not None:
        residual = torch.randn(1, tokens, indexer.q_b_proj.in_features, generator=random).to(dtype)
    inputs = (hidden, residual, torch.arange(tokens)[None])
    with lowest_first():
        expected, bias = type(module).forward(module, *inputs, None, 0)
    entries, selected = marked(module, *inputs)
    ends = slice(rate - 1, None, rate)
    seen = (_complete(tokens, rate) if selected is None else selected[0])[:, ends]
    if expected.shape != (1, 1, tokens // rate, entries.shape[2]) or bias.shape != (1, 1, *seen.shape):
        return False
    bound = (1e-3 if dtype == torch.float32 else 5e-2) * float(expected.float().abs().max())
    alike = bool(((entries[:, ends].float() - expected[0].float()).abs() <= bound).all())
    return alike and torch.equal(bias[0, 0] == 0, seen)


def found_entries(attention: nn.Module) -> tuple[Tensor, Tensor | None, int] | None:
    """Returns entries, their selection and tokens of a window, which a part of an attention just computed."""
    for part in attention.children():
        if (found := part.__dict__.pop(_FOUND, None)) is not None:
            return found  # type: ignore[no-any-return]
    return None


@contextlib.contextmanager
def mark_compressors(model: nn.Module) -> Iterator[None]:
    """Lets compressors insert marker ops while the context lasts."""
    replaced = [module for module in model.modules() if is_replaceable(module)]
    own = {"forward": None, "NOT_COMPUTED_WITH": frozenset({"forward", "NOT_COMPUTED_WITH"})}
    try:
        for module in replaced:
            module.__dict__.update({**own, "forward": _Compressor(module)})
        yield
    finally:
        for module in replaced:
            for name in (*own, _FOUND):
                module.__dict__.pop(name, None)
