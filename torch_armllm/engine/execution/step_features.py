"""Features of steps beside the tokens of texts."""

from __future__ import annotations

from dataclasses import dataclass

from torch_armllm.engine.pictures.picture_steps import PictureSteps
from torch_armllm.lora.slot_set import SlotSet


@dataclass(frozen=True)
class StepFeatures:
    """Features that the steps of an executor have beside the tokens of texts.

    Attributes:
        slots: for adapters, which the plan reads; None: there are none.
        pictures: what pictures change in steps; None: there are no pictures.
        kept_columns: columns of the plan's results that a drafter reads; None: there is no such drafter.
    """

    slots: SlotSet | None = None
    pictures: PictureSteps | None = None
    kept_columns: range | None = None


TEXTS = StepFeatures()
"""Those of steps of texts alone."""
