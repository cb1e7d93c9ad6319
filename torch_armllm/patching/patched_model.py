"""Adapter of a patched model to the interface that the engine serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_armllm.patching.lm_head import LMHead
from torch_armllm.patching.state import patch_state
from torch_armllm.plan.native import native_plan
from torch_armllm.plan.plan_model import PlanModel
from torch_armllm.plan.servable_model import ServableModel

if TYPE_CHECKING:  # imports transformers, which an engine from the plan cache does not need
    from torch_armllm.hf.model_kind import ModelKind
    from torch_armllm.lora.slot_set import SlotSet
    from torch_armllm.patching.forwards.calls import TokenCalls
    from torch_armllm.patching.forwards.forward import PatchedForward

DEFAULT_POSITIONS = 32768
"""Positions of a model whose config states no limit."""


class PatchedModel:
    """A captured model as a `ServableModel`.

    Args:
        kind: of a causal language model that `torch_armllm.patch` was called on.
        forward: the patched forward of its base model.
    """

    def __init__(self, kind: ModelKind, forward: PatchedForward[TokenCalls]) -> None:
        self.name = kind.name
        self.plan = forward.plan
        self.shape = forward.shape
        self.vocab_size = kind.vocab_size
        self.max_length = forward.calls.max_length
        self.first_position = kind.first_position
        self.position_limit, self.stated_positions = positions_of(kind)
        self.head = LMHead(kind.model, forward)
        self.generation_config = getattr(kind.model, "generation_config", None)
        self._model = kind.model

    @property
    def slots(self) -> SlotSet | None:
        """Those for adapters that the plan reads."""
        from torch_armllm.lora.read_slots import slots_read_by  # imports modules that others do not need

        plan = native_plan(self.plan)
        return None if plan is None else slots_read_by(self._model, plan.program.constants)


def servable_model(model: Any) -> ServableModel | None:
    """Returns the model that an engine serves, or None if it could not be captured and has no plan.

    Args:
        model: a patched model, or one from the plan cache.

    Raises:
        ValueError: the model is not patched.
    """
    if isinstance(model, PlanModel):
        return model
    state = patch_state(model)
    return None if state.forward is None else PatchedModel(state.kind, state.forward)


def positions_of(kind: ModelKind) -> tuple[int | None, int]:
    """Returns `ServableModel.position_limit` and `ServableModel.stated_positions` of a model."""
    return kind.position_limit, kind.stated_positions or DEFAULT_POSITIONS
