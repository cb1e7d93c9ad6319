"""The other processes of an engine, as it is built."""

from __future__ import annotations

from typing import Protocol

from torch_armllm.engine.execution.executor_sizes import ExecutorSizes
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.engine.images.reader import PictureReader
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.parallel.stage_link import StageLink


class Ranks(Protocol):
    """Tensor parallel ranks, or stages of a pipeline, that wait for an engine.

    Attributes:
        size: number of ranks, this process included.
        stages: number of stages, each of as many ranks; 1: ranks compute every layer together.
        link: from the last stage and to the next one; None if there is one stage.
        whole_shape: shape of the cache that is sized: that of the whole model, or this rank's own if there is
            one stage.
        largest_share: largest part of that cache which a process keeps; its memory limits the size.
        pictures: reads prompts with pictures; or the reason why the processes take none.
    """

    size: int
    stages: int
    link: StageLink | None
    whole_shape: Shape
    largest_share: float
    pictures: PictureReader | str

    def lead(self, sizes: ExecutorSizes) -> RankLeader:
        """Tells the other ranks the sizes of their caches, and returns what sends them steps."""
        ...
