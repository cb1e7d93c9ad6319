"""Limits of what indexers and their markers select, for the time of a capture or a comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_TOP_K = 4
_SPAN, _BLOCKS = 2, 3


@dataclass(frozen=True)
class Selects:
    """Number of tokens that an indexer selects singly, or of blocks of tokens."""

    count: int
    span: int = 0
    """Tokens of a block; 0: tokens are selected singly."""
    nearest: int = 0
    """Blocks up to a token's own that are always selected."""


@contextlib.contextmanager
def limit_selections(indexers: list[Any], count: int, span: int) -> Iterator[None]:
    """Lets indexers select only ``count`` tokens, or blocks of ``span`` tokens, while the context lasts."""
    limits = {"index_topk": count, "topk_blocks": count, "block_size": span}
    before = [{name: vars(each)[name] for name in limits if name in vars(each)} for each in indexers]
    try:
        for indexer, attributes in zip(indexers, before, strict=True):
            vars(indexer).update({name: limits[name] for name in attributes})
        yield
    finally:
        for indexer, attributes in zip(indexers, before, strict=True):
            vars(indexer).update(attributes)


@contextlib.contextmanager
def limited_markers(module: fx.GraphModule, count: int, span: int) -> Iterator[None]:
    """Lets the markers of a graph select as `limit_selections` says while the context lasts."""
    tokens = [n for n in module.graph.nodes if n.target is torch.ops.armllm.selection.default]
    blocks = [n for n in module.graph.nodes if n.target is torch.ops.armllm.block_selection.default]
    before = [(node, node.args) for node in tokens + blocks]
    try:
        for node in tokens:
            node.update_arg(_TOP_K, count)
        for node in blocks:
            node.update_arg(_SPAN, span)
            node.update_arg(_BLOCKS, count)
        module.recompile()
        yield
    finally:
        for node, args in before:
            node.args = args
        module.recompile()
