"""Loading of engines from the plan cache, without their models."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.llm.loader import LoadedEngine
from torch_armllm.llm.plan_cache.cache import lookup, store
from torch_armllm.llm.plan_cache.key import PlanKey, plan_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SETTING = "ARMLLM_PLAN_CACHE"
"""Environment variable; ``0`` disables the plan cache."""

logger = logging.getLogger(__name__)


def load_with_plan_cache(
    source: Any,
    tokenizer: str | PreTrainedTokenizerBase | None,
    config: EngineConfig,
    options: Mapping[str, Any],
    skip_tokenizer_init: bool,
    load: Callable[[], LoadedEngine],
) -> LoadedEngine:
    """Returns a cached engine if a stored plan matches; otherwise calls ``load`` and stores its plan.

    Only folders of packed weights have cached plans.

    Args:
        source: the model to load.
        tokenizer: a tokenizer, its folder or name; None: the model's own.
        config: of the engine.
        options: further loading options that affect the weights.
        skip_tokenizer_init: runs without a tokenizer.
        load: loads model, tokenizer and engine.
    """
    key = _key(source, config, options)
    cached = None if key is None else lookup(key)
    if key is None or cached is None:
        loaded = load()
        if key is not None:
            _store(key, loaded, own_tokenizer=tokenizer is None)
        return loaded
    model, tokenizer_class = cached
    if skip_tokenizer_init:
        tokenizer = None
    elif tokenizer is None and tokenizer_class is not None:
        tokenizer = tokenizer_class.from_pretrained(key["folder"])  # type: ignore[attr-defined]
    elif tokenizer is None or isinstance(tokenizer, str):
        from torch_armllm.checkpoint.load import load_tokenizer  # imports transformers

        tokenizer = load_tokenizer(tokenizer or key["folder"])
    assert not isinstance(tokenizer, str)
    return LoadedEngine(build_engine(model, tokenizer, config), model, tokenizer)


def _key(source: Any, config: EngineConfig, options: Mapping[str, Any]) -> PlanKey | None:
    if not isinstance(source, str) or os.environ.get(SETTING) == "0":
        return None
    return plan_key(
        source, {name: repr(value) for name, value in options.items()} | {"kv": config.kv_cache_dtype}
    )


def _store(key: PlanKey, loaded: LoadedEngine, own_tokenizer: bool) -> None:
    """Stores a plan; failures are logged only: the next process then captures the model again."""
    try:
        reason = store(key, loaded.model, loaded.engine.runner, loaded.tokenizer if own_tokenizer else None)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        logger.info("the plan is not cached: %s", reason)
