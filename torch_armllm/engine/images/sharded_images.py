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
from torch_armllm.hf.base_model import base_model_of
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.plan.plan_model import PlanModel


def sharded_picture_steps(model: Any, shard: PlanModel, place: RankPlace) -> PictureSteps | str:
    """Returns what pictures change in the steps of a process, or the reason why it takes none.

    Args:
        model: the whole model, unpatched.
        shard: what the process computes.
        place: of the process.
    """
    if (reason := unknown_family(model)) is not None:
        return reason
    base, is_first = base_model_of(model), place.stage == 0
    try:
        return picture_steps(base, model.config, shard.plan, shard.shape, shard.vocab_size, is_first)
    except ValueError as error:
        if place.stages == 1:
            return text_only(model, error)
        fewer = "set a smaller pipeline_parallel_size"
        return text_only(model, f"as stage {place.stage} of {place.stages}, {error}: {fewer}")


def leading_reader(
    model: Any, steps: PictureSteps | str, processor: Any, limit: int, tokens: int
) -> PictureReader | str:
    """Returns the reader of a model's pictures, or the reason why it takes none.

    Args:
        model: the whole model, unpatched.  The reader keeps its vision tower, and its embeddings of texts;
            the layers of its language model are removed.
        steps: of the first process.
        processor: see `torch_armllm.engine.images.build.picture_reader`.
        limit: likewise.
        tokens: likewise.
    """
    if isinstance(steps, str):
        return steps
    if (reason := why_not_read(model, processor, limit)) is not None:
        return reason
    base = base_model_of(model)
    reader = reader_of(model, base, base.forward, processor, steps, limit, tokens)
    reader.remove_layers()
    return reader
