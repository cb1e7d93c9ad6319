"""Marker of a learned bias of distance, which a token's own numbers mix from profiles that all tokens share.

Such a bias reaches attention as one number for each pair of tokens.  The module that mixes it inserts a
marker during capture, and attention then takes the numbers and the profiles themselves.  The module is
recognized by what it computes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Node

from torch_armllm.capture.attention_operands import insert_call
from torch_armllm.capture.markers import key_bias
from torch_armllm.capture.markers.attention import UnsupportedAttention, mixed_profiles
from torch_armllm.capture.markers.declare import marker
from torch_armllm.capture.markers.encoder_states import encoder_attentions
from torch_armllm.capture.probing import is_op, module_name, tensor_of
from torch_armllm.hf.replacements import replaced
from torch_armllm.ops.op_call import OpCall, in_order

_aten = torch.ops.aten


def _like_result(a: Any) -> Tensor:
    batch, tokens, heads, _ = a.factors.shape
    like: Tensor = a.factors.new_empty(batch, heads, tokens, tokens)
    return like


@marker("distance_bias(Tensor factors, Tensor profiles) -> Tensor", _like_result)
def _mixed(factors: Tensor, profiles: Tensor) -> Tensor:
    return mixed_profiles(factors, profiles).to(factors.dtype)


@dataclass(frozen=True)
class _Profiles:
    """Replacement of a module's forward that inserts the marker."""

    profiles: Tensor

    def __call__(self, factors: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        bias: Tensor = torch.ops.armllm.distance_bias(factors, self.profiles)
        return bias

    def stand_for(self, module: nn.Module) -> bool:
        """True if a module adds its profiles by distance, and nothing beyond the last of them."""
        queries, keys = _places(self.profiles)
        factors = _random(1, len(queries), 2, self.profiles.shape[0]).to(self.profiles.dtype)
        return _adds(self.profiles, factors, queries[:, None] - keys, module(factors, queries, keys))


@dataclass(frozen=True)
class _HiddenProfiles:
    """Replacement of the forward of a module that makes the factors from hidden states itself."""

    module: Any

    def __call__(self, hidden_states: Tensor, relative_distance: Tensor, position_ids: Tensor) -> Tensor:
        factors = self._factors(hidden_states, position_ids)
        bias: Tensor = torch.ops.armllm.distance_bias(factors, self.module.proj)
        return bias

    def _factors(self, hidden_states: Tensor, position_ids: Tensor) -> Tensor:
        factors = self.module.linear(hidden_states)
        mixed: Tensor = self.module.norm(
            factors.view(*hidden_states.shape[:-1], self.module.num_heads, -1), position_ids
        )
        return mixed

    def stand_for(self, module: nn.Module) -> bool:
        """True if a module adds its profiles by distance, and nothing beyond the last of them."""
        profiles = self.module.proj
        queries, keys = _places(profiles)
        away, positions = queries[:, None] - keys, queries[None]
        hidden = _random(1, len(queries), self.module.linear.in_features).to(profiles.dtype)
        factors = self._factors(hidden, positions)
        return _adds(profiles, factors, away, module(hidden, away[None, None], positions))


def _places(profiles: Tensor) -> tuple[Tensor, Tensor]:
    """Returns positions of queries and of keys whose distances are within the profiles and beyond them."""
    extent = profiles.shape[1]
    queries = torch.tensor([0, 1, extent - 1, extent, extent + 3, 2 * extent])
    return queries, torch.tensor([0, 1, extent])


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _adds(profiles: Tensor, factors: Tensor, away: Tensor, found: Tensor) -> bool:
    """True if a bias is that of profiles, mixed by factors, for queries ``away`` from keys."""
    extent = profiles.shape[1]
    by_distance = (factors @ profiles)[0].transpose(0, 1)
    expected = by_distance.gather(2, away.clamp(0, extent - 1).expand(len(by_distance), -1, -1))
    expected = expected.masked_fill(away >= extent, 0.0)
    return torch.allclose(found[0][:, away >= 0], expected[:, away >= 0], rtol=1e-3, atol=1e-4)


def _replacement(module: Any) -> _Profiles | _HiddenProfiles | None:
    """Returns the replacement of a module's forward; None if the module computes something else."""
    profiles = getattr(module, "proj", None)
    if not isinstance(profiles, Tensor) or profiles.dim() != 2 or not hasattr(module, "rel_extent"):
        return None
    makes_factors = hasattr(module, "linear") and hasattr(module, "norm")
    replacement = _HiddenProfiles(module) if makes_factors else _Profiles(profiles)
    try:
        return replacement if replacement.stand_for(module) else None
    except Exception:  # noqa: BLE001 - a module with other arguments
        return None


def mark_distance_biases(model: nn.Module) -> AbstractContextManager[None]:
    """Lets modules that mix profiles insert the marker while the context lasts."""
    return replaced(model, "forward", _replacement)


def resolve_biases(graph: fx.Graph) -> bool:
    """Gives attention the factors and profiles of its bias, in place of one number for each pair of tokens.

    A bias of the key alone becomes an element of the key.  Zeros that are added to an encoder's tokens go.

    Returns:
        True if keys have one more element.

    Raises:
        UnsupportedAttention: a bias is something else; the message names its layer.
    """
    longer_keys = False
    nodes = [n for n in graph.nodes if n.target is torch.ops.armllm.biased_attention.default]
    for node in nodes:
        attention = OpCall(node)
        arguments = {name: getattr(attention, name) for name in attention.names}
        bias = arguments.pop("bias")
        with graph.inserting_before(node):
            if is_op(bias, torch.ops.armllm.relative_bias):
                arguments["biases"] = OpCall(bias).biases
            elif attention.ahead:
                raise UnsupportedAttention(f"{module_name(node)} attends to later tokens and adds a bias")
            elif joined := key_bias.joined(graph, attention.q, attention.k, attention.scale, bias):
                arguments["q"], arguments["k"] = joined
                longer_keys = True
            else:
                arguments["factors"], arguments["profiles"] = _factors(graph, bias)
            target = torch.ops.armllm.attention.default
            marked = insert_call(graph, target, *in_order(target, arguments))
        marked.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        node.replace_all_uses_with(marked)
        graph.erase_node(node)
    if _drop_zero_biases(graph) or nodes:
        for node in list(graph.nodes):
            if is_op(node, _aten._assert_tensor_metadata):  # such a node keeps the biases alive
                graph.erase_node(node)
        graph.eliminate_dead_code()
    return longer_keys


def _drop_zero_biases(graph: fx.Graph) -> int:
    """Removes biases that are zeros from attentions to an encoder's tokens; returns their number.

    Raises:
        UnsupportedAttention: a bias is something else; the message names its module.
    """
    nodes = [n for n in encoder_attentions(graph) if OpCall(n).bias is not None]
    for node in nodes:
        if not is_op(OpCall(node).bias, _aten.zeros):
            raise UnsupportedAttention(f"{module_name(node)} adds a bias to an encoder's tokens")
        OpCall(node).replace(bias=None)
    return len(nodes)


def _factors(graph: fx.Graph, bias: Any) -> tuple[Node, Node]:
    """Returns the factors ``(1, T, heads, rank)`` and the profiles of a bias, which each token may scale."""
    place, scales = bias, []
    while not is_op(bias, torch.ops.armllm.distance_bias):
        if is_op(bias, _aten.mul) and len(sides := [a for a in bias.args if _is_square(a)]) == 1:
            scales.append(next(a for a in bias.args if a is not sides[0]))
            bias = sides[0]
        elif is_op(bias, _aten.to, _aten._to_copy, _aten.type_as):
            bias = OpCall(bias).self
        else:
            raise _learned_bias(place)
    factors, profiles = bias.args
    for scale in reversed(scales):
        if isinstance(scale, Node):
            if tensor_of(scale).dim() != 4 or any(tensor_of(scale).shape[d] != 1 for d in (0, 1, 3)):
                raise _learned_bias(place)
            scale = insert_call(graph, _aten.transpose.int, scale, 1, 2)
        factors = insert_call(graph, _aten.mul.Tensor, factors, scale)
    return factors, profiles


def _learned_bias(place: Any) -> UnsupportedAttention:
    return UnsupportedAttention(
        f"{module_name(place)} adds a learned bias to its scores, which depends on more than the tokens' "
        "distance and a factor of the query, or than the key"
    )


def _is_square(node: Any) -> bool:
    """True if a node's result has a number for each pair of tokens."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    return all(isinstance(size, torch.SymInt) for size in value.shape[-2:])
