"""Inputs of a step on a paged cache, which the passes of attention and recurrent layers add to a graph.

The inputs are the same for all layers:

    slots        int64 (T)       destination of keys and values: block · block_size + offset; negative: none
    block_table  int32 (B, n)    blocks of each sequence
    query_start  int32 (B + 1)   first packed token of each sequence
    seq_lens     int32 (B)       length of each sequence after this step
    max_seq_len  int             the largest of them
    k_cache      (layers, …), as torch_armllm.ops.attention.new_kv_cache allocates it
    v_cache
    k_scales     likewise, if the cache is int8 or INT4
    v_scales
    index_keys   (indexers, …), the keys of indexers, beside a k_cache of latents
    entries_0 …  (compressors, …), compressed entries, beside a k_cache of the tokens of all layers
    k_cache_1 …  likewise for further groups of layers, if layers differ in shape
    state_slots  int64 (B)       slot of each sequence's states, if there are recurrent layers
    save_slots   int64 (T) or (0)  slot to which the states after a token are also written; -1: none
    states_0 …   (layers, slots, …), as torch_armllm.kv_cache.states allocates them
    encoder_table   int32 (T, m)    blocks of the encoder's tokens that each new token attends to
    encoder_starts  int32 (T + 1)   0, 1, … T: each new token is a sequence for itself
    encoder_lens    int32 (T)       number of the encoder's tokens that each new token attends to
    encoder_k, encoder_v            (layers, …), their keys and values
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.passes.lib.graph import fake_mode, value

BLOCK_SIZE = 32


def cache_name(tensor: str, group: int) -> str:
    """Returns the name of a group of layers' input."""
    return f"{tensor}_{group}" if group else tensor


def add_paged_inputs(
    module: fx.GraphModule, near: Node, tokens: Any, caches: dict[str, tuple[torch.dtype, tuple[Any, ...]]]
) -> dict[str, Node]:
    """Adds the inputs of a paged step to a graph.

    Args:
        module: the graph's module.
        near: a node at or after a node with a fake tensor.
        tokens: symbolic number of tokens.
        caches: dtype and shape of each cache tensor by name.
    """
    shapes: dict[str, tuple[torch.dtype, tuple[Any, ...]] | None] = {
        "slots": (torch.int64, (tokens,)),
        "block_table": (torch.int32, (2, 4)),
        "query_start": (torch.int32, (3,)),
        "seq_lens": (torch.int32, (2,)),
        "max_seq_len": None,
        **caches,
    }
    return _add(module, near, shapes)


def paged_inputs(module: fx.GraphModule) -> dict[str, Node]:
    """Returns the inputs that `add_paged_inputs` added, by name; empty before."""
    placeholders = {n.name: n for n in module.graph.nodes if n.op == "placeholder"}
    return placeholders if "query_start" in placeholders else {}


def add_index_input(module: fx.GraphModule, near: Node, dtype: torch.dtype, sizes: tuple[int, int]) -> Node:
    """Adds the cache of indexers' keys to a graph that has the inputs of a paged step.

    Args:
        module: the graph's module.
        near: a node at or after a node with a fake tensor.
        dtype: dtype of the cache.
        sizes: number of indexers, and elements of their keys.
    """
    indexers, size = sizes
    return _add(module, near, {"index_keys": (dtype, (indexers, 8, BLOCK_SIZE, size))})["index_keys"]


@dataclass(frozen=True)
class StateInputs:
    """Inputs of recurrent layers: slots of sequences, slots of saved states, and the states of each group."""

    slots: Node
    saves: Node
    groups: list[Node]


def add_state_inputs(
    module: fx.GraphModule, near: Node, tokens: Any, groups: list[tuple[torch.dtype, tuple[Any, ...]]]
) -> StateInputs:
    """Adds the inputs of recurrent layers to a graph that has those of a paged step.

    Args:
        module: the graph's module.
        near: a node at or after a node with a fake tensor.
        tokens: symbolic number of tokens.
        groups: dtype and shape of each tensor of states.
    """
    shapes = {
        "state_slots": (torch.int64, (2,)),
        "save_slots": (torch.int64, (tokens,)),
        **{f"states_{i}": group for i, group in enumerate(groups)},
    }
    slots, saves, *states = _add(module, near, shapes).values()
    return StateInputs(slots, saves, states)


def state_sizes(module: fx.GraphModule) -> list[tuple[int, ...]]:
    """Returns the shape of one state of each group that `add_state_inputs` added."""
    inputs = paged_inputs(module)
    names = (f"states_{i}" for i in itertools.count())
    return [tuple(map(int, value(inputs[n]).shape[2:])) for n in itertools.takewhile(inputs.get, names)]


def add_encoder_inputs(
    module: fx.GraphModule,
    near: Node,
    tokens: Any,
    dtype: torch.dtype,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> dict[str, Node]:
    """Adds the inputs of attention to an encoder's tokens to a graph that has those of a paged step.

    Args:
        module: the graph's module.
        near: a node at or after a node with a fake tensor.
        tokens: symbolic number of tokens.
        dtype: dtype of the keys and values.
        shapes: shapes of the keys and of the values.
    """
    integers: dict[str, tuple[int, ...]] = {"table": (tokens, 4), "starts": (tokens + 1,), "lens": (tokens,)}
    inputs = {f"encoder_{name}": (torch.int32, shape) for name, shape in integers.items()}
    inputs |= {f"encoder_{name}": (dtype, shape) for name, shape in zip("kv", shapes, strict=True)}
    return _add(module, near, inputs)


def _add(
    module: fx.GraphModule, near: Node, shapes: Mapping[str, tuple[torch.dtype, tuple[Any, ...]] | None]
) -> dict[str, Node]:
    """Adds inputs after the present ones; None instead of a dtype and a shape makes an integer."""
    graph, mode = module.graph, fake_mode(near)
    inputs: dict[str, Node] = {}
    after = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for name, tensor in shapes.items():
        with graph.inserting_after(after):
            node = graph.placeholder(name)
        if tensor is None:
            node.meta["val"] = 64
        else:
            with mode:
                node.meta["val"] = torch.empty(tensor[1], dtype=tensor[0])
        inputs[name] = after = node
    return inputs
