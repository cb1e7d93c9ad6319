"""The runner of an engine's steps, and the blocks of its cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_armllm.engine.assembly.machine import Machine
from torch_armllm.engine.assembly.model_facts import ModelFacts
from torch_armllm.engine.assembly.ranks import Ranks
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.executor_sizes import ExecutorSizes
from torch_armllm.engine.execution.plan_runner import PlanRunner
from torch_armllm.engine.execution.stage_course import LinkedStage
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.engine.execution.step_feature import StepFeature
from torch_armllm.engine.llm_engine import Runner
from torch_armllm.engine.speculative.build import Drafter
from torch_armllm.kv_cache.block_manager import BlockManager
from torch_armllm.kv_cache.budget import KvMemory
from torch_armllm.lora.adapter_table import AdapterTable
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.patching.state import why_not_captured

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Computing:
    """The runner of an engine's steps, and the memory that it computes them on.

    Attributes:
        facts: of the model.
        runner: computes the steps.
        blocks: of the cache, on which it computes them.
        memory: of the caches of a model with a plan; None: it has no plan.
        adapters: that requests may use; None: they may use none.
        drafter: has a cache of its own; None: there is none.
    """

    facts: ModelFacts
    runner: Runner
    blocks: BlockManager
    memory: KvMemory | None = None
    adapters: AdapterTable | None = None
    drafter: Drafter | None = None

    @property
    def most_sequences(self) -> int:
        """Number of sequences whose states fit; 0 without recurrent layers."""
        return 0 if self.memory is None else self.memory.state_slots


def by_plan(
    facts: ModelFacts,
    memory: KvMemory,
    config: EngineConfig,
    machine: Machine,
    features: Sequence[StepFeature],
    ranks: Ranks | None,
) -> Computing:
    """Returns what computes by the plan of a model, and leads the other processes.

    Args:
        facts: of the model, or of the part of it that this process computes.
        memory: of the caches.
        config: of the engine.
        machine: threads and trace.
        features: of steps, beside tokens.
        ranks: the other processes; None: there are none.

    Raises:
        ValueError: the memory has no room for what the settings ask for.
    """
    assert facts.servable is not None
    sizes = _executor_sizes(memory, facts.drawable)
    leader = stage = None
    if ranks is not None:
        leader = ranks.lead(sizes)
        if ranks.link is not None:
            stage = LinkedStage(RankPlace(0, ranks.size // ranks.stages, ranks.stages), ranks.link)
    at_work = machine.team.at_work()
    executor = StepExecutor(facts.servable, sizes, features, facts.shape, machine.trace, at_work, stage)
    return Computing(facts, PlanRunner(executor, leader), _plan_blocks(facts.name, config, memory), memory)


def by_modules(
    model: Any, facts: ModelFacts, memory: KvMemory | None, config: EngineConfig, machine: Machine
) -> Computing:
    """Returns what computes by the model's own forward.

    The model's own caches hold its state; the blocks only count how many positions are in use.
    """
    from torch_armllm.engine.execution.module_runner import ModuleRunner  # imports transformers

    runner = ModuleRunner(model, trace=machine.trace, team=machine.team)
    logger.warning(
        "%s has no plan (%s): its sequences run one at a time through the model's own forward, without "
        "prefix caching, swapping or speculative decoding",
        facts.name,
        why_not_captured(model),
    )
    most = config.max_num_seqs * -(-facts.max_model_len // runner.block_size)
    blocks = most if memory is None else memory.num_blocks
    return Computing(facts, runner, BlockManager(blocks, runner.block_size, enable_prefix_caching=False))


def _executor_sizes(memory: KvMemory, drawable: int) -> ExecutorSizes:
    return ExecutorSizes(
        memory.num_blocks,
        memory.swap_blocks,
        memory.state_slots + memory.spare_state_slots,
        memory.swap_state_slots,
        drawable,
    )


def _plan_blocks(name: str, config: EngineConfig, memory: KvMemory) -> BlockManager:
    if memory.state_slots and not memory.spare_state_slots:
        _check_spare_states(name, config)
    caching = config.enable_prefix_caching and (not memory.state_slots or memory.spare_state_slots > 0)
    return BlockManager(
        memory.num_blocks,
        memory.block_size,
        memory.swap_blocks,
        caching,
        memory.state_slots,
        memory.swap_state_slots,
        memory.spare_state_slots,
    )


def _check_spare_states(name: str, config: EngineConfig) -> None:
    """Says what the engine cannot do with memory for one sequence's states.

    Raises:
        ValueError: speculative decoding is asked for.
    """
    if config.speculative_config not in (None, "auto"):
        raise ValueError(
            f"{name} has recurrent layers, and speculative decoding keeps their states before each draft "
            "token, for which kv_cache_memory has no room: raise it, or leave speculative_config out"
        )
    if config.enable_prefix_caching:
        logger.warning(
            "%s has recurrent layers, and kv_cache_memory has no room for checkpoints of their states: "
            "prompts do not share computed prefixes",
            name,
        )
