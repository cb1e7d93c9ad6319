"""Loading of a model on ranks that are actors of a Ray cluster."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.llm.launched_ranks import launched_ranks
from torch_armllm.llm.loader import LoadedEngine
from torch_armllm.llm.rank_start import end_ranks, for_follower, why_not_divided
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.system.extras import require_extra
from torch_armllm.system.host import physical_cores

SETTING = "distributed_executor_backend = 'ray'"
_loads = threading.Lock()
"""Ranks meet by environment variables, which a process has once."""


def load_on_ray(
    load: Callable[[ModelRequest, EngineConfig], LoadedEngine], request: ModelRequest, config: EngineConfig
) -> LoadedEngine:
    """Loads a model on several ranks: the first is this process, the others are actors of a Ray cluster.

    Args:
        load: loader of ranks that ``torchrun`` has started.
        request: what to load: a folder, or a name on the model hub, which all machines can read.
        config: of the engine.

    Raises:
        ImportError: Ray is not installed.
        ValueError: a setting or the model does not allow it, the cluster has too few CPUs, or a rank has
            failed.
    """
    require_extra("ray", "ray", SETTING)
    if (reason := _refusal(request.model, config)) is not None:
        raise ValueError(f"{SETTING}: {reason}")
    from torch_armllm.llm.ray_places import Needs, connect, machines  # ray is an optional package
    from torch_armllm.llm.ray_ranks import RayRanks

    folder = Path(request.source).expanduser()
    request = replace(request, model=str(folder.absolute())) if folder.is_dir() else request
    connect()
    spread = config.has_stages_only and len(machines()) > 1
    ranks_here = -(-config.ranks // len(machines())) if spread else config.ranks
    threads = config.threads or max(1, len(physical_cores()) // ranks_here)
    # actors of a machine do not know of each other: none may pin threads to cores
    config = replace(config, threads=threads, pin_threads=False)
    with _loads:
        place = RankPlace(0, config.tensor_ranks, config.pipeline_parallel_size)
        ranks = RayRanks(Needs(config.ranks, threads, spread), place)
        try:
            with ranks.meeting(load, *for_follower(request, config)):
                loaded = load(request, config)
        except BaseException as error:
            # a connection that breaks; other errors say what is wrong here
            reason = ranks.awaited_failure() if isinstance(error, RuntimeError) else None
            ranks.close()
            if reason is not None:
                raise ValueError(reason) from error
            raise
        finally:
            if dist.is_initialized():  # ranks have met, and have connections of their own
                dist.destroy_process_group()
    loaded.engine.runner.watched_by(ranks)
    weakref.finalize(loaded.engine, end_ranks, loaded.engine.disk, ranks.close)
    return loaded


def _refusal(model: Any, config: EngineConfig) -> str | None:
    """Returns the reason why Ray cannot start ranks; None if it may."""
    if config.ranks == 1:
        return (
            "it starts the ranks of tensor_parallel_size or pipeline_parallel_size: give one of them, at "
            "least 2, or leave it out"
        )
    if launched_ranks() is not None:
        return "torchrun has started this process already: run the program without it"
    return why_not_divided(model, config)
