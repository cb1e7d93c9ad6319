"""The model as the engine sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_armllm.patching.state import patched_forward
from torch_armllm.plan.plan_model import StoredForward, StoredModel

if TYPE_CHECKING:
    from torch_armllm.patching.forward import PatchedForward


def engine_forward(model: Any) -> PatchedForward | StoredForward | None:
    """What an engine runs of a model: `patched_forward`, or what was kept of it."""
    return model.forward if isinstance(model, StoredModel) else patched_forward(model)
