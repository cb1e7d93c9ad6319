"""Sparse attention by an indexer, which chooses the tokens that a layer attends to.

As long as a text is no longer than what an indexer may choose, it chooses every token and attention is dense.
So a graph is captured without indexers, for texts up to that length; longer ones run by the modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.capture.markers.attention import attention_function

IMPLEMENTATION = "armllm_dense"


def indexers_of(base: nn.Module) -> list[Any]:
    """The modules that choose tokens."""
    return [module for module in base.modules() if type(module).__name__.endswith("Indexer")]


def dense_until(base: nn.Module) -> int | None:
    """Tokens up to which every indexer chooses all of a text; None: there is one that is not known."""
    limits = [_chosen(indexer) for indexer in indexers_of(base)]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known and len(known) == len(limits) else None


def _chosen(indexer: Any) -> int | None:
    """Tokens that an indexer chooses: single ones (DeepSeek 3.2), or blocks of them (MiniMax M3)."""
    if all(hasattr(indexer, name) for name in ("index_topk", "wq_b", "wk", "weights_proj")):
        return int(indexer.index_topk)
    if all(hasattr(indexer, name) for name in ("topk_blocks", "block_size", "build_block_mask")):
        return int(indexer.topk_blocks) * int(indexer.block_size)
    return None


def _choose_nothing(*args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros(1, 1, 1, dtype=torch.int32)


@contextlib.contextmanager
def left_out(base: nn.Module) -> Iterator[None]:
    """Indexers compute nothing."""
    indexers = indexers_of(base)
    try:
        for indexer in indexers:
            indexer.__dict__["forward"] = _choose_nothing
        yield
    finally:
        for indexer in indexers:
            indexer.__dict__.pop("forward", None)


def _dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    return attention_function(module, query, key, value, None, **kwargs)


def _some_mask(*args: Any, **kwargs: Any) -> Tensor:
    """What modules may hand to their indexers."""
    return torch.zeros(1, 1, 1, 1)


def register() -> None:
    """Makes the seam known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _dense)
    AttentionMaskInterface.register(IMPLEMENTATION, _some_mask)
