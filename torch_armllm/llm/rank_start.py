"""Steps of the start and the end of processes that share a model out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch_armllm import _version
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.speculative.build import reads_hidden_states
from torch_armllm.kv_cache.disk.disk_cache import DiskPrefixCache
from torch_armllm.ops import variants
from torch_armllm.parallel.placement import rank_cores


def described() -> str:
    """Returns what has to be the same on all ranks: the version, and the kernels."""
    return f"torch_armllm {_version.__version__}, kernels for {variants.machine().compiled}"


_cpus_before: dict[frozenset[int], set[int]] = {}
"""CPUs of a thread before it became a rank 0, by those of this rank."""


def place_on(cpus: list[int]) -> None:
    """Lets this thread, and those that it starts, run on the CPUs of rank 0 only."""
    _cpus_before.setdefault(frozenset(cpus), os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus)


def take_cpus_back() -> None:
    """Lets this thread use all its CPUs again, so that the ranks of another engine share out all of them."""
    if _cpus_before and (before := _cpus_before.get(frozenset(os.sched_getaffinity(0)))) is not None:
        os.sched_setaffinity(0, before)


def rank_cpus(ranks: int) -> list[list[int]]:
    """Returns the CPUs of each rank."""
    return [[cpu for core in part for cpu in core] for part in rank_cores(ranks)]


def tokenizer_for(request: ModelRequest) -> Any:
    """Returns the tokenizer that is given, or loads it: the model's own if none is named."""
    from torch_armllm.checkpoint.load import load_tokenizer  # imports transformers

    given = request.tokenizer is not None and not isinstance(request.tokenizer, str)
    return request.tokenizer if given else load_tokenizer(request.tokenizer or request.source)


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


def end_ranks(disk: DiskPrefixCache | None, close: Callable[[], None]) -> None:
    """Ends the other processes, once the prefix cache on disk has what it asks them for."""
    if disk is not None:
        disk.end()
    close()


def why_not_divided(model: object, config: EngineConfig) -> str | None:
    """Returns the reason why several ranks cannot serve a model; None if they may."""
    if not isinstance(model, str):
        return "each rank loads its part of the model itself: give the folder in place of a loaded model"
    if not hasattr(os, "memfd_create"):
        return "ranks share memory that only Linux has"
    if reads_hidden_states(config.speculative_config):
        return "draft layers are not shared out among ranks yet: draft with n-grams or a draft model"
    return None
