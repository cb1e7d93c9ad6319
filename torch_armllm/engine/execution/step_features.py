"""The features of steps that an engine may have."""

from __future__ import annotations

from torch_armllm.engine.execution.adapter_rows import AdapterRows
from torch_armllm.engine.execution.step_feature import StepFeature
from torch_armllm.engine.images.image_steps import PictureSteps
from torch_armllm.lora.slot_set import SlotSet


class KeptColumns(StepFeature):
    """Results of the plan that a drafter reads beside the last hidden states.

    Args:
        columns: of the results.
    """

    def __init__(self, columns: range) -> None:
        self.kept_columns: range = columns


def step_features(
    pictures: PictureSteps | None = None, slots: SlotSet | None = None, kept_columns: range | None = None
) -> list[StepFeature]:
    """Returns the features of a process, in the order of all processes.

    Args:
        pictures: what pictures change in steps; None: there are no pictures.
        slots: for adapters, which the plan reads; None: there are none.
        kept_columns: columns of the plan's results that a drafter reads; None: there is no such drafter.
    """
    every = (
        pictures,
        None if slots is None else AdapterRows(slots),
        None if kept_columns is None else KeptColumns(kept_columns),
    )
    return [feature for feature in every if feature is not None]
