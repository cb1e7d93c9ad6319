"""Loading of a model whose layers several processes compute one after another: pipeline parallelism."""

from __future__ import annotations

import functools
import hashlib
import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.engine.execution.stage_executor import StageExecutor
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.llm.launched_ranks import LaunchedRanks, launched_ranks
from torch_armllm.llm.loader import LoadedEngine, load_patched
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
from torch_armllm.parallel.stage_link import StageLink, ring
from torch_armllm.plan.plan_model import PlanModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from torch_armllm.quant.recipe import Recipe

STAGE_SECONDS = 300.0
"""Time after which a stage that does not answer is an error."""

logger = logging.getLogger(__name__)


class StageFacts(NamedTuple):
    """Facts of a stage that the first one compares and adds up."""

    fingerprint: str
    bytes_per_token: int
    state_bytes: int


@dataclass
class StageOfModel:
    """A stage's layers.

    Attributes:
        model: the layers.
        whole_shape: shape of the cache of all stages.
        facts: for the first stage.
    """

    model: PlanModel
    whole_shape: Shape
    facts: StageFacts


def stage_of(model: Any, kv_cache_dtype: str, number: int, count: int) -> StageOfModel:
    """Returns a stage's layers of a patched model."""
    from torch_armllm.patching.staged_model import staged_model  # imports transformers

    cache = None if kv_cache_dtype == "auto" else kv_cache_dtype
    staged = staged_model(model, cache, number, count)
    shape = staged.model.shape
    fingerprint = hashlib.sha256(staged.description.encode()).hexdigest()
    facts = StageFacts(fingerprint, shape.bytes_per_token, shape.states.bytes_per_sequence)
    return StageOfModel(staged.model, staged.whole_shape, facts)


def load_staged_engine(
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
    """Loads a model in several stages, of which this process is the first; see `load_engine`.

    Raises:
        ValueError: a setting or the model does not allow it, or a stage has failed.
    """
    stages = config.pipeline_parallel_size
    if (reason := _refusal(model, config)) is not None:
        raise ValueError(f"pipeline_parallel_size = {stages}: {reason}")
    assert isinstance(model, str)
    take_cpus_back()
    own_tokenizer = None if skip_tokenizer_init else tokenizer_for(model, tokenizer)
    settings = model_settings(model, config, dtype, quantization, hf_overrides)
    if launched_ranks() is not None:
        return _load_launched(settings, own_tokenizer, progress, config)
    cores = rank_cpus(stages)
    sockets = ring(stages)
    threads = {"threads": config.threads, "pin_threads": config.pin_threads}
    links = [[each.fileno() for each in pair] for pair in sockets]
    processes = RankProcesses(cores, settings | threads, links)
    for pair in sockets[1:]:  # once their process has ended, a connection is to end too
        for each in pair:
            each.close()
    link = StageLink(*sockets[0], STAGE_SECONDS)
    try:
        place(cores[0])
        logger.info("pipeline: stage 0 runs on CPUs %s, others on %s", cores[0], cores[1:])
        loaded = load_patched(**settings, progress=progress)
        agree(described(), processes.receive())
        processes.send("build")
        stage = stage_of(loaded, config.kv_cache_dtype, 0, stages)
        del loaded
        facts = [stage.facts, *processes.receive()]
        waiting = StagedRanks(stage, facts, link, processes, config)
        engine = build_engine(stage.model, own_tokenizer, config, ranks=waiting)
    except BaseException as error:
        reason = processes.failure()
        processes.close()
        link.close()
        if reason is not None and isinstance(error, RuntimeError):
            raise ValueError(reason) from error
        raise
    weakref.finalize(engine, _close, processes, link)
    return LoadedEngine(engine, stage.model, own_tokenizer)


def _close(processes: RankProcesses, link: StageLink) -> None:
    processes.close()
    link.close()


def _load_launched(
    settings: dict[str, Any], tokenizer: Any, progress: bool, config: EngineConfig
) -> LoadedEngine:
    """Loads this process's stage, of those that ``torchrun`` has started; returns on the first one only."""
    group = LaunchedRanks(config.pipeline_parallel_size, "pipeline_parallel_size")
    group.agree(described())
    loaded = load_patched(**settings, progress=progress and group.rank == 0)
    stage = stage_of(loaded, config.kv_cache_dtype, group.rank, group.size)
    del loaded
    facts = group.gather(stage.facts)
    link = group.open_link()
    if group.rank > 0:
        is_last = group.rank == group.size - 1
        group.run(stage.model, config, functools.partial(StageExecutor, link=link, is_last=is_last))
    engine = build_engine(
        stage.model, tokenizer, config, ranks=StagedRanks(stage, facts, link, group, config)
    )
    weakref.finalize(engine, group.close)
    return LoadedEngine(engine, stage.model, tokenizer)


class StagedRanks:
    """The other stages, until an engine leads them; see `torch_armllm.engine.build.Ranks`."""

    def __init__(
        self,
        stage: StageOfModel,
        facts: list[StageFacts],
        link: StageLink,
        others: RankProcesses | LaunchedRanks,
        config: EngineConfig,
    ) -> None:
        agree(facts[0].fingerprint, [each.fingerprint for each in facts[1:]])
        self.size = self.stages = len(facts)
        self.link: StageLink | None = link
        self.whole_shape: Shape | None = stage.whole_shape
        amounts = [[each.bytes_per_token for each in facts], [each.state_bytes for each in facts]]
        self.largest_share = max(max(each) / sum(each) for each in amounts if sum(each))
        self._others, self._state_dtype = others, config.state_dtype

    def lead(self, sizes: dict[str, Any]) -> RankLeader:
        """Gives the other stages the sizes of their caches, and returns what sends them steps."""
        return self._others.leader(sizes | {"state_dtype": self._state_dtype})


def _refusal(model: str | PreTrainedModel, config: EngineConfig) -> str | None:
    """Returns the reason why several stages cannot serve a model; None if they may."""
    if config.tensor_parallel_size not in ("auto", 1):
        return "stages are single processes: leave tensor_parallel_size out"
    if config.speculative_config not in ("auto", None):
        return "stages do not verify draft tokens yet: leave speculative_config out"
    return why_not_divided(model, config)
