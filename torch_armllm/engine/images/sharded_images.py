"""Pictures of a sharded model: the first process reads them, and sends rows to the others."""

from __future__ import annotations

from typing import Any

from torch_armllm.engine.images.build import (
    picture_steps,
    reader_of,
    text_only,
    unknown_family,
    why_not_read,
)
from torch_armllm.engine.images.image_steps import PictureSteps
from torch_armllm.engine.images.reader import PictureReader
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.plan.plan_model import PlanModel


def sharded_picture_steps(kind: ModelKind, shard: PlanModel, place: RankPlace) -> PictureSteps | str:
    """Returns what pictures change in the steps of a process, or the reason why it takes none.

    Args:
        kind: of the whole model, unpatched.
        shard: what the process computes.
        place: of the process.
    """
    if (reason := unknown_family(kind)) is not None:
        return reason
    try:
        return picture_steps(kind, shard.plan, shard.shape, place.stage == 0)
    except ValueError as error:
        if place.stages == 1:
            return text_only(kind, error)
        fewer = "set a smaller pipeline_parallel_size"
        return text_only(kind, f"as stage {place.stage} of {place.stages}, {error}: {fewer}")


def leading_reader(
    kind: ModelKind, steps: PictureSteps | str, processor: Any, limit: int, tokens: int
) -> PictureReader | str:
    """Returns the reader of a model's pictures, or the reason why it takes none.

    Args:
        kind: of the whole model, unpatched.  The reader keeps its vision tower, and its embeddings of texts;
            the layers of its language model are removed.
        steps: of the first process.
        processor: see `torch_armllm.engine.images.build.picture_reader`.
        limit: likewise.
        tokens: likewise.
    """
    if isinstance(steps, str):
        return steps
    if (reason := why_not_read(kind, processor, limit)) is not None:
        return reason
    reader = reader_of(kind, kind.base.forward, processor, steps, limit, tokens)
    reader.remove_layers()
    return reader
