"""Marker op of attention, and the attention function that inserts it through transformers' interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, fx, nn

from torch_armllm.capture.markers.compression import found_entries
from torch_armllm.capture.markers.declare import like_attention, marker
from torch_armllm.ops.declare import arguments, reference
from torch_armllm.ops.op_call import OpCall

IMPLEMENTATION = "armllm"

_HANDLED = {"position_ids", "dropout", "use_cache", "deterministic"}
EVERY = 1 << 30
"""Later positions that a token attends to if it attends to all of them."""
UNNUMBERED = -1
"""Layer of an attention whose module does not know its number, as several layers share it."""
_IGNORED = {"cache_position", "output_attentions", "output_hidden_states", "return_dict"}

_OPTIONS = "int layer, float scale, int window=0, float softcap=0.0, Tensor? sinks=None, int ahead=0"


def ahead_of(node: fx.Node) -> int:
    """Returns how many later positions the tokens of an attention attend to."""
    return int(OpCall(node).ahead)


def attentions_ahead(module: fx.GraphModule) -> list[fx.Node]:
    """Returns the attentions of a graph whose tokens attend to later ones."""
    nodes = module.graph.find_nodes(op="call_function", target=torch.ops.armllm.attention.default)
    return [node for node in nodes if ahead_of(node)]


class UnsupportedAttention(RuntimeError):
    """The model's attention has a feature that the paged kernels do not support."""


def mixed_profiles(factors: Tensor, profiles: Tensor) -> Tensor:
    """Returns a bias in float32 for each head and pair of tokens, ``(1, heads, T, T)``.

    Args:
        factors: ``(1, T, heads, rank)``.
        profiles: a bias by distance ``(rank, extent)``; there is none beyond the last distance.
    """
    positions, extent = torch.arange(factors.shape[1], device=factors.device), profiles.shape[1]
    distance = positions[:, None] - positions
    mixed = (factors.float() @ profiles.float()).transpose(1, 2)
    nearest = mixed.gather(3, distance.clamp(0, extent - 1).expand(1, factors.shape[2], -1, -1))
    return nearest.masked_fill((distance < 0) | (distance >= extent), 0.0)


@marker(
    f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}, Tensor? alibi_slopes=None, Tensor? factors=None,"
    " Tensor? profiles=None, Tensor? selected=None, Tensor? biases=None) -> Tensor",
    like_attention,
)
@reference("attention")
def dense_attention(a: Any) -> Tensor:
    """Computes attention of one sequence in float32; the reference implementation.

    Arguments of the marker op:
        q: queries, ``(1, q_heads, T, head_size)``.
        k: keys, ``(1, kv_heads, T, head_size)``.
        v: values, ``(1, kv_heads, T, value_size)``.
        layer: index of the cache layer; unused here.
        scale: factor of the scores.
        window: number of visible positions up to the query's own; 0 for all.
        softcap: scores become ``softcap * tanh(s / softcap)``; 0 for none.
        sinks: extra logits ``(q_heads,)``, or ``(T, q_heads)``, that take part in the softmax and have no
            value.
        ahead: number of later positions that a token attends to; 0: attention is causal.
        alibi_slopes: factors ``(q_heads,)`` of the distance of a key's position from the query's, which is
            not positive; their product is added to the scores (ALiBi).
        factors: ``(1, T, q_heads, rank)``; each token mixes the profiles by them, and adds the mix to its
            scores.
        profiles: a bias by distance ``(rank, extent)``; there is none beyond the last distance.
        selected: bool ``(1, T, T)``, the tokens that each token attends to, or ``(1, heads, T, T)`` with
            heads that divide the KV heads; None: all earlier ones.
        biases: ``(q_heads, 2 · reach + 1)``, added to the scores by distance, from the keys before a token to
            those after it; the first and the last one also beyond the reach.

    Returns:
        ``(1, T, q_heads, value_size)`` in the dtype of ``q``.
    """
    return _attention(a, None)


def _attention(a: Any, bias: Tensor | None) -> Tensor:
    """See `dense_attention`; ``bias (1, q_heads, T, T)`` is added to the scores."""
    groups = a.q.shape[1] // a.k.shape[1]
    keys = a.k.float().repeat_interleave(groups, 1)
    values = a.v.float().repeat_interleave(groups, 1)
    scores = (a.q.float() * a.scale) @ keys.transpose(2, 3)
    if a.softcap > 0:
        scores = a.softcap * torch.tanh(scores / a.softcap)
    positions = torch.arange(a.q.shape[2], device=a.q.device)
    distance = positions[:, None] - positions[None, :]
    if a.alibi_slopes is not None:
        scores = scores - a.alibi_slopes.float()[:, None, None] * distance
    if a.factors is not None and a.profiles is not None:
        scores = scores + mixed_profiles(a.factors, a.profiles)
    if a.biases is not None:
        reach = a.biases.shape[1] // 2
        scores = scores + a.biases.float()[:, (-distance).clamp(-reach, reach) + reach]
    if bias is not None:
        scores = scores + bias
    hidden = distance < -a.ahead
    if a.window > 0:
        hidden = hidden | (distance >= a.window)
    if a.selected is not None:
        left_out = ~a.selected[0]
        if left_out.dim() == 3:
            left_out = left_out.repeat_interleave(a.q.shape[1] // left_out.shape[0], 0)
        hidden = hidden | left_out
    scores = scores.masked_fill(hidden, float("-inf"))
    if a.sinks is not None:
        rows = a.sinks.T if a.sinks.dim() == 2 else a.sinks[:, None]
        extra = rows.float()[None, :, :, None].expand(1, -1, a.q.shape[2], 1)
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out: Tensor = (weights @ values).transpose(1, 2).contiguous().to(a.q.dtype)
    return out


@marker(
    f"biased_attention(Tensor q, Tensor k, Tensor v, Tensor bias, {_OPTIONS}) -> Tensor",
    like_attention,
)
@reference("biased_attention")
def _biased_attention(a: Any) -> Tensor:
    given = vars(a)
    bias = given.pop("bias")
    return _attention(arguments("attention", (), given), bias.float())


@dataclass(frozen=True)
class _Keywords:
    """Keywords of transformers' attention functions that the marker op has something for.

    Attributes:
        sliding_window, softcap: of the layer.
        s_aux: sinks of each head.
        sinks: likewise, or ``(1, heads, T, 1)`` of each token.
        position_bias: is added to the scores.
        selected: tokens that each token attends to.
    """

    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None
    sinks: Tensor | None = None
    position_bias: Tensor | None = None
    selected: Tensor | None = None

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> tuple[_Keywords, list[str]]:
        """Takes the keywords of a call; returns the names of others, too, that are given and unknown."""
        names = {field.name for field in fields(cls)}
        known = names | _HANDLED | _IGNORED
        unknown = [name for name, value in keywords.items() if value is not None and name not in known]
        return cls(**{name: keywords[name] for name in names & keywords.keys()}), unknown

    def has_others(self, *known: str) -> bool:
        """True if another keyword than some is given."""
        others = (value for name, value in vars(self).items() if name not in known)
        return any(isinstance(value, Tensor) or value for value in others)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Inserts the marker op; transformers calls this instead of its own attention during capture.

    Attention with a bias becomes ``biased_attention``, which `resolve_biases` replaces.

    Raises:
        UnsupportedAttention: the model passes a mask or a keyword that the kernels do not support.
    """
    if isinstance(query.shape[1], torch.SymInt) and attention_mask is None:
        return _attention_within_tokens(query, key, value, scaling), None
    given, unknown = _Keywords.of(keywords)
    position_bias, sinks, selected, s_aux = given.position_bias, given.sinks, given.selected, given.s_aux
    if isinstance(query.shape[2], torch.SymInt) and not isinstance(key.shape[2], torch.SymInt):
        return _attention_to_encoder(module, query, key, value, attention_mask, scaling, given), None
    if attention_mask is not None:
        if position_bias is not None or attention_mask.dim() != 4 or not attention_mask.is_floating_point():
            raise UnsupportedAttention(f"{type(module).__name__} builds its own attention mask")
        position_bias = attention_mask  # no mask function makes one, so the module has added a bias
    if unknown:
        raise UnsupportedAttention(
            f"{type(module).__name__} passes unsupported arguments to its attention: {', '.join(unknown)}"
        )
    window = int(given.sliding_window or 0)
    ahead = 0 if getattr(module, "is_causal", True) else window - 1 if window else EVERY
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        layer = 0 if ahead else UNNUMBERED  # no later step reads the cache of an encoder
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    if (found := found_entries(module)) is not None:
        entries, chosen, rate = found
        others = given.has_others("sliding_window", "s_aux", "selected") or position_bias is not None
        if others or not window or ahead:
            raise UnsupportedAttention(
                f"{type(module).__name__} attends to compressed keys in an unknown way"
            )
        out = torch.ops.armllm.attention_to_entries(
            query, key, entries, int(layer), scale, window, s_aux, rate, chosen
        )
        return out, None
    if sinks is not None:  # of each token, (1, heads, T, 1)
        s_aux = sinks[0, ..., 0].transpose(0, 1) if sinks.dim() == 4 else sinks
    options = (int(layer), scale, window, float(given.softcap or 0.0), s_aux, ahead)
    if position_bias is not None:
        return torch.ops.armllm.biased_attention(query, key, value, position_bias, *options), None
    if ahead and selected is not None:
        raise UnsupportedAttention(f"{type(module).__name__} selects later tokens")
    return torch.ops.armllm.attention(query, key, value, *options, selected=selected), None


def _attention_within_tokens(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Computes attention of each token to rows of its own, such as the results of layers before.

    The tokens are in the place of heads, so that this is no attention of a token to others.
    """
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
    return out.transpose(1, 2)


def _attention_to_encoder(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    given: _Keywords,
) -> Tensor:
    """Inserts the marker op of attention to an encoder's tokens, whose number no step changes."""
    layer = getattr(module, "layer_idx", None)
    if layer is None or mask is not None or given.has_others("position_bias"):
        raise UnsupportedAttention(f"{type(module).__name__} attends to an encoder in an unknown way")
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    out: Tensor = torch.ops.armllm.encoder_attention(
        query, key, value, int(layer), scale, given.position_bias
    )
    return out


def register() -> None:
    """Registers the attention function; without a mask function of that name transformers builds no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attention_function)
