"""Loading of a model that several processes share out: as ranks, as stages, or as both."""

from __future__ import annotations

import json
import logging
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.executor_sizes import ExecutorSizes
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.engine.execution.stage_course import Stage
from torch_armllm.engine.pictures.parts import leading_reader
from torch_armllm.engine.pictures.reader import PictureReader
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.llm.launched_ranks import LaunchedRanks, launched_ranks
from torch_armllm.llm.loader import LoadedEngine, adapter_slots_of, load_patched, load_processor
from torch_armllm.llm.plan_cache.tensor_files import weight_bytes
from torch_armllm.llm.rank_part import (
    FollowerSettings,
    PartFacts,
    RankPart,
    compare,
    largest_share,
    rank_part,
)
from torch_armllm.llm.rank_processes import RankProcesses
from torch_armllm.llm.rank_start import (
    agree,
    described,
    end_ranks,
    for_follower,
    place_on,
    rank_cpus,
    take_cpus_back,
    tokenizer_for,
    why_not_divided,
)
from torch_armllm.ops.collective import close_communicator
from torch_armllm.parallel.placement import best_ranks, usable_nodes
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.parallel.stage_link import StageLink, rings
from torch_armllm.plan.plan_model import PlanModel
from torch_armllm.system.files import format_bytes

logger = logging.getLogger(__name__)


class DividedRanks:
    """The other processes, until an engine leads them; see `torch_armllm.engine.assembly.ranks.Ranks`."""

    def __init__(
        self,
        others: RankProcesses | LaunchedRanks,
        place: RankPlace,
        part: RankPart,
        facts: list[PartFacts],
        link: StageLink | None,
        config: EngineConfig,
        pictures: PictureReader | str,
    ) -> None:
        self.size, self.stages, self.link = place.size, place.stages, link
        self.whole_shape: Shape = part.model.shape if place.stages == 1 else part.whole_shape
        self.largest_share = largest_share(facts, self.whole_shape)
        self._others, self._state_dtype = others, config.state_dtype
        self.pictures = pictures

    def lead(self, sizes: ExecutorSizes) -> RankLeader:
        """Tells the other processes the sizes of their caches, and returns what sends them steps."""
        takes_pictures = not isinstance(self.pictures, str)
        return self._others.leader(FollowerSettings(sizes, self._state_dtype, takes_pictures))


def with_ranks(model: object, config: EngineConfig) -> EngineConfig:
    """Returns the settings with a number of ranks in place of ``auto``, and says it in the log."""
    take_cpus_back()
    if config.tensor_parallel_size != "auto":
        return config
    if launched_ranks() is not None or config.pipeline_parallel_size > 1:
        return replace(config, tensor_parallel_size=1)  # each process is to be an engine, or a stage
    nodes = len(usable_nodes())
    ranks = 1
    may_divide = not config.enable_lora  # ranks do not adapt experts
    if nodes > 1 and may_divide and isinstance(model, str) and why_not_divided(model, config) is None:
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


def load_divided_engine(request: ModelRequest, config: EngineConfig) -> LoadedEngine:
    """Loads a model in several processes, of which this one is the first; see `load_engine`.

    Raises:
        ValueError: a setting or the model does not allow it, or another process has failed.
    """
    if (reason := why_not_divided(request.model, config)) is not None:
        pipeline = config.pipeline_parallel_size > 1
        name = "pipeline_parallel_size" if pipeline else "tensor_parallel_size"
        raise ValueError(f"{name} = {getattr(config, name)}: {reason}")
    tokenizer = None if request.skip_tokenizer_init else tokenizer_for(request)
    load = _load_launched if launched_ranks() is not None else _load_with_processes
    part, engine = load(request, tokenizer, config)
    return LoadedEngine(engine, part, tokenizer)


def _load_with_processes(
    request: ModelRequest, tokenizer: Any, config: EngineConfig
) -> tuple[PlanModel, Any]:
    """Starts a process for each part but the first, loads that one, and builds the engine of all."""
    place = RankPlace(0, config.tensor_ranks, config.pipeline_parallel_size)
    cores = rank_cpus(place.size)
    sockets = rings(place.tensor_ranks, place.stages) if place.stages > 1 else []
    links = [[each.fileno() for each in pair] for pair in sockets]
    processes = RankProcesses(cores, place, for_follower(request, config), links)
    for pair in sockets[1:]:  # once their process has ended, a connection is to end too
        for each in pair:
            each.close()
    group = processes.memory.group(place, config.enable_expert_parallel)
    link = StageLink(*sockets[0], group=group) if sockets else None

    def close() -> None:
        processes.close()
        if link is not None:
            link.close()
        if group is not None:
            close_communicator(group.communicator)  # its memory goes with the last plan that reads it

    try:
        place_on(cores[0])
        logger.info("%s runs on CPUs %s, others on %s", place, cores[0], cores[1:])
        loaded = load_patched(request, config.kv_cache_dtype, adapter_slots_of(config))
        agree([described(), *processes.receive()])
        processes.send("build")
        part = rank_part(loaded, config.kv_cache_dtype, place, group)
        facts = [part.facts, *processes.receive()]
        compare(facts, place.tensor_ranks)
        pictures = _reader(loaded, request.source, part, facts, config)
        del loaded
        ranks = DividedRanks(processes, place, part, facts, link, config, pictures)
        engine = build_engine(part.model, tokenizer, config, ranks=ranks)
    except BaseException as error:
        reason = processes.failure()
        close()
        if reason is not None and isinstance(error, RuntimeError):
            raise ValueError(reason) from error
        raise
    weakref.finalize(engine, end_ranks, engine.disk, close)
    return part.model, engine


def _reader(
    model: Any, source: str, part: RankPart, facts: list[PartFacts], config: EngineConfig
) -> PictureReader | str:
    """Returns what reads pictures in the first process, or the reason why the processes take none."""
    if (reason := next((each.text_only for each in facts if each.text_only), None)) is not None:
        return reason
    processor = load_processor(model, source) if config.most_pictures else None
    limits = config.most_pictures, config.max_num_batched_tokens
    return leading_reader(model, part.pictures, processor, *limits)


def _load_launched(request: ModelRequest, tokenizer: Any, config: EngineConfig) -> tuple[PlanModel, Any]:
    """Loads this process's part, of those that ``torchrun`` has started; returns on the first one only."""
    others = LaunchedRanks(config.tensor_ranks, config.pipeline_parallel_size)
    place = others.place
    agree(others.gather(described()))
    request = replace(request, progress=request.progress and place.rank == 0)
    loaded = load_patched(request, config.kv_cache_dtype, adapter_slots_of(config))
    group = others.open_group(config.enable_expert_parallel)
    part = rank_part(loaded, config.kv_cache_dtype, place, group)
    facts = others.gather(part.facts)
    compare(facts, place.tensor_ranks)
    link = others.open_link(group) if place.stages > 1 else None
    if place.rank > 0:
        del loaded
        others.run(part, config, None if link is None else Stage(place, link))
    pictures = _reader(loaded, request.source, part, facts, config)
    del loaded
    ranks = DividedRanks(others, place, part, facts, link, config, pictures)
    engine = build_engine(part.model, tokenizer, config, ranks=ranks)
    weakref.finalize(engine, end_ranks, engine.disk, others.close)
    return part.model, engine
