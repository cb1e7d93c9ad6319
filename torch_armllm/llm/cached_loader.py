"""Engines for folders that were loaded before, without their models."""

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
"""Environment variable; ``0`` neither keeps plans nor looks for them."""

logger = logging.getLogger(__name__)


def load_with_plan_cache(
    source: Any,
    tokenizer: str | PreTrainedTokenizerBase | None,
    config: EngineConfig,
    asked: Mapping[str, Any],
    skip_tokenizer_init: bool,
    load: Callable[[], LoadedEngine],
) -> LoadedEngine:
    """What ``load`` gives; of a folder of packed weights whose plan was kept, an engine without its model.

    Args:
        source: what is to be loaded.
        tokenizer: or its folder or name; None: the model's own.
        config: of the engine.
        asked: what else decides about the weights that ``load`` loads.
        skip_tokenizer_init: goes without a tokenizer.
        load: loads model, tokenizer and engine; if it can be kept, it is for the next time.
    """
    key = _key(source, config, asked)
    found = None if key is None else lookup(key)
    if key is None or found is None:
        loaded = load()
        if key is not None:
            _keep(key, loaded, own_tokenizer=tokenizer is None)
        return loaded
    model, tokenizer_class = found
    if skip_tokenizer_init:
        tokenizer = None
    elif tokenizer is None and tokenizer_class is not None:
        tokenizer = tokenizer_class.from_pretrained(key["folder"])  # type: ignore[attr-defined]
    elif tokenizer is None or isinstance(tokenizer, str):
        from torch_armllm.checkpoint.load import load_tokenizer

        tokenizer = load_tokenizer(tokenizer or key["folder"])
    assert not isinstance(tokenizer, str)
    return LoadedEngine(build_engine(model, tokenizer, config), model, tokenizer)


def _key(source: Any, config: EngineConfig, asked: Mapping[str, Any]) -> PlanKey | None:
    if not isinstance(source, str) or os.environ.get(SETTING) == "0":
        return None
    return plan_key(
        source, {name: repr(value) for name, value in asked.items()} | {"kv": config.kv_cache_dtype}
    )


def _keep(key: PlanKey, loaded: LoadedEngine, own_tokenizer: bool) -> None:
    """Keeps a plan; whatever is in the way only costs the next process a capture."""
    try:
        reason = store(key, loaded.model, loaded.engine.runner, loaded.tokenizer if own_tokenizer else None)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        logger.info("the plan is not kept for the next time: %s", reason)
