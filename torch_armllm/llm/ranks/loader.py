"""Loading of a model whose shards are on several processes: as ranks, as stages, or as both."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.executor_sizes import ExecutorSizes
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.engine.images.build import tried_media
from torch_armllm.engine.images.media_facts import MediaFacts
from torch_armllm.engine.images.reader import PictureReader, ReaderLimits
from torch_armllm.engine.images.sharded_images import leading_reader
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.kv_cache.disk.disk_cache import DiskPrefixCache
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.llm.loading.loader import LoadedEngine, load_processor
from torch_armllm.llm.plan_cache.tensor_files import weight_bytes
from torch_armllm.llm.ranks.agreement import check_shardable, why_not_shardable
from torch_armllm.llm.ranks.network import join_launched, launched_ranks
from torch_armllm.llm.ranks.processes import start_processes
from torch_armllm.llm.ranks.rank_shard import FollowerSettings, largest_share
from torch_armllm.llm.ranks.session import (
    LeadingSession,
    LoadedShard,
    closed_after_errors,
    load_shard,
    load_whole,
)
from torch_armllm.ops.untraced import call_at_end
from torch_armllm.parallel.placement import best_ranks, take_cpus_back, usable_nodes
from torch_armllm.system.extras import require_extra
from torch_armllm.system.files import format_bytes

RAY = "distributed_executor_backend = 'ray'"

logger = logging.getLogger(__name__)


class LedRanks:
    """The other processes, until an engine leads them; see `torch_armllm.engine.assembly.ranks.Ranks`."""

    def __init__(
        self,
        session: LeadingSession,
        loaded: LoadedShard,
        config: EngineConfig,
        pictures: PictureReader | str,
    ) -> None:
        place, shard = session.place, loaded.shard
        self.size, self.stages, self.link = place.size, place.stages, loaded.link
        self.whole_shape: Shape = shard.model.shape if place.stages == 1 else shard.whole_shape
        self.largest_share = largest_share(loaded.facts, self.whole_shape)
        self._session, self._state_dtype = session, config.state_dtype
        self.pictures = pictures

    def lead(self, sizes: ExecutorSizes) -> RankLeader:
        """Tells the other processes the sizes of their caches, and returns what sends them steps."""
        takes_pictures = not isinstance(self.pictures, str)
        return self._session.lead(FollowerSettings(sizes, self._state_dtype, takes_pictures))


def with_ranks(model: object, config: EngineConfig) -> EngineConfig:
    """Returns the settings with a number of ranks in place of ``auto``, and says it in the log."""
    take_cpus_back()
    if config.tensor_parallel_size != "auto":
        return config
    if launched_ranks() is not None or config.pipeline_parallel_size > 1:
        return replace(config, tensor_parallel_size=1)  # each process is to be an engine, or a stage
    nodes = len(usable_nodes())
    ranks = 1
    may_shard = not config.enable_lora  # ranks do not adapt experts
    if nodes > 1 and may_shard and isinstance(model, str) and why_not_shardable(model, config) is None:
        folder = Path(model).expanduser()
        ranks = best_ranks(weight_bytes(folder), _layers(folder), nodes) if folder.is_dir() else 1
        logger.info(
            "tensor_parallel_size: %d of %d NUMA nodes, as estimated for %s of weights",
            ranks,
            nodes,
            format_bytes(weight_bytes(folder)) if folder.is_dir() else "unknown sizes",
        )
    return replace(config, tensor_parallel_size=ranks)


def _layers(folder: Path) -> int:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return 0
    return int(config.get("num_hidden_layers") or config.get("text_config", {}).get("num_hidden_layers") or 0)


def check_backend(model: object, config: EngineConfig) -> None:
    """Checks that the backend can start the other processes of a sharded model.

    Raises:
        ImportError: Ray is not installed.
        ValueError: Ray cannot start them.
    """
    if config.distributed_executor_backend == "ray":
        require_extra("ray", "ray", RAY)
        if (reason := _why_not_on_ray(model, config)) is not None:
            raise ValueError(f"{RAY}: {reason}")


def load_on_ranks(request: ModelRequest, config: EngineConfig) -> LoadedEngine:
    """Loads a model in several processes, of which this one is the first; see `load_engine`.

    Raises:
        ValueError: a setting or the model does not allow it, or another process has failed.
    """
    check_shardable(request.model, config)
    tokenizer = None if request.skip_tokenizer_init else _tokenizer(request)
    session: LeadingSession
    if config.distributed_executor_backend == "ray":
        from torch_armllm.llm.ranks.ray_actors import settings_on_ray, start_actors  # an optional package

        request, config = settings_on_ray(request, config)
        session = start_actors(request, config)
    elif launched_ranks() is not None:
        session = join_launched(config)
    else:
        session = start_processes(request, config)
    return _lead(session, request, tokenizer, config)


def _lead(
    session: LeadingSession, request: ModelRequest, tokenizer: Any, config: EngineConfig
) -> LoadedEngine:
    """Loads the first shard of a model, and builds the engine that leads the other processes."""
    with closed_after_errors(session):
        kind = load_whole(session, request, config)
        limits = ReaderLimits.of(config)
        processor = load_processor(kind, request.source) if any(limits.items.values()) else None
        tried = tried_media(kind, processor, limits.items)
        media = tried if isinstance(tried, str) else tried.facts
        del tried  # its plan is the whole model's
        loaded = load_shard(session, kind, config, media)
        pictures = _reader(kind, processor, loaded, media, limits)
        del kind  # it holds the whole model
        shard = loaded.shard.model
        ranks = LedRanks(session, loaded, config, pictures)
        engine = build_engine(shard, tokenizer, config, ranks=ranks)
    call_at_end(engine, _end_ranks, engine.disk, session.close)
    return LoadedEngine(engine, shard, tokenizer)


def _end_ranks(disk: DiskPrefixCache | None, close: Callable[[], None]) -> None:
    """Ends the other processes, once the prefix cache on disk has what it asks them for."""
    if disk is not None:
        disk.end()
    close()


def _reader(
    kind: ModelKind, processor: Any, loaded: LoadedShard, media: MediaFacts | str, limits: ReaderLimits
) -> PictureReader | str:
    """Returns what reads images, videos and sounds, or the reason why the processes take none."""
    if (reason := next((each.text_only for each in loaded.facts if each.text_only), None)) is not None:
        return reason
    return leading_reader(kind, processor, media, loaded.shard.pictures, limits)


def _tokenizer(request: ModelRequest) -> Any:
    """Returns the tokenizer that is given, or loads it: the model's own if none is named."""
    from torch_armllm.checkpoint.load import load_tokenizer  # imports transformers

    given = request.tokenizer is not None and not isinstance(request.tokenizer, str)
    return request.tokenizer if given else load_tokenizer(request.tokenizer or request.source)


def _why_not_on_ray(model: object, config: EngineConfig) -> str | None:
    """Returns the reason why Ray cannot start ranks; None if it may."""
    if config.ranks == 1:
        return (
            "it starts the ranks of tensor_parallel_size or pipeline_parallel_size: give one of them, at "
            "least 2, or leave it out"
        )
    if launched_ranks() is not None:
        return "torchrun has started this process already: run the program without it"
    return why_not_shardable(model, config)
