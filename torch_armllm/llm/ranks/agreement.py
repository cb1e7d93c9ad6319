"""Agreement of the processes of a sharded model: who may, what each loads, and what has to be equal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_armllm import _version
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.speculative.build import reads_hidden_states
from torch_armllm.ops import variants


def described() -> str:
    """Returns what has to be the same on all ranks: the version, and the kernels."""
    return f"torch_armllm {_version.__version__}, kernels for {variants.machine().compiled}"


def for_follower(request: ModelRequest, config: EngineConfig) -> tuple[ModelRequest, EngineConfig]:
    """Returns what a process loads that follows: it neither schedules nor samples, and has no tokenizer."""
    quiet = replace(request, tokenizer=None, skip_tokenizer_init=True, progress=False)
    own: dict[str, Any] = {"logits_processors": (), "scheduling_policy": None, "speculative_config": None}
    return quiet, replace(config, trace=None, **own)


def agree(facts: Sequence[object], first: int = 0) -> None:
    """Compares what has to be equal on adjacent ranks.

    Args:
        facts: of each rank.
        first: number of the first of the ranks.

    Raises:
        ValueError: a rank has another.
    """
    for rank, fact in enumerate(facts, first):
        if fact != facts[0]:
            raise ValueError(f"rank {rank} has {fact}, and rank {first} has {facts[0]}")


def check_shardable(model: object, config: EngineConfig) -> None:
    """Checks that several ranks can serve a model.

    Raises:
        ValueError: they cannot.
    """
    if (reason := why_not_shardable(model, config)) is not None:
        pipeline = config.pipeline_parallel_size > 1
        name = "pipeline_parallel_size" if pipeline else "tensor_parallel_size"
        raise ValueError(f"{name} = {getattr(config, name)}: {reason}")


def why_not_shardable(model: object, config: EngineConfig) -> str | None:
    """Returns the reason why several ranks cannot serve a model; None if they may."""
    if not isinstance(model, str):
        return "each rank loads its part of the model itself: give the folder in place of a loaded model"
    if not hasattr(os, "memfd_create"):
        return "ranks share memory that only Linux has"
    if reads_hidden_states(config.speculative_config):
        return "draft layers are not shared out among ranks yet: draft with n-grams or a draft model"
    return None
