"""State that a patched model carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from torch_armllm.plan.native import NativePlan, native_plan

if TYPE_CHECKING:
    from torch_armllm.hf.model_kind import ModelKind
    from torch_armllm.hf.replacements import Replacements
    from torch_armllm.patching.forwards.calls import TokenCalls
    from torch_armllm.patching.forwards.forward import PatchedForward
    from torch_armllm.plan.servable_model import ServableModel
    from torch_armllm.quant.report import Report


STATE = "_armllm"
"""Attribute of a patched model that holds its `PatchState`."""


@dataclass
class PatchState:
    """Changes that `patch` made, for `unpatch` and for reports."""

    kind: ModelKind
    forward: PatchedForward[TokenCalls] | None
    quantized: bool
    report: Report
    replaced: Replacements
    """All that is undone with the plan, this state included."""


def is_patched(model: nn.Module) -> bool:
    """True if the model is patched."""
    return STATE in model.__dict__


def patch_state(model: nn.Module) -> PatchState:
    """Returns what a patched model carries.

    Raises:
        ValueError: the model is not patched.
    """
    if not is_patched(model):
        raise ValueError(f"this {type(model).__name__} is not patched")
    state: PatchState = model.__dict__[STATE]
    return state


def patched_forward(model: nn.Module) -> PatchedForward[TokenCalls] | None:
    """Returns the ``forward`` of a patched model's base model; None if the model could not be captured.

    Raises:
        ValueError: the model is not patched.
    """
    return patch_state(model).forward


def why_not_captured(model: nn.Module) -> str | None:
    """Returns the reason why a patched model runs module by module; None if it runs a plan."""
    return patch_state(model).report.capture_reason


def require_native_plan(model: nn.Module, servable: ServableModel | None, setting: str) -> NativePlan:
    """Returns the plan of a patched model, which C++ has to run.

    Args:
        model: the model.
        servable: what an engine serves of it; None: it could not be captured.
        setting: name of the setting that needs the plan, for the error.

    Raises:
        ValueError: the model has no native plan; the message says why.
    """
    plan = None if servable is None else servable.plan
    if (native := native_plan(plan)) is not None:
        return native
    reason = why_not_captured(model) or f"its graph runs node by node: {getattr(plan, 'why_not_native', '')}"
    raise ValueError(f"{setting} needs a native plan, and {type(model).__name__} has none: {reason}")
