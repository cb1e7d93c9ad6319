"""Builds an engine for a model."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence as GenericSequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from torch_armllm.engine import diagnostics
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.disk.build import build_disk_cache
from torch_armllm.engine.execution.executor_sizes import ExecutorSizes
from torch_armllm.engine.execution.pipeline_runner import PipelineRunner, Stages
from torch_armllm.engine.execution.plan_runner import PlanRunner
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.engine.execution.step_features import StepFeatures
from torch_armllm.engine.execution.thread_team import ThreadTeam, choose_threads
from torch_armllm.engine.llm_engine import EngineFeatures, LLMEngine, Pipeline, Runner
from torch_armllm.engine.max_length import resolve_max_model_len
from torch_armllm.engine.memory_limit import left, memory_limit, with_bytes
from torch_armllm.engine.pictures.build import picture_reader
from torch_armllm.engine.pictures.reader import PictureReader
from torch_armllm.engine.preprocess import Preprocessor
from torch_armllm.engine.request import Sequence
from torch_armllm.engine.sampling.custom_processors import is_for_batches, load_processors
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.sampling.thinking_budget import find_reasoning
from torch_armllm.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from torch_armllm.engine.speculative.build import (
    Settings,
    build_speculative_decoder,
    drafter_needs,
    load_drafter,
    most_draft_tokens,
)
from torch_armllm.engine.speculative.draft_layer import DraftLayers
from torch_armllm.engine.text.detokenizer import TokenPieces
from torch_armllm.engine.text.stopping import OutputText, find_eos_token_ids
from torch_armllm.engine.trace import trace_to
from torch_armllm.hf.sizes import attention_sizes
from torch_armllm.kv_cache.block_manager import BlockManager
from torch_armllm.kv_cache.budget import KvMemory, size_kv_memory
from torch_armllm.kv_cache.dtypes import STATE_DTYPES
from torch_armllm.kv_cache.shapes import CacheShape, Shape, with_state_dtype
from torch_armllm.lora.adapter_table import AdapterTable
from torch_armllm.ops import variants
from torch_armllm.parallel.stage_link import StageLink
from torch_armllm.patching.patched_model import positions_of, servable_model
from torch_armllm.patching.state import why_not_captured
from torch_armllm.plan.expert_store import ExpertStore
from torch_armllm.plan.native import native_plan
from torch_armllm.plan.plan_model import PlanModel
from torch_armllm.plan.servable_model import ServableModel
from torch_armllm.system.host import cpu_name
from torch_armllm.system.logs import show_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class Ranks(Protocol):
    """Tensor parallel ranks, or stages of a pipeline, that wait for an engine.

    Attributes:
        size: number of ranks, this process included.
        stages: number of stages, each of as many ranks; 1: ranks compute every layer together.
        link: from the last stage and to the next one; None if there is one stage.
        whole_shape: shape of the cache that is sized: that of the whole model, or this rank's own if there is
            one stage.
        largest_share: largest part of that cache which a process keeps; its memory limits the size.
        pictures: reads prompts with pictures; or the reason why the processes take none.
    """

    size: int
    stages: int
    link: StageLink | None
    whole_shape: Shape
    largest_share: float
    pictures: PictureReader | str

    def lead(self, sizes: ExecutorSizes) -> RankLeader:
        """Tells the other ranks the sizes of their caches, and returns what sends them steps."""
        ...


def build_engine(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: EngineConfig | None = None,
    processor: Any = None,
    ranks: Ranks | None = None,
) -> LLMEngine:
    """Builds the engine of a patched model.

    Args:
        model: a causal language model that `torch_armllm.patch` was called on.
        tokenizer: its tokenizer; None: prompts and outputs are token ids.
        config: see `EngineConfig`.
        processor: the model's processor of pictures; None: prompts are texts.
        ranks: the others that share out the model's layers; None: this process computes all.

    Raises:
        ValueError: the model is not patched, or the settings do not fit it or the memory.
    """
    config = with_bytes(config or EngineConfig())
    processors = load_processors(config.logits_processors, config)
    config = _without_drafts(config, processors)
    show_messages()
    team = ThreadTeam(choose_threads(config.threads, config.pin_threads))
    team.settle()
    trace = trace_to(config.trace)
    if ranks is None:
        pictures = picture_reader(model, processor, config.most_pictures, config.max_num_batched_tokens)
    else:
        pictures = ranks.pictures
    servable = servable_model(model)
    runner: Runner
    pipeline: PipelineRunner | None = None
    if servable is None:
        name, vocab_size = type(model).__name__, int(model.get_input_embeddings().num_embeddings)
        max_model_len = resolve_max_model_len(config.max_model_len, *positions_of(model), None)
        shape: Shape | None = None
        if (attention := attention_sizes(model.config)) is not None:  # of transformers' own cache, at most
            heads = (attention.kv_heads, attention.head_size, attention.head_size)
            shape = CacheShape(attention.layers, *heads, model.dtype)
    else:
        name, vocab_size = servable.name, servable.vocab_size
        shape = with_state_dtype(servable.shape, STATE_DTYPES[config.state_dtype])
        positions = servable.position_limit, servable.stated_positions
        max_model_len = resolve_max_model_len(config.max_model_len, *positions, servable.max_length)
    if config.state_dtype != "float32" and (reason := _why_no_states(servable)):
        logger.warning("%s: state_dtype = %s has no effect, as %s", name, config.state_dtype, reason)
    adapters = _adapter_table(model, servable, config)
    drafter = None if servable is None else load_drafter(config.speculative_config, model, servable)
    memory = None
    limit, given = memory_limit(config), config.kv_cache_memory
    experts = _expert_store(servable)
    if shape is not None:
        size, part = (1, 1.0) if ranks is None else (ranks.size, ranks.largest_share)
        whole = shape
        if ranks is not None:
            whole = with_state_dtype(ranks.whole_shape, STATE_DTYPES[config.state_dtype])
        granted = given if given is None or limit is None else limit.kv_cache
        free = max(0, left(config) - (0 if experts is None else experts.counts().unfilled)) // size
        memory = size_kv_memory(
            whole,
            max_model_len,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            memory=granted if granted is None or granted <= 1 else int(granted / part),
            most=None if limit is None else int(limit.kv_cache / part),
            swap_space=0 if servable is None else int(config.swap_space / part),
            free=int(free / part),
            checkpoints=config.enable_prefix_caching,
            draft_tokens=most_draft_tokens(config.speculative_config),
            drafter=drafter_needs(config.speculative_config, drafter, config.max_num_seqs),
        )
        logger.info("%s: %s", name, memory)
        max_model_len = memory.max_model_len
    drawable = _drawable(vocab_size, tokenizer)
    if servable is None or memory is None:
        from torch_armllm.engine.execution.module_runner import ModuleRunner

        by_modules = runner = ModuleRunner(model, trace=trace, team=team)
        blocks = _counted_only(model, config, max_model_len, by_modules.block_size, memory)
    else:
        sizes = ExecutorSizes(
            memory.num_blocks,
            memory.swap_blocks,
            memory.state_slots + memory.spare_state_slots,
            memory.swap_state_slots,
            drawable,
        )
        features = StepFeatures(
            slots=None if adapters is None else adapters.slots,
            pictures=None if isinstance(pictures, str) else pictures.steps,
            kept_columns=drafter.kept_columns if isinstance(drafter, DraftLayers) else None,
        )
        own: dict[str, Any] = {"features": features, "shape": shape, "trace": trace, "team": team}
        leader = None if ranks is None else ranks.lead(sizes)
        if ranks is not None and ranks.link is not None and leader is not None:
            has_states, shares_logits = bool(sizes.state_slots), ranks.size > ranks.stages
            stages = Stages(ranks.stages, ranks.link, leader, has_states, shares_logits)
            runner = pipeline = PipelineRunner(servable, sizes, stages, **own)
        else:
            runner = PlanRunner(servable, sizes, leader=leader, **own)
        if adapters is not None:
            adapters.share_by(runner.share_adapter)
        if memory.state_slots and not memory.spare_state_slots:
            _check_spare_states(name, config)
        caching = config.enable_prefix_caching and (not memory.state_slots or memory.spare_state_slots > 0)
        blocks = BlockManager(
            memory.num_blocks,
            memory.block_size,
            memory.swap_blocks,
            caching,
            memory.state_slots,
            memory.swap_state_slots,
            memory.spare_state_slots,
        )
    logger.info("kernels for %s on %s; %s", variants.machine().compiled, cpu_name(), team.chosen)
    for advice in diagnostics.warnings(diagnostics.describe()):
        logger.warning("%s", advice)
    max_num_seqs = config.max_num_seqs
    if memory is not None and memory.state_slots:
        max_num_seqs = memory.state_slots
    limits = _limits(config, max_model_len, max_num_seqs, 1 if pipeline is None else pipeline.stages)
    scheduler = Scheduler(limits, blocks, config.scheduling_policy)
    ends = find_eos_token_ids(tokenizer, getattr(model, "generation_config", None))
    reasoning = find_reasoning(config.reasoning_config, tokenizer)
    sampler = Sampler(drawable, ends, tokenizer, reasoning, processors)
    preprocessor = Preprocessor(tokenizer, max_model_len, sampler.check, config.seed, pictures)

    pieces = None if tokenizer is None else (TokenPieces(tokenizer, False), TokenPieces(tokenizer, True))

    def begin_text(sequence: Sequence) -> OutputText:
        prompt = sequence.request.prompt_token_ids
        return OutputText(tokenizer, sequence.params, prompt, ends, max_model_len, pieces)

    speculative_decoder = None
    drafts = config.speculative_config
    has_plan = servable is not None and memory is not None
    if drafts is not None and has_plan and _drafts(drafts, runner, pipeline, blocks):
        assert memory is not None
        speculative_decoder = build_speculative_decoder(
            drafts,
            sampler,
            memory,
            drafter,
            config.max_num_batched_tokens,
            max_num_seqs,
            max_model_len,
        )
    disk = build_disk_cache(name, config, runner, blocks)
    if disk is not None:
        scheduler.call_on_leave(disk.leave)
    engine = LLMEngine(
        preprocessor,
        scheduler,
        runner,
        sampler,
        begin_text,
        EngineFeatures(
            speculative_decoder=speculative_decoder,
            log_stats=not config.disable_log_stats,
            trace=trace,
            experts=None if experts is None else experts.counts,
            disk=disk,
            adapters=adapters,
            pipeline=pipeline,
        ),
    )
    if disk is not None:
        weakref.finalize(engine, disk.close)
    return engine


def _without_drafts(config: EngineConfig, processors: GenericSequence[Any]) -> EngineConfig:
    """Returns settings without draft tokens if a logits processor sees the rows of a whole batch.

    Raises:
        ValueError: draft tokens are asked for.
    """
    whole = [type(each).__name__ for each in processors if is_for_batches(each)]
    if not whole or config.speculative_config is None:
        return config
    reason = (
        f"the logits processor {whole[0]} sees one row for each sequence of a batch, and draft tokens give a "
        "sequence several rows"
    )
    if config.speculative_config != "auto":
        raise ValueError(
            f"speculative_config is set, but {reason}: leave it out, or give a subclass of "
            "AdapterLogitsProcessor"
        )
    logger.info("no draft tokens: %s", reason)
    return replace(config, speculative_config=None)


def _adapter_table(model: Any, servable: ServableModel | None, config: EngineConfig) -> AdapterTable | None:
    """Returns the table of the adapters in the slots that a model's plan reads; None: there are to be none.

    Raises:
        ValueError: the model has no slots, or no native plan that reads them; or it has slots, which are
            another engine's.
    """
    plan = None if servable is None else native_plan(servable.plan)
    if not config.enable_lora:
        if plan is not None and "lora" in plan.opcodes:
            raise ValueError(
                "this model's layers have slots for the adapters of another engine: set enable_lora=True, or "
                "load the model once more"
            )
        return None
    if plan is None:
        found = None if servable is None else servable.plan
        why = f"its graph runs node by node: {getattr(found, 'why_not_native', '')}"
        reason = why_not_captured(model) or why
        raise ValueError(f"enable_lora needs a native plan, and {type(model).__name__} has none: {reason}")
    from torch_armllm.lora.read_slots import slots_read_by  # imports modules that others do not need

    constants = plan.program.constants
    slots = model.slots if isinstance(model, PlanModel) else slots_read_by(model, constants)
    if slots is None:
        raise ValueError(
            "enable_lora needs slots for adapters, and this model was patched without: load it with "
            "LLM(folder, enable_lora=True)"
        )
    return AdapterTable(slots, config.max_lora_rank)


def _expert_store(servable: ServableModel | None) -> ExpertStore | None:
    """Returns the store of a plan's experts that are on disk."""
    plan = None if servable is None else native_plan(servable.plan)
    return None if plan is None else plan.experts


def _drafts(settings: Settings, runner: Runner, pipeline: Pipeline | None, blocks: BlockManager) -> bool:
    """Returns False where ``auto`` does not draft.

    It does not in a pipeline, whose steps overlap, so that their times do not tell what draft tokens cost,
    and where no slot is spare for states.
    """
    if settings != "auto":
        return True
    if pipeline is not None:
        return False
    no_room = blocks.states is not None and not blocks.states.spare
    return not no_room and runner.rows_are_exact()


def _why_no_states(servable: ServableModel | None) -> str | None:
    """Returns the reason why a model has no states that ``state_dtype`` is about; None if it has some."""
    if servable is None:
        return "the model has no plan, and its own modules keep its states"
    if not servable.shape.states:
        return "it has no recurrent layers"
    if servable.shape.states.accumulated_dtype is None:
        return "its recurrent layers are convolutions, which keep inputs in the model's dtype"
    return None


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


def _limits(config: EngineConfig, max_model_len: int, max_num_seqs: int, stages: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_chunked_prefill=config.enable_chunked_prefill,
        preemption="swap" if config.swap_space else "recompute",
        max_step_time=config.max_step_time,
        pipeline_stages=stages,
    )


def _counted_only(
    model: Any, config: EngineConfig, max_model_len: int, block_size: int, memory: KvMemory | None
) -> BlockManager:
    """Block manager of a model without a plan.

    The model's own caches hold its state; the blocks only count how many positions are in use.
    """
    logger.warning(
        "%s has no plan (%s): its sequences run one at a time through the model's own forward, without "
        "prefix caching, swapping or speculative decoding",
        type(model).__name__,
        why_not_captured(model),
    )
    max_blocks = config.max_num_seqs * -(-max_model_len // block_size)
    blocks = max_blocks if memory is None else memory.num_blocks
    return BlockManager(blocks, block_size, enable_prefix_caching=False)


def _drawable(vocab_size: int, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Returns the number of token ids that may be sampled: those of both the model and the tokenizer."""
    return vocab_size if tokenizer is None else min(vocab_size, max(tokenizer.get_vocab().values()) + 1)
