"""The drafts of an engine, if it has some."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_armllm.engine.assembly.computing import Computing
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.sampling.custom_processors import is_for_batches
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.speculative.build import build_speculative_decoder
from torch_armllm.engine.speculative.drafting import SpeculativeDecoder

logger = logging.getLogger(__name__)


def without_drafts(config: EngineConfig, processors: Sequence[Any]) -> EngineConfig:
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


def speculative_decoder(
    config: EngineConfig, computing: Computing, sampler: Sampler
) -> SpeculativeDecoder | None:
    """Returns what drafts tokens and verifies them; None: nothing does, as in models without a plan.

    Args:
        config: of the engine.
        computing: computes its steps.
        sampler: samples the tokens that drafts are verified against.

    Raises:
        ValueError: the drafter does not fit the model or the memory.
    """
    settings, memory = config.speculative_config, computing.memory
    if settings is None or memory is None or (settings == "auto" and not _may_draft(computing)):
        return None
    return build_speculative_decoder(
        settings,
        sampler,
        memory,
        computing.drafter,
        config.max_num_batched_tokens,
        computing.most_sequences or config.max_num_seqs,
        computing.facts.max_model_len,
    )


def _may_draft(computing: Computing) -> bool:
    """Returns False where ``auto`` does not draft.

    It does not in a pipeline, whose steps overlap, so that their times do not tell what draft tokens cost,
    and where no slot is spare for states.
    """
    runner, blocks = computing.runner, computing.blocks
    if runner.stages > 1:
        return False
    no_room = blocks.states is not None and not blocks.states.spare
    return not no_room and runner.rows_are_exact()
