"""The part of an engine's steps that pictures change."""

from __future__ import annotations

from dataclasses import dataclass

from torch_armllm.engine.pictures.picture_input import PictureInput
from torch_armllm.engine.pictures.token_numbers import TokenNumbers
from torch_armllm.plan.native import NativePlan


@dataclass(frozen=True)
class PictureSteps:
    """A plan that computes tokens of pictures beside those of texts.

    Attributes:
        plan: reads the numbers, if there are any, and after them the rows.
        rows: of each token; None: a stage of a pipeline that reads those of another one.
        token: id that tokens of pictures have in a step.
        layers: number of early layers that features of pictures are added after.
        numbers: of each token; None: the plan reads none.
    """

    plan: NativePlan
    rows: PictureInput | None
    token: int
    layers: int = 0
    numbers: TokenNumbers | None = None
