"""Loading of a model whose layers several processes share out: tensor parallelism."""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.llm.launched_ranks import LaunchedRanks, launched_ranks
from torch_armllm.llm.loader import LoadedEngine, load_patched
from torch_armllm.llm.plan_cache.tensor_files import weight_bytes
from torch_armllm.llm.rank_processes import RankProcesses
from torch_armllm.llm.rank_start import (
    agree,
    described,
    model_settings,
    place,
    rank_cpus,
    take_cpus_back,
    tokenizer_for,
    why_not_divided,
)
from torch_armllm.ops.collective import close_communicator, open_communicator
from torch_armllm.parallel.placement import best_ranks, usable_nodes
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.parallel.shared_memory import BUFFER_BYTES
from torch_armllm.parallel.stage_link import StageLink
from torch_armllm.plan.plan_model import PlanModel
from torch_armllm.system.files import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from torch_armllm.quant.recipe import Recipe

logger = logging.getLogger(__name__)


class DividedRanks:
    """The other ranks, until an engine leads them; see `torch_armllm.engine.build.Ranks`."""

    stages = 1
    link: StageLink | None = None
    whole_shape: Shape | None = None
    largest_share = 1.0

    def __init__(self, others: RankProcesses | LaunchedRanks, size: int, config: EngineConfig) -> None:
        self.size = size
        self._others, self._state_dtype = others, config.state_dtype

    def lead(self, sizes: dict[str, Any]) -> RankLeader:
        """Gives the other ranks the sizes of their caches, and returns what sends them steps."""
        return self._others.leader(sizes | {"state_dtype": self._state_dtype})


@dataclass
class DividedModel:
    """A rank's part of a model.

    Attributes:
        model: with the rank's weights.
        fingerprint: equal on all ranks whose parts fit together.
    """

    model: PlanModel
    fingerprint: str


def divide(
    model: Any, kv_cache_dtype: str, communicator: int, rank: int, ranks: int, whole_experts: bool
) -> DividedModel:
    """Returns a rank's part of a patched model; all ranks call this at the same time."""
    from torch_armllm.patching.divided_model import divided_model  # imports transformers

    cache = None if kv_cache_dtype == "auto" else kv_cache_dtype
    part = divided_model(model, cache, RankGroup(rank, ranks, communicator, whole_experts=whole_experts))
    program = part.plan.program
    described = repr((part.name, program.opcodes, program.columns, program.dtype, part.vocab_size))
    return DividedModel(part, hashlib.sha256(described.encode()).hexdigest())


def with_ranks(model: str | PreTrainedModel, config: EngineConfig) -> EngineConfig:
    """Returns the settings with a number of ranks in place of ``auto``, and says it in the log."""
    take_cpus_back()
    if config.tensor_parallel_size != "auto" or config.pipeline_parallel_size > 1:
        return config
    if launched_ranks() is not None:  # each process may serve requests of its own
        return replace(config, tensor_parallel_size=1)
    nodes = len(usable_nodes())
    ranks = 1
    if nodes > 1 and isinstance(model, str) and why_not_divided(model, config) is None:
        folder = Path(model).expanduser()
        ranks = best_ranks(weight_bytes(folder), _layers(folder), nodes) if folder.is_dir() else 1
        logger.info(
            "tensor_parallel_size: %d of %d NUMA nodes, as estimated for %s of weights",
            *(ranks, nodes, format_bytes(weight_bytes(folder)) if folder.is_dir() else "unknown sizes"),
        )
    return replace(config, tensor_parallel_size=ranks)


def _layers(folder: Path) -> int:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return 0
    return int(config.get("num_hidden_layers") or config.get("text_config", {}).get("num_hidden_layers") or 0)


def load_divided_engine(
    model: str | PreTrainedModel,
    tokenizer: str | PreTrainedTokenizerBase | None,
    *,
    dtype: str | torch.dtype,
    quantization: str | Recipe | None,
    skip_tokenizer_init: bool,
    progress: bool,
    config: EngineConfig,
    hf_overrides: Mapping[str, Any] | None = None,
) -> LoadedEngine:
    """Loads a model on several ranks, of which this process is the first; see `load_engine`.

    Raises:
        ValueError: a setting or the model does not allow it, or a rank has failed.
    """
    ranks = config.ranks
    if (reason := why_not_divided(model, config)) is not None:
        raise ValueError(f"tensor_parallel_size = {ranks}: {reason}")
    assert isinstance(model, str)
    cores = rank_cpus(ranks)
    own_tokenizer = None if skip_tokenizer_init else tokenizer_for(model, tokenizer)
    settings = model_settings(model, config, dtype, quantization, hf_overrides)
    if launched_ranks() is not None:
        return _load_launched(settings, own_tokenizer, progress, config)
    threads = {"threads": config.threads, "pin_threads": config.pin_threads}
    threads |= {"whole_experts": config.enable_expert_parallel}
    processes = RankProcesses(cores, settings | threads)
    try:
        place(cores[0])
        logger.info("tensor parallel: rank 0 runs on CPUs %s, others on %s", cores[0], cores[1:])
        loaded = load_patched(**settings, progress=progress)
        agree(described(), processes.receive())
        processes.send("build")
        communicator = open_communicator(processes.memory.exchanges, 0, ranks, BUFFER_BYTES)
        part = divide(loaded, config.kv_cache_dtype, communicator, 0, ranks, config.enable_expert_parallel)
        del loaded
        agree(part.fingerprint, processes.receive())

        engine = build_engine(part.model, own_tokenizer, config, ranks=DividedRanks(processes, ranks, config))
    except BaseException as error:
        reason = processes.failure()
        processes.close()
        if reason is not None and isinstance(error, RuntimeError):
            raise ValueError(reason) from error
        raise
    weakref.finalize(engine, _close, processes, communicator)
    return LoadedEngine(engine, part.model, own_tokenizer)


def _close(processes: RankProcesses, communicator: int) -> None:
    """Ends the other ranks; the memory that they shared goes with the last plan that reads it."""
    processes.close()
    close_communicator(communicator)


def _load_launched(
    settings: dict[str, Any], tokenizer: Any, progress: bool, config: EngineConfig
) -> LoadedEngine:
    """Loads this rank's part, of ranks that ``torchrun`` has started; returns on rank 0 only."""
    group = LaunchedRanks(config.ranks, "tensor_parallel_size")
    group.agree(described())
    loaded = load_patched(**settings, progress=progress and group.rank == 0)
    place = group.open_exchange(), group.rank, group.size
    part = divide(loaded, config.kv_cache_dtype, *place, config.enable_expert_parallel)
    del loaded
    group.agree(part.fingerprint)
    if group.rank > 0:
        group.run(part.model, config, StepExecutor)
    engine = build_engine(part.model, tokenizer, config, ranks=DividedRanks(group, group.size, config))
    weakref.finalize(engine, group.close)
    return LoadedEngine(engine, part.model, tokenizer)
