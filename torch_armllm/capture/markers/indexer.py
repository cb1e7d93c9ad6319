"""Sparse attention with an indexer, which selects the tokens that a layer attends to.

A graph with indexers that select single tokens, or blocks of them, is captured with markers of their
selections.  Up to the number of tokens that an indexer may select, it selects every token and attention is
dense.  A graph with other indexers is therefore captured without them and serves sequences up to that
length; longer sequences run through the modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.capture.markers.attention import attention_function
from torch_armllm.capture.markers.compression import inside_compressors
from torch_armllm.capture.markers.selection_limits import Selects
from torch_armllm.hf.replacements import replaced

IMPLEMENTATION = "armllm_dense"
"""Attention without the indexers."""
SELECTING = "armllm_selecting"
"""Attention to what the indexers select."""
_BLOCK_PARTS = ("topk_blocks", "block_size", "build_block_mask")
"""Parts of an indexer that returns the indices of blocks: the first two are their number and their tokens."""
_MASKING_PARTS = ("block_topk", "compress_ratio", "index_qk_proj")
"""Likewise, of one that returns a mask of the tokens that it selects."""


def find_indexers(base: nn.Module) -> list[Any]:
    """Returns the modules that select tokens."""
    others = inside_compressors(base)
    return [m for m in base.modules() if type(m).__name__.endswith("Indexer") and m not in others]


def max_dense_length(base: nn.Module) -> int | None:
    """Returns the length up to which every indexer selects all tokens; None if an indexer is unknown."""
    limits = [_num_selected(indexer) for indexer in find_indexers(base)]
    known_limits = [limit for limit in limits if limit is not None]
    return min(known_limits) if known_limits and len(known_limits) == len(limits) else None


def _num_selected(indexer: Any) -> int | None:
    """Returns how many tokens an indexer selects.

    It selects them singly (DeepSeek 3.2), in blocks (MiniMax M3), or in blocks beside all tokens of an
    incomplete block (Qwen4-Exp).
    """
    if _has_parts(indexer, ("index_topk", "wq_b", "wk", "weights_proj")):
        return int(indexer.index_topk)
    if (blocks := _blocks_of(indexer)) is None:
        return None
    count, span = blocks
    return count * span + (span - 1 if _has_parts(indexer, _MASKING_PARTS) else 0)


def _blocks_of(indexer: Any) -> tuple[int, int] | None:
    """Returns how many blocks an indexer selects, and their tokens; None if it selects no blocks."""
    for parts in (_BLOCK_PARTS, _MASKING_PARTS):
        if _has_parts(indexer, parts):
            return int(getattr(indexer, parts[0])), int(getattr(indexer, parts[1]))
    return None


def _has_parts(indexer: Any, parts: Iterable[str]) -> bool:
    return all(hasattr(indexer, name) for name in parts)


def unknown_selection(base: nn.Module) -> str | None:
    """Returns a sentence that names an indexer that selects neither tokens nor blocks of them; or None."""
    indexers = find_indexers(base)
    for path, module in base.named_modules():
        if module in indexers and _num_selected(module) is None:
            return (
                f"{path} ({type(module).__name__}) selects what its layer attends to, and selects neither "
                "tokens nor blocks of tokens, as fused ops need it"
            )
    return None


def dense_limit(base: nn.Module) -> str:
    """Returns a sentence that names the indexer that limits `max_dense_length`, and what it selects."""
    length = max_dense_length(base)
    path, indexer = next(
        (path, module)
        for path, module in base.named_modules()
        if module in find_indexers(base) and _num_selected(module) == length
    )
    blocks = _blocks_of(indexer)
    what = f"{length} tokens" if blocks is None else f"{blocks[0]} blocks of {blocks[1]} tokens"
    return (
        f"{path} ({type(indexer).__name__}) selects {what} for attention, and plans attend to all tokens "
        "up to that number only"
    )


def selects(base: nn.Module) -> Selects | None:
    """Returns what every indexer of a model selects; None if they differ or do something else."""
    found = {_selects(indexer) for indexer in find_indexers(base)}
    return found.pop() if len(found) == 1 else None


def _selects(indexer: Any) -> Selects | None:
    if _num_selected(indexer) is None:
        return None
    if hasattr(indexer, "index_topk"):
        return Selects(int(indexer.index_topk))
    nearest = getattr(indexer, "local_blocks", None)
    if not isinstance(nearest, int):
        return None
    return Selects(int(indexer.topk_blocks), int(indexer.block_size), nearest)


def _select_nothing(*args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros(1, 1, 1, dtype=torch.int32)


def _hide_nothing(*args: Any, **kwargs: Any) -> Tensor:
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


def _without_selection(indexer: Any) -> Any:
    return _hide_nothing if _has_parts(indexer, _MASKING_PARTS) else _select_nothing


def disable_indexers(base: nn.Module) -> AbstractContextManager[None]:
    """Replaces the indexers' forward by a constant while the context lasts."""
    indexers = find_indexers(base)
    return replaced(base, "forward", lambda m: _without_selection(m) if m in indexers else None)


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


def _selecting(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    selected = block_indices if indices is None else indices
    return attention_function(module, query, key, value, None, selected=selected, **kwargs)


def _placeholder_mask(*args: Any, **kwargs: Any) -> Tensor:
    """Returns a mask that modules may pass to their indexers; it hides nothing."""
    return torch.zeros(1, 1, 1, 1)


def register() -> None:
    """Registers attention and mask functions with transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _dense)
    AttentionInterface.register(SELECTING, _selecting)
    for implementation in (IMPLEMENTATION, SELECTING):
        AttentionMaskInterface.register(implementation, _placeholder_mask)
