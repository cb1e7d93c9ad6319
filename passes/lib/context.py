"""Context of a run of the passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_armllm.passes.lib.cache_layout import CacheLayout


@dataclass
class PassContext:
    """What a pass may know beyond the graph."""

    paged: bool = True
    """Whether attention runs against a paged cache (a captured model) or stays as it is (torch.compile)."""
    cache_dtype: torch.dtype | None = None
    """What the paged cache holds; None: what the keys are."""
    layout: CacheLayout | None = None
    """Where the layers of the paged cache lie; None: as the graph says when attention is rewritten."""
    scheme: str | None = None
    """INT4 scheme for float weights that the graph still holds; None leaves them."""
    on_new_weight: Callable[[str, Tensor], None] = lambda attribute, view: None
    """Called with the attribute of a weight that a pass moved into a larger tensor, and its view there."""
    counts: dict[str, int] = field(default_factory=dict)
    """Rewrites by pass name, filled by ``run_passes``."""
