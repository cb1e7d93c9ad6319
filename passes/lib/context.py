"""Options and results of a run of the passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.passes.lib.cache_layout import CacheLayout


@dataclass
class PassContext:
    """Options that the passes read, and the counts of their rewrites."""

    paged: bool = True
    """True to rewrite attention to a paged cache (captured models); False to leave it (torch.compile)."""
    cache_dtype: torch.dtype | None = None
    """Dtype of the paged cache; None: the dtype of the keys."""
    layout: CacheLayout | None = None
    """Layout of the paged cache; None: inferred from the graph when attention is rewritten."""
    scheme: str | None = None
    """INT4 scheme for float weights in the graph; None leaves them in floats."""
    on_new_weight: Callable[[str, Tensor], None] = lambda attribute, view: None
    """Called with the attribute of a weight that a pass merged into a larger tensor, and its view of it."""
    group: RankGroup | None = None
    """Tensor parallel ranks that share the layers out; None: this process computes all."""
    key_heads: dict[int, int] = field(default_factory=dict)
    """Set by a pass: heads of keys and values in this rank's paged cache, by those of all ranks; or none."""
    skip: frozenset[str] = frozenset()
    """Names of passes that are left out."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of rewrites by pass name, filled by ``run_passes``."""
