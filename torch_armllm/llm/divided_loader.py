"""Loading of a model whose layers several processes share out: tensor parallelism."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_armllm import _version
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.engine.speculative.build import reads_hidden_states
from torch_armllm.llm.launched_ranks import LaunchedRanks, launched_ranks
from torch_armllm.llm.loader import LoadedEngine, load_patched
from torch_armllm.llm.plan_cache.tensor_files import weight_bytes
from torch_armllm.llm.rank_processes import RankProcesses
from torch_armllm.ops import variants
from torch_armllm.ops.collective import close_communicator, open_communicator
from torch_armllm.parallel.mailbox import Mailbox
from torch_armllm.parallel.placement import best_ranks, rank_cores, usable_nodes
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.parallel.shared_memory import BUFFER_BYTES
from torch_armllm.plan.plan_model import PlanModel
from torch_armllm.system.files import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from torch_armllm.quant.recipe import Recipe

logger = logging.getLogger(__name__)


@dataclass
class DividedModel:
    """A rank's part of a model.

    Attributes:
        model: with the rank's weights.
        fingerprint: equal on all ranks whose parts fit together.
    """

    model: PlanModel
    fingerprint: str


def described() -> str:
    """Returns what has to be the same on all ranks: the version, and the kernels."""
    return f"torch_armllm {_version.__version__}, kernels for {variants.machine().compiled}"


def divide(model: Any, kv_cache_dtype: str, communicator: int, rank: int, ranks: int) -> DividedModel:
    """Returns a rank's part of a patched model; all ranks call this at the same time."""
    from torch_armllm.patching.divided_model import divided_model  # imports transformers

    cache = None if kv_cache_dtype == "auto" else kv_cache_dtype
    part = divided_model(model, cache, RankGroup(rank, ranks, communicator))
    program = part.plan.program
    described = repr((part.name, program.opcodes, program.columns, program.dtype, part.vocab_size))
    return DividedModel(part, hashlib.sha256(described.encode()).hexdigest())


def with_ranks(model: str | PreTrainedModel, config: EngineConfig) -> EngineConfig:
    """Returns the settings with a number of ranks in place of ``auto``, and says it in the log."""
    _take_cpus_back()
    if config.tensor_parallel_size != "auto":
        return config
    if launched_ranks() is not None:  # each process may serve requests of its own
        return replace(config, tensor_parallel_size=1)
    nodes = len(usable_nodes())
    ranks = 1
    if nodes > 1 and isinstance(model, str) and _refusal(model, config) is None:
        folder = Path(model).expanduser()
        ranks = best_ranks(weight_bytes(folder), _layers(folder), nodes) if folder.is_dir() else 1
        logger.info(
            "tensor_parallel_size: %d of %d NUMA nodes, as estimated for %s of weights",
            *(ranks, nodes, format_bytes(weight_bytes(folder)) if folder.is_dir() else "unknown sizes"),
        )
    return replace(config, tensor_parallel_size=ranks)


_cpus_before: dict[frozenset[int], set[int]] = {}
"""CPUs of a thread before it became a rank 0, by those of this rank."""


def _place(cpus: list[int]) -> None:
    """Lets this thread, and those that it starts, run on the CPUs of rank 0 only."""
    _cpus_before.setdefault(frozenset(cpus), os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus)


def _take_cpus_back() -> None:
    """Lets this thread use all its CPUs again, so that the ranks of another engine share out all of them."""
    if _cpus_before and (before := _cpus_before.get(frozenset(os.sched_getaffinity(0)))) is not None:
        os.sched_setaffinity(0, before)


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
    from torch_armllm.checkpoint.load import load_tokenizer  # imports transformers

    ranks = config.ranks
    if (reason := _refusal(model, config)) is not None:
        raise ValueError(f"tensor_parallel_size = {ranks}: {reason}")
    assert isinstance(model, str)
    cores = [[cpu for core in part for cpu in core] for part in rank_cores(ranks)]
    own_tokenizer = None
    if not skip_tokenizer_init:
        given = tokenizer is not None and not isinstance(tokenizer, str)
        own_tokenizer = tokenizer if given else load_tokenizer(tokenizer or model)
    settings: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "quantization": quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "hf_overrides": hf_overrides,
    }
    if launched_ranks() is not None:
        return _load_launched(settings, own_tokenizer, progress, config)
    threads = {"threads": config.threads, "pin_threads": config.pin_threads}
    processes = RankProcesses(cores, settings | threads)
    try:
        _place(cores[0])
        logger.info("tensor parallel: rank 0 runs on CPUs %s, others on %s", cores[0], cores[1:])
        loaded = load_patched(**settings, progress=progress)
        _agree(described(), processes.receive())
        processes.send("build")
        communicator = open_communicator(processes.memory.exchanges, 0, ranks, BUFFER_BYTES)
        part = divide(loaded, config.kv_cache_dtype, communicator, 0, ranks)
        del loaded
        _agree(part.fingerprint, processes.receive())

        engine = build_engine(part.model, own_tokenizer, config, ranks=_WaitingRanks(processes, config))
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
    group = LaunchedRanks(config.ranks)
    group.agree(described())
    loaded = load_patched(**settings, progress=progress and group.rank == 0)
    part = divide(loaded, config.kv_cache_dtype, group.exchange.communicator, group.rank, group.size)
    del loaded
    group.agree(part.fingerprint)
    if group.rank > 0:
        group.run(part.model, config)
    engine = build_engine(part.model, tokenizer, config, ranks=_WaitingLaunched(group, config))
    weakref.finalize(engine, group.close)
    return LoadedEngine(engine, part.model, tokenizer)


class _WaitingLaunched:
    """Ranks that ``torchrun`` has started, until an engine leads them."""

    def __init__(self, group: LaunchedRanks, config: EngineConfig) -> None:
        self.size = group.size
        self._group, self._config = group, config

    def lead(self, sizes: dict[str, Any]) -> RankLeader:
        """See `torch_armllm.engine.build.Ranks`."""
        return self._group.leader(sizes | {"state_dtype": self._config.state_dtype})


class _WaitingRanks:
    """The other ranks, until an engine leads them."""

    def __init__(self, processes: RankProcesses, config: EngineConfig) -> None:
        self.size = config.ranks
        self._processes, self._config = processes, config

    def lead(self, sizes: dict[str, Any]) -> RankLeader:
        """See `torch_armllm.engine.build.Ranks`."""
        processes = self._processes
        processes.send(sizes | {"state_dtype": self._config.state_dtype})
        processes.watch()
        mailbox = Mailbox(processes.memory.mail, self.size, lambda: _check(processes))
        return RankLeader(mailbox, processes.failure, processes.fail, processes.on_failure)


def _check(processes: RankProcesses) -> None:
    reason = processes.failure()
    if reason is not None:
        raise RuntimeError(reason)


def _agree(own: str, others: list[str]) -> None:
    for rank, other in enumerate(others, start=1):
        if other != own:
            raise ValueError(f"tensor parallel rank {rank} has {other}, and rank 0 has {own}")


def _refusal(model: str | PreTrainedModel, config: EngineConfig) -> str | None:
    """Returns the reason why several ranks cannot serve a model; None if they may."""
    if not isinstance(model, str):
        return "each rank loads its part of the model itself: give the folder in place of a loaded model"
    if not hasattr(os, "memfd_create"):
        return "ranks share memory that only Linux has"
    if config.enable_lora:
        return "adapters are not shared out among ranks yet: leave enable_lora out"
    if config.prefix_cache_dir is not None:
        return "ranks have no prefix cache on disk yet: leave prefix_cache_dir out"
    if reads_hidden_states(config.speculative_config):
        return "draft layers are not shared out among ranks yet: draft with n-grams or a draft model"
    return None
