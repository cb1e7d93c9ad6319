"""Sharding of heads among ranks: a graph computes a rank's heads, and gathers those of all behind them.

A rank's shard of the result of attention, or of a recurrent layer, is followed forward as far as operators
keep heads apart, and gathered there.  From there it is followed backward to the columns of the linear layers
that it depends on; the rank computes those alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.passes.lib.graph import aten, call, drop_unused, fake_mode, is_op, recompute, value
from torch_armllm.passes.lib.head_owners import RECURRENT, HeadOwner, adapted_products, head_owners, states_of
from torch_armllm.passes.lib.result_shards import (
    QUANTIZED,
    ResultShard,
    constant_shard,
    is_stateful,
    later_shard,
    merged_shard,
    result_shard,
)
from torch_armllm.passes.lib.shards import Shard, fills, row_size, slice_node, within

armllm = torch.ops.armllm
_AT_ONCE = (
    *QUANTIZED,
    armllm.dense_linear.default,
    armllm.lora_linear.default,
    armllm.causal_conv.default,
)
"""Operators that compute all wanted shards of their result by one call."""
_MOST_IMBALANCE = 1.5
"""Heads of the rank with the most, relative to the average, above which all ranks compute all heads."""


class HeadSharding:
    """The heads and channels of a graph that this rank computes.

    Attributes:
        owners: operators of which it computes some.
    """

    def __init__(self, module: fx.GraphModule, group: RankGroup) -> None:
        self._module = module
        self._group = group
        found = head_owners(module, group) | adapted_products(module, group)
        self.owners = {n: each for n, each in found.items() if each.imbalance <= _MOST_IMBALANCE}
        self._leave_whole(found.keys() - self.owners.keys())
        self._plan = _Plan(module, self.owners, set())
        whole: set[Node] = set()
        while unsharded := self._unsharded():
            whole |= unsharded
            self._leave_whole(unsharded)
            self._plan = _Plan(module, self.owners, whole)

    @property
    def key_heads(self) -> dict[int, int]:
        """Heads of keys and values that this rank keeps, by those of all ranks; empty if it keeps all."""
        return {own: kept for owner in self.owners.values() for own, kept in owner.key_heads.items()}

    def apply(self) -> set[Node]:
        """Rewrites the graph; returns the new linear layers.

        The graph's inputs of states get the shapes that this rank's have.
        """
        if not self.owners:
            return set()
        return set(_Rewrite(self._module, self._group, self._plan, self.owners).apply())

    def _leave_whole(self, unsharded: Iterable[Node]) -> None:
        """Leaves operators whole; all attention, if some of it is, as its layers share a cache."""
        left = set(unsharded)
        if any(is_op(node, armllm.paged_attention.default) for node in left):
            left |= {n for n in self.owners if is_op(n, armllm.paged_attention.default)}
        self.owners = {n: each for n, each in self.owners.items() if n not in left}

    def _unsharded(self) -> set[Node]:
        """Returns operators that have to be left whole, as the plan cannot shard them."""
        results = self._plan.results
        unsharded = {n for n, o in self.owners.items() if results.get(n, {}).get(o.shard) is not o.result}
        if unsharded or self._plan.failed:
            return unsharded or set(self.owners)
        counts: dict[Node, set[int | None]] = {}
        for node in self._module.graph.nodes:
            if node.target in RECURRENT:
                shard = self._plan.merged.get(node)
                counts.setdefault(states_of(node), set()).add(None if shard is None else shard.count)
        uneven = {states for states, each in counts.items() if len(each) > 1}
        return {n for n in self._plan.merged if n.target in RECURRENT and states_of(n) in uneven}


class _Plan:
    """The shards of results that a rank computes.

    Attributes:
        results: the calls that compute them.
        merged: shards that contain all wanted ones of a result, where they are computed at once.
        seeds: results that are gathered: the owner of the heads, and this rank's shard.
        writes: calls that write shards.
        rotations: calls that change results in place, and those results of which shards are wanted.
        failed: True if a shard is wanted that cannot be had.
    """

    def __init__(self, module: fx.GraphModule, owners: dict[Node, HeadOwner], whole: set[Node]) -> None:
        self.results: dict[Node, dict[Shard, ResultShard]] = {}
        self.merged: dict[Node, Shard] = {}
        self.seeds: dict[Node, tuple[HeadOwner, Shard]] = {}
        self.writes = {node: write for owner in owners.values() for node, write in owner.writes.items()}
        self.rotations: dict[Node, dict[Node, Shard]] = {}
        self.failed = False
        self._owners = owners
        self._whole = set(whole)
        self._wanted: dict[Node, dict[Shard, None]] = {}
        for node, owner in owners.items():
            last, shard = _gathered_at(node, owner.shard)
            self.seeds[last] = owner, shard
            self._want(last, shard)
        for node in reversed(module.graph.nodes):
            self._visit(node)
        for rotated in self.rotations.values():
            self.failed |= any(n in self._whole or len(self._wanted[n]) > 1 for n in rotated)

    def _want(self, node: Node, shard: Shard) -> None:
        self._wanted.setdefault(node, {})[shard] = None

    def _visit(self, node: Node) -> None:
        wanted = list(self._wanted.get(node, ()))
        if node in self.writes:
            self._follow(node, self.writes[node].sources)
        elif is_op(node, armllm.rope_.default):
            rotated: Any = [
                x for x in (OpCall(node).q, OpCall(node).k) if x in self._wanted and x not in self._whole
            ]
            self.rotations[node] = {x: next(iter(self._wanted[x])) for x in rotated}
            self._follow(node, self.rotations[node])
        elif node in self._whole or node.op == "output" or (is_stateful(node) and not wanted):
            self._leave_whole(node, wanted)
        elif wanted:
            self._shard(node, wanted)

    def _shard(self, node: Node, wanted: list[Shard]) -> None:
        made: dict[Shard, ResultShard | None]
        if node in self._owners:
            owner = self._owners[node]
            made = {owner.shard: owner.result} if wanted == [owner.shard] else {}
        elif node.target in _AT_ONCE:
            whole = merged_shard(node, wanted)
            made = {} if whole is None else {whole: result_shard(node, whole)}
        else:
            made = {shard: result_shard(node, shard) for shard in wanted}
        results = {shard: result for shard, result in made.items() if result is not None}
        if not results or len(results) < len(made):
            self._leave_whole(node, wanted)
            return
        if node in self._owners or node.target in _AT_ONCE:
            (self.merged[node],) = results
        self.results[node] = results
        for result in results.values():
            self._follow(node, result.sources)

    def _follow(self, node: Node, sources: Mapping[Node, Shard]) -> None:
        """Wants the shards of arguments, and the other arguments as a whole."""
        for source, shard in sources.items():
            self._want(source, shard)
        others = node.all_input_nodes
        if is_op(node, operator.getitem):  # its source is that of the split
            others = []
        self._need(source for source in others if source not in sources)

    def _leave_whole(self, node: Node, wanted: list[Shard]) -> None:
        self.failed |= any(not fills(shard, node) for shard in wanted)
        self._whole.add(node)
        self._need(node.all_input_nodes)

    def _need(self, nodes: Iterable[Node]) -> None:
        self._whole.update(
            node for node in nodes if node not in self.seeds
        )  # what is gathered is read instead


def _gathered_at(node: Node, shard: Shard) -> tuple[Node, Shard]:
    """Returns the last result that keeps heads of an operator apart, and the shard of it that they are."""
    last = node, shard
    while len(node.users) == 1:
        (user,) = node.users
        later = later_shard(user, node, shard)
        if later is None:
            break
        node, shard = user, later
        if row_size(value(node).shape, shard.axis) is not None:
            last = node, shard
    return last


class _Rewrite:
    """Inserts the calls of a plan into a graph."""

    def __init__(
        self, module: fx.GraphModule, group: RankGroup, plan: _Plan, owners: dict[Node, HeadOwner]
    ) -> None:
        self._module = module
        self._graph = module.graph
        self._group = group
        self._plan = plan
        self._made: dict[tuple[Node, Shard], Node] = {}

    def apply(self) -> list[Node]:
        """Rewrites the graph, and returns the calls that replace those of linear layers."""
        plan, graph = self._plan, self._graph
        self._narrow_states()
        old = [*plan.results, *plan.writes]
        names = {str(x.target) for n in old for x in n.all_input_nodes if x.op == "get_attr"}
        linear = []
        for node in list(graph.nodes):
            self._before = node
            with graph.inserting_before(node):
                for shard, result in plan.results.get(node, {}).items():
                    self._made[node, shard] = result.emit(self._module, self._get)
                    if is_op(node, *QUANTIZED):
                        linear.append(self._made[node, shard])
                if node in plan.seeds:
                    self._gather(node, *plan.seeds[node])
                if node in plan.writes:
                    plan.writes[node].emit(self._module, self._get)
                elif rotated := plan.rotations.get(node):
                    args = [self._get(x, rotated[x]) if x in rotated else x for x in node.args]  # type: ignore[index]
                    call(graph, armllm.rope_.default, *args)
        for node in reversed(list(graph.nodes)):
            replaced = node in plan.results or node in plan.writes or plan.rotations.get(node)
            if not node.users and (replaced or not node.is_impure()):
                graph.erase_node(node)
        drop_unused(self._module, *names)
        return linear

    def _narrow_states(self) -> None:
        """Gives the states of sharded operators the size of this rank's shard."""
        for node, shard in self._plan.merged.items():
            if node.target not in RECURRENT:
                continue
            states, layer = states_of(node), OpCall(node).state
            shape: list[Any] = list(value(states).shape)
            shape[2 if is_op(node, armllm.gated_delta_rule.default) else -1] = shard.count
            if tuple(shape) != tuple(value(states).shape):
                with fake_mode(node):
                    states.meta["val"] = torch.empty(shape, dtype=value(states).dtype)
            recompute(layer)

    def _get(self, node: Node, shard: Shard) -> Node:
        """Returns a shard of a result, which is made before the insertion point."""
        if (node, shard) not in self._made:
            self._made[node, shard] = self._shard_of_whole(node, shard)
        return self._made[node, shard]

    def _shard_of_whole(self, node: Node, shard: Shard) -> Node:
        if node.op == "get_attr":
            return constant_shard(self._module, self._before, node, shard)
        if (whole := self._plan.merged.get(node)) is not None:
            return slice_node(self._graph, self._made[node, whole], within(shard, whole))
        return slice_node(self._graph, node, shard)

    def _gather(self, node: Node, owner: HeadOwner, shard: Shard) -> None:
        """Gathers a result behind its last shard."""
        shape = value(node).shape
        size = shard.period * (row_size(shape, shard.axis) or 1)
        columns = [count * size // sum(owner.counts) for count in owner.counts]
        graph = self._graph
        rows = call(graph, aten.reshape.default, self._get(node, shard), [-1, columns[self._group.rank]])
        whole = call(graph, armllm.gather_columns.default, rows, self._group.communicator, columns)
        sizes = [each if isinstance(each, int) else -1 for each in shape]
        users = [user for user in node.users if user is not rows]
        whole = call(graph, aten.reshape.default, whole, sizes)
        for user in users:
            user.replace_input_with(node, whole)
