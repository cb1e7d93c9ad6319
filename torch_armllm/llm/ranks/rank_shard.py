"""The shard of a model that a process computes, and what the processes compare."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_armllm.engine.execution.executor_sizes import ExecutorSizes
from torch_armllm.engine.execution.stage_course import LinkedStage
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.engine.execution.step_features import step_features
from torch_armllm.engine.images.image_steps import PictureSteps
from torch_armllm.engine.images.media_facts import MediaFacts
from torch_armllm.engine.images.sharded_images import sharded_picture_steps
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.kv_cache.dtypes import STATE_DTYPES
from torch_armllm.kv_cache.shapes import Shape, with_state_dtype
from torch_armllm.llm.ranks.agreement import agree
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.plan.plan_model import PlanModel


class ShardFacts(NamedTuple):
    """Facts of a shard that the first process compares and adds up.

    Attributes:
        model: fingerprint of the whole model.
        program: fingerprint of the shard's instructions, which all ranks of a stage run.
        bytes_per_token: of the shard's cache.
        state_bytes: of a sequence's states.
        text_only: the reason why the shard takes no pictures; empty if it does.
    """

    model: str
    program: str
    bytes_per_token: int
    state_bytes: int
    text_only: str


@dataclass(frozen=True)
class FollowerSettings:
    """Settings that the first process tells those that follow.

    Attributes:
        sizes: of the caches.
        state_dtype: of states of recurrent layers, see `EngineConfig`.
        takes_pictures: True if prompts may hold pictures.
    """

    sizes: ExecutorSizes
    state_dtype: str
    takes_pictures: bool


@dataclass
class RankShard:
    """A process's shard of a model.

    Attributes:
        model: the layers of a stage, with a rank's weights.
        whole_shape: shape of the cache of the whole model.
        pictures: what pictures change in its steps, or the reason why it takes none.
        facts: for the first process.
    """

    model: PlanModel
    whole_shape: Shape
    pictures: PictureSteps | str
    facts: ShardFacts

    def executor(self, settings: FollowerSettings, stage: LinkedStage | None = None) -> StepExecutor:
        """Returns the executor of a process that follows.

        Args:
            settings: what the first process says.
            stage: of a pipeline; None: there is none.
        """
        shape = with_state_dtype(self.model.shape, STATE_DTYPES[settings.state_dtype])
        pictures = self.pictures if settings.takes_pictures else None
        assert not isinstance(pictures, str)
        features = step_features(pictures, self.model.slots)
        return StepExecutor(self.model, settings.sizes, features, shape, stage=stage)


def rank_shard(
    kind: ModelKind,
    kv_cache_dtype: str,
    place: RankPlace,
    group: RankGroup | None,
    media: MediaFacts | str,
) -> RankShard:
    """Returns a process's shard of a patched model; all ranks of a stage call this at the same time.

    Args:
        kind: of the whole model.
        kv_cache_dtype: see `EngineConfig`.
        place: of the process.
        group: ranks of its stage; None: it is one.
        media: of the trial with images, videos and sounds, or the reason why it takes none.
    """
    from torch_armllm.patching.model_shard import model_shard  # imports transformers

    cache = None if kv_cache_dtype == "auto" else kv_cache_dtype
    shard = model_shard(kind, cache, place, group)
    own = shard.model
    pictures = sharded_picture_steps(kind, own, place, media)
    program = own.plan.program
    facts = ShardFacts(
        *(_fingerprint(shard.description), _fingerprint(program.opcodes, program.columns, program.dtype)),
        *(own.shape.bytes_per_token, own.shape.states.bytes_per_sequence),
        text_only=pictures if isinstance(pictures, str) else "",
    )
    return RankShard(own, shard.whole_shape, pictures, facts)


def compare(facts: Sequence[ShardFacts], tensor_ranks: int) -> None:
    """Compares what has to be equal in all processes, and in those of a stage.

    Args:
        facts: of all processes, in order.
        tensor_ranks: number of ranks of each stage.

    Raises:
        ValueError: a process has another model, or another shard of it.
    """
    agree([each.model for each in facts])
    for first in range(0, len(facts), tensor_ranks):
        agree([each.program for each in facts[first : first + tensor_ranks]], first)


def largest_share(facts: Sequence[ShardFacts], shape: Shape) -> float:
    """Returns the largest part of a cache that one process keeps."""
    tokens, states = shape.bytes_per_token, shape.states.bytes_per_sequence
    shares = [max(each.bytes_per_token for each in facts) / tokens] if tokens else []
    if states:
        shares.append(max(each.state_bytes for each in facts) / states)
    return max(shares, default=1.0)


def _fingerprint(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()
