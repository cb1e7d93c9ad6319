"""Loading of engines from the plan cache, without their models."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.settings.memory_limit import (
    MemoryLimit,
    MemoryLimitError,
    chosen,
    left,
    memory_limit,
    with_bytes,
)
from torch_armllm.engine.speculative.build import reads_hidden_states
from torch_armllm.llm.loading.loader import LoadedEngine
from torch_armllm.llm.plan_cache.cache import lookup, store
from torch_armllm.llm.plan_cache.key import PlanKey, plan_key
from torch_armllm.llm.plan_cache.tensor_files import weight_bytes
from torch_armllm.plan.native import native_plan
from torch_armllm.system.allocator import release_free_memory
from torch_armllm.system.files import format_bytes
from torch_armllm.system.gc_pause import collection_paused

SETTING = "ARMLLM_PLAN_CACHE"
"""Environment variable; ``0`` disables the plan cache."""

logger = logging.getLogger(__name__)


def load_with_plan_cache(
    request: ModelRequest, config: EngineConfig, load: Callable[[ModelRequest, EngineConfig], LoadedEngine]
) -> LoadedEngine:
    """Returns a cached engine if a stored plan matches; otherwise calls ``load`` and stores its plan.

    Only folders of packed weights have cached plans.  Their experts may stay on disk, which is why a model
    that was loaded is replaced by its cached plan where its weights exceed the limit of memory.

    Args:
        request: what to load.
        config: of the engine.
        load: loads model, tokenizer and engine.

    Raises:
        MemoryLimitError: the model cannot run within ``max_memory``.
    """
    key = _key(request, config)
    config = with_bytes(config)
    if key is None:
        if config.max_memory is not None:
            logger.warning(
                "max_memory limits the KV cache only, as this model's weights are no folder that "
                "torch-armllm quantize has written, or the plan cache is disabled"
            )
        return load(request, config)
    limited, limit = _limit(config, key)
    cached = lookup(key, limit, left(config))
    if cached is None:
        # the tensors of a folder are mapped files, so that even a model larger than the memory is loaded once
        too_large = limit is not None and weight_bytes(Path(key["folder"])) > limit.weights
        is_given = config.max_memory is not None
        with collection_paused():  # weights are mapped, so that little waits to be collected
            unlimited = replace(config, max_memory=None, kv_cache_memory=None)
            loaded = load(request, unlimited if too_large and is_given else config)
            reason = _store(key, loaded, own_tokenizer=request.tokenizer is None)
        if limit is None or not too_large:
            return loaded
        if limit.is_chosen and (reason is not None or not _has_experts(loaded)):
            return loaded
        if reason is not None:
            raise MemoryLimitError(
                f"the model cannot run within max_memory, as its plan is not stored: {reason}"
            )
        del loaded
        gc.collect()
        release_free_memory()
        cached = lookup(key, limit, left(config))
        if cached is None:
            raise MemoryLimitError(
                "the model cannot run within max_memory, as its stored plan cannot be used"
            )
    model, tokenizer_class = cached
    tokenizer = request.tokenizer
    if request.skip_tokenizer_init:
        tokenizer = None
    elif tokenizer is None and tokenizer_class is not None:
        tokenizer = tokenizer_class.from_pretrained(key["folder"])  # type: ignore[attr-defined]
    elif tokenizer is None or isinstance(tokenizer, str):
        from torch_armllm.checkpoint.load import load_tokenizer  # imports transformers

        tokenizer = load_tokenizer(tokenizer or key["folder"])
    assert not isinstance(tokenizer, str)
    if limit is not None and limit.is_chosen and model.plan.experts is not None:
        _warn(key, limit)
        config = limited
    return LoadedEngine(build_engine(model, tokenizer, config), model, tokenizer)


def _limit(config: EngineConfig, key: PlanKey) -> tuple[EngineConfig, MemoryLimit | None]:
    """Returns settings and a limit of memory: the given one, or one for weights that are too large."""
    limit = memory_limit(config)
    if limit is None and weight_bytes(Path(key["folder"])) > left(config):
        return chosen(config)
    return config, limit


def _has_experts(loaded: LoadedEngine) -> bool:
    plan = native_plan(getattr(loaded.engine.runner, "plan", None))
    return plan is not None and "moe" in plan.opcodes


def _warn(key: PlanKey, limit: MemoryLimit) -> None:
    logger.warning(
        "%s has %s of weights, more than the free memory: it runs within %s, and reads its experts from the "
        "disk when a step needs them. Expect a few tokens per second or fewer: the log says the hit rate of "
        "the experts in memory. Set max_memory to choose the limit",
        key["folder"],
        format_bytes(weight_bytes(Path(key["folder"]))),
        format_bytes(limit.total),
    )


def _key(request: ModelRequest, config: EngineConfig) -> PlanKey | None:
    if not isinstance(request.model, str) or os.environ.get(SETTING) == "0":
        return None
    if config.ranks > 1:  # each rank's plan has its own part of the weights
        return None
    if config.enable_lora:  # slots for adapters belong to the model's layers
        return None
    if reads_hidden_states(config.speculative_config):  # draft layers take the model's modules
        return None
    options = {name: repr(value) for name, value in request.weight_options.items()}
    return plan_key(request.model, options | {"kv": config.kv_cache_dtype})


def _store(key: PlanKey, loaded: LoadedEngine, own_tokenizer: bool) -> str | None:
    """Stores a plan; returns the reason if it fails: the next process then captures the model again."""
    if not isinstance(loaded.engine.preprocessor.pictures, str):
        no_tower = "its engine takes pictures, and a stored plan has no vision tower"
        logger.info("the plan is not cached: %s", no_tower)
        return no_tower
    try:
        reason = store(key, loaded.model, loaded.engine.runner, loaded.tokenizer if own_tokenizer else None)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        logger.info("the plan is not cached: %s", reason)
    return reason
