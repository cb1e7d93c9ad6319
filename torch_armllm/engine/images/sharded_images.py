"""Images, videos and sounds of a sharded model: the first process reads them, and sends others the rows."""

from __future__ import annotations

from typing import Any

from torch_armllm.engine.images.build import picture_steps, reader_of, text_only
from torch_armllm.engine.images.image_steps import PictureSteps
from torch_armllm.engine.images.media_facts import MediaFacts
from torch_armllm.engine.images.reader import PictureReader, ReaderLimits
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.plan.plan_model import PlanModel


def sharded_picture_steps(
    kind: ModelKind, shard: PlanModel, place: RankPlace, facts: MediaFacts | str
) -> PictureSteps | str:
    """Returns what items change in the steps of a process, or the reason why it takes none.

    Args:
        kind: of the whole model, unpatched.
        shard: what the process computes.
        place: of the process.
        facts: of the trial of the whole model, in the first process; or the reason why it takes none.
    """
    if isinstance(facts, str):
        return facts
    try:
        return picture_steps(kind, shard.plan, shard.shape, facts, place.stage == 0)
    except ValueError as error:
        if place.stages == 1:
            return text_only(kind, error)
        fewer = "set a smaller pipeline_parallel_size"
        return text_only(kind, f"as stage {place.stage} of {place.stages}, {error}: {fewer}")


def leading_reader(
    kind: ModelKind,
    processor: Any,
    facts: MediaFacts | str,
    steps: PictureSteps | str,
    limits: ReaderLimits,
) -> PictureReader | str:
    """Returns the reader of a model's images, videos and sounds, or the reason why it takes none.

    Args:
        kind: of the whole model, unpatched.  The reader keeps its towers, and its embeddings of texts; the
            layers of its language model are removed.
        processor: see `torch_armllm.engine.images.build.picture_reader`.
        facts: of its trial.
        steps: of the first process.
        limits: of prompts.
    """
    if isinstance(facts, str):
        return facts
    if isinstance(steps, str):
        return steps
    reader = reader_of(kind, processor, facts, steps, limits)
    reader.remove_layers()
    return reader
