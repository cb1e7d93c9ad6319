"""The memory of an engine's caches."""

from __future__ import annotations

import logging

from torch_armllm.engine.assembly.model_facts import ModelFacts
from torch_armllm.engine.assembly.ranks import Ranks
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.settings.memory_limit import left, memory_limit
from torch_armllm.engine.speculative.build import Drafter, drafter_needs, most_draft_tokens
from torch_armllm.kv_cache.budget import KvMemory, size_kv_memory
from torch_armllm.kv_cache.dtypes import STATE_DTYPES
from torch_armllm.kv_cache.shapes import with_state_dtype

logger = logging.getLogger(__name__)


def engine_memory(
    facts: ModelFacts, config: EngineConfig, ranks: Ranks | None, drafter: Drafter | None
) -> KvMemory | None:
    """Returns the sizes of an engine's caches, on all processes together; None where the shape is unknown.

    Args:
        facts: of the model.
        config: of the engine.
        ranks: the other processes; None: there are none.
        drafter: has a cache of its own; None: there is none.

    Raises:
        ValueError: the memory is too small.
    """
    if facts.shape is None:
        return None
    shape, size, part = facts.shape, 1, 1.0
    if ranks is not None:
        shape = with_state_dtype(ranks.whole_shape, STATE_DTYPES[config.state_dtype])
        size, part = ranks.size, ranks.largest_share
    limit, memory = memory_limit(config), config.kv_cache_memory
    if memory is not None and limit is not None:
        memory = limit.kv_cache
    unfilled = 0 if facts.experts is None else facts.experts.counts().unfilled
    free = max(0, left(config) - unfilled) // size
    sized = size_kv_memory(
        shape,
        facts.max_model_len,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        memory=memory if memory is None or memory <= 1 else int(memory / part),
        most=None if limit is None else int(limit.kv_cache / part),
        swap_space=0 if facts.servable is None else int(config.swap_space / part),
        free=int(free / part),
        checkpoints=config.enable_prefix_caching,
        draft_tokens=most_draft_tokens(config.speculative_config),
        drafter=drafter_needs(config.speculative_config, drafter, config.max_num_seqs),
    )
    logger.info("%s: %s", facts.name, sized)
    return sized
