"""Builds the speculative decoder that an engine's settings describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch_armllm.engine.execution.plan_runner import PlanRunner
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.speculative.adaptive import MAX_DRAFT_TOKENS, AdaptiveDrafts
from torch_armllm.engine.speculative.config import SpeculativeConfig
from torch_armllm.engine.speculative.draft_layer import DraftLayer
from torch_armllm.engine.speculative.draft_model import DraftModelProposer
from torch_armllm.engine.speculative.drafting import Proposer, SpeculativeDecoder
from torch_armllm.engine.speculative.hidden_states import HiddenStateProposer
from torch_armllm.engine.speculative.ngram import NgramProposer
from torch_armllm.plan.servable_model import ServableModel

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


def reads_hidden_states(settings: Settings) -> bool:
    """True if drafts are computed from the model's own hidden states, which takes its modules.

    Args:
        settings: `EngineConfig.speculative_config`.

    Raises:
        ValueError: a setting is wrong.
    """
    if settings is None or settings == "auto":
        return False
    return SpeculativeConfig.parse(settings).method in ("mtp", "eagle3")


def build_draft_layer(settings: Settings, model: Any, servable: ServableModel) -> DraftLayer | None:
    """Returns the layer that drafts from the model's hidden states; None if the settings name none.

    For EAGLE-3 the model gets another plan, which also returns the hidden states that the layer reads.

    Args:
        settings: `EngineConfig.speculative_config`.
        model: a patched model.
        servable: the same as the engine serves it; its plan may be replaced.

    Raises:
        ValueError: there is no such layer, or it does not fit the model.
        OSError: it is not found.
    """
    if settings is None or settings == "auto" or not reads_hidden_states(settings):
        return None
    from torch_armllm.capture.export import CaptureError
    from torch_armllm.engine.speculative.eagle3 import eagle3_layer
    from torch_armllm.engine.speculative.mtp import mtp_layer
    from torch_armllm.patching.kept_layers import keep_layer_inputs
    from torch_armllm.patching.patched_model import PatchedModel

    config = SpeculativeConfig.parse(settings)
    assert isinstance(config.model, str | None)
    try:
        if config.method == "mtp":
            layer = mtp_layer(model, servable, config.model)
        else:
            assert config.model is not None and isinstance(servable, PatchedModel)
            layer, layers = eagle3_layer(model, config.model)
            servable.plan = keep_layer_inputs(model, layers)
    except CaptureError as error:
        raise ValueError(
            f"method {config.method} cannot draft for this {servable.name}: {error}; choose another method"
        ) from error
    assert layer.shape.block_size == servable.shape.block_size
    return layer


def build_speculative_decoder(
    settings: Mapping[str, Any] | Literal["auto"],
    sampler: Sampler,
    positions: int,
    max_num_batched_tokens: int = 512,
    max_num_seqs: int = 64,
    layer: DraftLayer | None = None,
    swap_blocks: int = 0,
    max_length: int | None = None,
) -> SpeculativeDecoder:
    """Returns the speculative decoder; loads the draft model, if there is one.

    Args:
        settings: `EngineConfig.speculative_config`.
        sampler: the engine's.
        positions: capacity of the engine's KV cache in tokens; the draft model's cache gets the same.
        max_num_batched_tokens: most prompt tokens per prefill step of the draft model.
        max_num_seqs: most sequences that run together.
        layer: of `build_draft_layer`.
        swap_blocks: blocks of the engine's swap memory.
        max_length: maximum context length of the layer; None: unlimited.

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
    elif layer is not None:
        proposer = HiddenStateProposer(
            *(layer, positions // layer.shape.block_size, swap_blocks, sampler),
            *(config.num_speculative_tokens, max_num_seqs, max_length),
            rejection=config.draft_sampling == "rejection",
        )
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
