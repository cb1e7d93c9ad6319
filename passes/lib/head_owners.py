"""Operators whose heads or channels ranks can shard: attention and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.ops.attention import paged_attention
from torch_armllm.ops.declare import per_head
from torch_armllm.ops.linear.schemes import PANEL
from torch_armllm.ops.lora import BLOCK
from torch_armllm.ops.op_call import OpCall
from torch_armllm.parallel.rank_group import HeadShares, RankGroup, shares
from torch_armllm.passes.lib.graph import aten, is_op, value
from torch_armllm.passes.lib.result_shards import ResultShard, ShardedCall, result_shard
from torch_armllm.passes.lib.shards import Shard

armllm = torch.ops.armllm
RECURRENT = (armllm.gated_delta_rule.default, armllm.selective_scan.default, armllm.causal_conv.default)
"""Operators that read and write a ``state``."""
_OF_QUERY_HEADS = per_head(paged_attention)
_OF_ALL_RANKS = (
    *("block_table", "query_start", "seq_lens", "max_seq_len"),
    *("scale", "window", "softcap", "ahead", "later"),
    *("k_cache", "v_cache", "k_scales", "v_scales"),  # a rank's caches have its own heads
)
"""Arguments of ``paged_attention`` that are the same for all ranks."""
PLACED = {"q", *_OF_QUERY_HEADS, *_OF_ALL_RANKS, "group_size", "skipped_heads"}
"""All that can be sharded; an attention that is given any other argument is not."""


@dataclass
class HeadOwner:
    """An operator of which this rank computes some heads or channels.

    Attributes:
        shard: of the result, which this rank computes.
        counts: heads or channels of each rank.
        result: the call that computes the shard.
        writes: shards of the arguments of a call that writes what this one reads.
    """

    shard: Shard
    counts: Sequence[int]
    result: ResultShard
    writes: dict[Node, ShardedCall] = field(default_factory=dict)

    @property
    def key_heads(self) -> dict[int, int]:
        """Heads of keys and values that this rank writes, by those of all ranks."""
        written = [each for write in self.writes.values() for each in write.sources.items()]
        return {int(value(source).shape[shard.axis]): shard.count for source, shard in written}

    @property
    def imbalance(self) -> float:
        """Heads of the rank with the most, relative to the average."""
        return max(self.counts) * len(self.counts) / sum(self.counts)


def head_owners(module: fx.GraphModule, group: RankGroup) -> dict[Node, HeadOwner]:
    """Returns the operators of a rewritten graph whose heads can be sharded.

    The heads of keys and values can be sharded in all layers or in none, as the layers share a cache.
    """
    owners = _attentions(module, group)
    nodes = list(module.graph.nodes)
    heads: dict[Any, Callable[[Node, RankGroup], HeadOwner | None]] = {
        armllm.mla_attention.default: _latent_heads,
        armllm.gated_delta_rule.default: _delta_heads,
        armllm.selective_scan.default: _channels,
    }
    for node in nodes:
        find = heads.get(node.target)
        if find is not None and (owner := find(node, group)) is not None:
            owners[node] = owner
    if any(is_op(n, armllm.gated_delta_rule.default, armllm.selective_scan.default) for n in nodes):
        return owners  # their convolutions follow their heads
    for node in nodes:
        if is_op(node, armllm.causal_conv.default) and (owner := _channels(node, group)) is not None:
            owners[node] = owner
    return owners


def adapted_products(module: fx.GraphModule, group: RankGroup) -> dict[Node, HeadOwner]:
    """Returns the products of gate and up to which adapters are added, whose columns are sharded."""
    owners = {}
    for node in module.graph.nodes:
        if is_op(node, armllm.gated_act.default) and any(
            is_op(x, armllm.lora_linear.default) for x in (OpCall(node).gate, OpCall(node).up)
        ):
            owner = _channels(node, group, BLOCK)
            if owner is not None and int(value(node).shape[-1]) >= group.least_columns:
                owners[node] = owner
    return owners


def states_of(node: Node) -> Node:
    """Returns the input that holds the states of a recurrent operator."""
    states: Node = OpCall(OpCall(node).state).self
    return states


def _attentions(module: fx.GraphModule, group: RankGroup) -> dict[Node, HeadOwner]:
    attentions = [n for n in module.graph.nodes if is_op(n, armllm.paged_attention.default)]
    writes = {_cache_of(n): n for n in module.graph.nodes if is_op(n, armllm.kv_write.default)}
    if not _alone({*attentions, *writes.values()}):
        return {}
    owners = {}
    kept: dict[int, list[int]] = {}
    for node in attentions:
        attention, written = OpCall(node), writes.get(_cache_of(node))
        if written is None or any(attention.gives(name) for name in attention.names if name not in PLACED):
            return {}
        query, inputs = attention.q, (OpCall(written).k, OpCall(written).v)
        query_heads, key_heads = (int(value(x).shape[-2]) for x in (query, inputs[0]))
        if (heads := HeadShares.balanced(query_heads, key_heads, group.size)) is None:
            return {}
        counts = [len(each) for each in heads.key]
        if kept.setdefault(key_heads, counts) != counts:  # layers of one cache
            return {}
        queries = Shard.of(1, query_heads, heads.query[group.rank])
        own = Shard.of(1, key_heads, heads.key[group.rank])
        skipped = heads.skipped(group.rank)
        groups = {} if skipped is None else {"group_size": heads.group, "skipped_heads": skipped}
        rows = {name: queries.ranges for name in _OF_QUERY_HEADS if attention.gives(name)}
        result = ShardedCall(node, {query: queries}, rows=rows, others=groups).result
        write = {written: ShardedCall(written, dict.fromkeys(inputs, own))}
        owners[node] = HeadOwner(queries, [len(each) for each in heads.query], result, write)
    return owners


def _cache_of(node: Node) -> Any:
    """Returns the tensor and the layer of the cache that a call reads or writes its keys."""
    layer = OpCall(node).k_cache
    return tuple(layer.args) if is_op(layer, aten.select.int) else None


def _alone(ends: set[Node]) -> bool:
    """True if no other operator reads a cache of theirs."""
    caches: set[Any] = {x for node in ends for x in node.args if is_op(x, aten.select.int)}
    inputs = {OpCall(x).self for x in caches if OpCall(x).self.op == "placeholder"}
    return all(
        user in ends or not is_op(reader, aten.select.int)
        for source in inputs
        for reader in source.users
        for user in reader.users
    )


def _latent_heads(node: Node, group: RankGroup) -> HeadOwner | None:
    heads = int(value(node).shape[1])
    if heads < group.size:
        return None
    every = shares(heads, group.size)
    shard = Shard.of(1, heads, every[group.rank])
    result = result_shard(node, shard)
    return None if result is None else HeadOwner(shard, [len(each) for each in every], result)


def _delta_heads(node: Node, group: RankGroup) -> HeadOwner | None:
    rule = OpCall(node)
    inputs = q, k, v, gate, beta = rule.q, rule.k, rule.v, rule.gate, rule.beta
    value_heads, key_heads = (int(value(x).shape[1]) for x in (v, k))
    heads = HeadShares.of(value_heads, key_heads, group.size)
    if heads is None or len(set(inputs)) < len(inputs):
        return None
    shard = Shard.of(1, value_heads, heads.query[group.rank])
    keys = Shard.of(1, key_heads, heads.key[group.rank])
    sources: Any = {
        **{q: keys, k: keys, v: shard, beta: shard.on(0)},
        gate: shard.on(value(gate).dim() - 2),
    }
    return HeadOwner(shard, [len(each) for each in heads.query], ShardedCall(node, sources).result)


def _channels(node: Node, group: RankGroup, unit: int = PANEL) -> HeadOwner | None:
    channels = int(value(node).shape[-1])
    if channels % PANEL or channels < unit * group.size:
        return None
    shards = shares(-(-channels // unit), group.size)
    every = [range(unit * shard.start, min(unit * shard.stop, channels)) for shard in shards]
    shard = Shard.of(0, channels, every[group.rank])
    result = result_shard(node, shard)
    return None if result is None else HeadOwner(shard, [len(each) for each in every], result)
