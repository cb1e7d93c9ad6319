"""Builds an engine for a model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch_armllm.engine.assembly.adapters import adapter_table, share_adapters
from torch_armllm.engine.assembly.computing import Computing, by_modules, by_plan
from torch_armllm.engine.assembly.drafts import speculative_decoder, without_drafts
from torch_armllm.engine.assembly.machine import Machine, machine_of
from torch_armllm.engine.assembly.memory import engine_memory
from torch_armllm.engine.assembly.model_facts import model_facts
from torch_armllm.engine.assembly.ranks import Ranks
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.disk.build import build_disk_cache
from torch_armllm.engine.execution.step_features import step_features
from torch_armllm.engine.images.build import picture_reader
from torch_armllm.engine.images.reader import PictureReader, ReaderLimits
from torch_armllm.engine.llm_engine import EngineFeatures, LLMEngine
from torch_armllm.engine.sampling.custom_processors import load_processors
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.sampling.thinking_budget import find_reasoning
from torch_armllm.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from torch_armllm.engine.settings.memory_limit import with_bytes
from torch_armllm.engine.speculative.build import load_drafter
from torch_armllm.engine.text.preprocess import Preprocessor
from torch_armllm.engine.text.stopping import find_eos_token_ids, output_texts
from torch_armllm.ops.untraced import call_at_end
from torch_armllm.system.logs import show_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        ranks: the others, which compute other shards of the model; None: this process computes all.

    Raises:
        ValueError: the model is not patched, or the settings do not fit it or the memory.
    """
    config = with_bytes(config or EngineConfig())
    processors = load_processors(config.logits_processors, config)
    config = without_drafts(config, processors)
    show_messages()
    machine = machine_of(config)
    pictures = _pictures(model, processor, config) if ranks is None else ranks.pictures
    computing = _computing(model, tokenizer, config, machine, pictures, ranks)
    machine.log()
    max_model_len = computing.facts.max_model_len
    ends = find_eos_token_ids(tokenizer, getattr(model, "generation_config", None))
    reasoning = find_reasoning(config.reasoning_config, tokenizer)
    sampler = Sampler(computing.facts.drawable, ends, tokenizer, reasoning, processors)
    engine = LLMEngine(
        Preprocessor(tokenizer, max_model_len, sampler.check, config.seed, pictures),
        Scheduler(_limits(config, computing), computing.blocks, config.scheduling_policy),
        computing.runner,
        sampler,
        output_texts(tokenizer, ends, max_model_len),
        _features(config, machine, computing, sampler),
    )
    if (disk := engine.disk) is not None:
        engine.scheduler.call_on_leave(disk.leave)
        call_at_end(engine, disk.close)
    return engine


def _pictures(model: Any, processor: Any, config: EngineConfig) -> PictureReader | str:
    return picture_reader(model, processor, ReaderLimits.of(config))


def _computing(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    config: EngineConfig,
    machine: Machine,
    pictures: PictureReader | str,
    ranks: Ranks | None,
) -> Computing:
    """Returns what computes the steps, in the memory that the settings grant."""
    facts = model_facts(model, tokenizer, config)
    adapters = adapter_table(model, facts.servable, config)
    drafter = load_drafter(config.speculative_config, model, facts.servable)
    memory = engine_memory(facts, config, ranks, drafter)
    if memory is not None:
        facts = replace(facts, max_model_len=memory.max_model_len)
    if facts.servable is None or memory is None:
        return by_modules(model, facts, memory, config, machine)
    features = step_features(
        None if isinstance(pictures, str) else pictures.steps,
        None if adapters is None else adapters.slots,
        None if drafter is None else drafter.kept_columns,
    )
    computing = by_plan(facts, memory, config, machine, features, ranks)
    if adapters is not None:
        share_adapters(adapters, computing.runner)
    return replace(computing, adapters=adapters, drafter=drafter)


def _features(
    config: EngineConfig, machine: Machine, computing: Computing, sampler: Sampler
) -> EngineFeatures:
    """Returns the parts of the engine that not every one has."""
    facts = computing.facts
    return EngineFeatures(
        speculative_decoder=speculative_decoder(config, computing, sampler),
        log_stats=not config.disable_log_stats,
        trace=machine.trace,
        experts=None if facts.experts is None else facts.experts.counts,
        disk=build_disk_cache(facts.name, config, computing.runner, computing.blocks),
        adapters=computing.adapters,
    )


def _limits(config: EngineConfig, computing: Computing) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=computing.most_sequences or config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=computing.facts.max_model_len,
        enable_chunked_prefill=config.enable_chunked_prefill,
        preemption="swap" if config.swap_space else "recompute",
        max_step_time=config.max_step_time,
        pipeline_stages=computing.runner.stages,
    )
