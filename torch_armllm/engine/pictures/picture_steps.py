"""The part of an engine's steps that pictures change."""

from __future__ import annotations

from dataclasses import dataclass

from torch_armllm.engine.pictures.picture_features import PictureFeatures
from torch_armllm.engine.pictures.token_numbers import TokenNumbers
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.spare_rows import SpareRows


@dataclass(frozen=True)
class PictureSteps:
    """A plan that computes tokens of pictures beside those of texts.

    Attributes:
        plan: reads spare rows, and the numbers if there are any.
        spare: rows of the plan's embedding table that steps write the embeddings to.
        numbers: of each token, a further input of the plan; None: it has none.
        features: of each token, the input after it; None: it has none.
    """

    plan: NativePlan
    spare: SpareRows
    numbers: TokenNumbers | None = None
    features: PictureFeatures | None = None
