"""A patched model without its modules, for processes that share it out."""

from __future__ import annotations

from typing import Any

import torch

from torch_armllm.lora.read_slots import slots_read_by
from torch_armllm.patching.patched_model import servable_model
from torch_armllm.patching.state import why_not_captured
from torch_armllm.plan.native import native_plan
from torch_armllm.plan.plan_model import PlanModel


def divisible_model(model: Any, setting: str) -> PlanModel:
    """Returns the plan and the output layer of a patched model, which share memory with it.

    Args:
        model: a patched model.
        setting: name of the setting that needs them, for errors.

    Raises:
        ValueError: the model has no native plan, or its output layer is not one matrix product.
    """
    name = type(model).__name__
    servable = servable_model(model)
    if servable is None or (plan := native_plan(servable.plan)) is None:
        found = None if servable is None else servable.plan
        why = f"its graph runs node by node: {getattr(found, 'why_not_native', '')}"
        reason = why_not_captured(model) or why
        raise ValueError(f"{setting} needs a native plan, and {name} has none: {reason}")
    program = plan.program
    head = servable.head.weights(torch.empty(1, program.columns, dtype=program.dtype))
    if head is None:
        raise ValueError(
            f"{setting} needs an output layer that is one matrix product, and that of {name} "
            "does more: leave it out"
        )
    return PlanModel(
        name=servable.name,
        plan=plan,
        shape=servable.shape,
        vocab_size=servable.vocab_size,
        max_length=servable.max_length,
        first_position=servable.first_position,
        position_limit=servable.position_limit,
        stated_positions=servable.stated_positions,
        head=head,
        generation_config=servable.generation_config,
        slots=slots_read_by(model, program.constants),
    )
