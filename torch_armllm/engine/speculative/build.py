"""Builds the speculative decoder that an engine's settings describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch_armllm.engine.execution.plan_runner import PlanRunner
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.speculative.adaptive import MAX_DRAFT_TOKENS, AdaptiveDrafts
from torch_armllm.engine.speculative.config import SpeculativeConfig
from torch_armllm.engine.speculative.draft_model import DraftModelProposer
from torch_armllm.engine.speculative.drafting import Proposer, SpeculativeDecoder
from torch_armllm.engine.speculative.ngram import NgramProposer

Settings = Mapping[str, Any] | Literal["auto"] | None
"""`EngineConfig.speculative_config`."""


def most_draft_tokens(settings: Settings) -> int:
    """Returns the most draft tokens of a sequence for whose states memory is set aside.

    It is 0 for ``auto``, whose draft tokens share the spare slots of checkpoints.

    Args:
        settings: `EngineConfig.speculative_config`.

    Raises:
        ValueError: a setting is wrong.
    """
    if settings is None or settings == "auto":
        return 0
    return SpeculativeConfig.parse(settings).num_speculative_tokens


def build_speculative_decoder(
    settings: Mapping[str, Any] | Literal["auto"],
    sampler: Sampler,
    positions: int,
    max_num_batched_tokens: int = 512,
    max_num_seqs: int = 64,
) -> SpeculativeDecoder:
    """Returns the speculative decoder; loads the draft model, if there is one.

    Args:
        settings: `EngineConfig.speculative_config`.
        sampler: the engine's.
        positions: capacity of the engine's KV cache in tokens; the draft model's cache gets the same.
        max_num_batched_tokens: most prompt tokens per prefill step of the draft model.
        max_num_seqs: most sequences that run together.

    Raises:
        ValueError: a setting is wrong, or the draft model has no plan or a smaller vocabulary.
        OSError: the draft model is not found.
    """
    if settings == "auto":
        return SpeculativeDecoder(AdaptiveDrafts(), sampler, MAX_DRAFT_TOKENS)
    config = SpeculativeConfig.parse(settings)
    proposer: Proposer
    if config.method == "ngram":
        proposer = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    else:
        proposer = _draft_model(config, sampler, positions, max_num_batched_tokens, max_num_seqs)
    return SpeculativeDecoder(proposer, sampler, config.num_speculative_tokens)


def _draft_model(
    config: SpeculativeConfig, sampler: Sampler, positions: int, chunk: int, max_num_seqs: int
) -> DraftModelProposer:
    from torch_armllm.checkpoint.load import load_model
    from torch_armllm.patching.patch import patch
    from torch_armllm.patching.patched_model import servable_model
    from torch_armllm.patching.state import is_patched

    model_or_name: Any = config.model
    model = load_model(model_or_name) if isinstance(model_or_name, str) else model_or_name
    if not is_patched(model):
        patch(model, progress=False)
    servable = servable_model(model)
    if servable is None:
        raise ValueError(f"the draft model, a {type(model).__name__}, has no plan; give another model")
    num_blocks = -(-positions // servable.shape.block_size)
    max_length = _max_length(model, servable.max_length)
    rejection = config.draft_sampling == "rejection"
    # a state of each sequence, and one before each token that it drafts but the first
    slots = max_num_seqs * config.num_speculative_tokens if servable.shape.states else 0
    runner = PlanRunner(servable, num_blocks, state_slots=slots)
    return DraftModelProposer(runner, num_blocks, sampler, chunk, max_length, rejection, slots)


def _max_length(model: Any, by_plan: int | None) -> int | None:
    """Returns the maximum context length of the draft model; None: unlimited."""
    by_model = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = [n for n in (by_plan, by_model) if n is not None]
    return min(limits, default=None)
