"""Builds the speculative decoder that an engine's settings describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch_armllm.engine.execution.executor_sizes import ExecutorSizes
from torch_armllm.engine.execution.plan_runner import PlanRunner
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.speculative.adaptive import MAX_DRAFT_TOKENS, AdaptiveDrafts
from torch_armllm.engine.speculative.config import SpeculativeConfig
from torch_armllm.engine.speculative.draft_layer import DraftLayers
from torch_armllm.engine.speculative.draft_model import DraftModelProposer
from torch_armllm.engine.speculative.drafting import Proposer, SpeculativeDecoder
from torch_armllm.engine.speculative.hidden_states import HiddenStateProposer, spare_blocks
from torch_armllm.engine.speculative.ngram import NgramProposer
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.kv_cache.budget import KvMemory
from torch_armllm.kv_cache.drafter_memory import NO_DRAFTER, DrafterNeeds
from torch_armllm.plan.servable_model import ServableModel

Settings = Mapping[str, Any] | Literal["auto"] | None
"""`EngineConfig.speculative_config`."""


@dataclass
class DraftModel:
    """A smaller model that drafts.

    Attributes:
        servable: the model as an engine runs it.
        max_length: its maximum context length; None: unlimited.
        kept_columns: columns of the model's results that it reads: none.
    """

    servable: ServableModel
    max_length: int | None
    kept_columns: range | None = None


Drafter = DraftLayers | DraftModel
"""A drafter with a cache of its own."""


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


def load_drafter(settings: Settings, model: Any, servable: ServableModel | None) -> Drafter | None:
    """Returns the model or layer that drafts; None if the settings name neither, or there is no plan.

    For EAGLE-3 ``servable`` gets another plan, which also returns the hidden states that the layer reads.

    Args:
        settings: `EngineConfig.speculative_config`.
        model: a patched model.
        servable: the same as the engine serves it; its plan may be replaced.  None: it has no plan.

    Raises:
        ValueError: a setting is wrong, there is no such layer, it does not fit the model, or the draft model
            has no plan.
        OSError: it is not found.
    """
    if settings is None or settings == "auto" or servable is None:
        return None
    config = SpeculativeConfig.parse(settings)
    if config.method == "draft_model":
        return _draft_model(config)
    return _draft_layers(config, model, servable) if reads_hidden_states(settings) else None


def drafter_needs(settings: Settings, drafter: Drafter | None, max_num_seqs: int) -> DrafterNeeds:
    """Returns what a drafter keeps in memory.

    Args:
        settings: `EngineConfig.speculative_config`.
        drafter: of `load_drafter`.
        max_num_seqs: most sequences that run together.
    """
    if drafter is None:
        return NO_DRAFTER
    tokens = most_draft_tokens(settings)
    if isinstance(drafter, DraftLayers):
        size, spare = drafter.bytes_per_token, spare_blocks(drafter.block_size, tokens, max_num_seqs)
        return DrafterNeeds(size, spare_bytes=spare * drafter.block_size * size, swapped=True)
    shape = drafter.servable.shape
    # a state of each sequence, and one before each token that it drafts but the first
    slots = max_num_seqs * tokens if shape.states else 0
    return DrafterNeeds(shape.bytes_per_token, state_bytes=shape.states.bytes_per_sequence, state_slots=slots)


def _draft_layers(config: SpeculativeConfig, model: Any, servable: ServableModel) -> DraftLayers:
    from torch_armllm.capture.export import CaptureError
    from torch_armllm.engine.speculative.eagle3 import eagle3_layers
    from torch_armllm.engine.speculative.mtp import mtp_layers
    from torch_armllm.patching.kept_layers import keep_layer_inputs
    from torch_armllm.patching.patched_model import PatchedModel

    assert isinstance(config.model, str | None)
    try:
        if config.method == "mtp":
            drafter = mtp_layers(model, servable, config.model, config.num_speculative_tokens)
        else:
            assert config.model is not None and isinstance(servable, PatchedModel)
            drafter, layers = eagle3_layers(model, config.model)
            servable.plan = keep_layer_inputs(model, layers)
    except CaptureError as error:
        raise ValueError(
            f"method {config.method} cannot draft for this {servable.name}: {error}; choose another method"
        ) from error
    assert drafter.block_size == servable.shape.block_size
    return drafter


def build_speculative_decoder(
    settings: Mapping[str, Any] | Literal["auto"],
    sampler: Sampler,
    memory: KvMemory,
    drafter: Drafter | None = None,
    max_num_batched_tokens: int = 512,
    max_num_seqs: int = 64,
    max_length: int | None = None,
) -> SpeculativeDecoder:
    """Returns the speculative decoder.

    Args:
        settings: `EngineConfig.speculative_config`.
        sampler: the engine's.
        memory: of the engine, with a part for the drafter.
        drafter: of `load_drafter`.
        max_num_batched_tokens: most prompt tokens per prefill step of the draft model.
        max_num_seqs: most sequences that run together.
        max_length: maximum context length of a draft layer; None: unlimited.

    Raises:
        ValueError: a setting is wrong, the draft model has a smaller vocabulary, or there is no memory for
            its cache.
    """
    if settings == "auto":
        return SpeculativeDecoder(AdaptiveDrafts(), sampler, MAX_DRAFT_TOKENS)
    config = SpeculativeConfig.parse(settings)
    proposer: Proposer
    if config.method == "ngram":
        proposer = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    elif isinstance(drafter, DraftLayers):
        proposer = HiddenStateProposer(drafter, memory, sampler, config, max_num_seqs, max_length)
    else:
        assert drafter is not None
        servable, slots = drafter.servable, memory.drafter_state_slots
        num_blocks = memory.drafter_tokens // servable.shape.block_size
        if not num_blocks or (servable.shape.states and not slots):
            raise ValueError("kv_cache_memory has no room for the draft model's own cache: raise it")
        runner = PlanRunner(StepExecutor(servable, ExecutorSizes(num_blocks, state_slots=slots)))
        proposer = DraftModelProposer(
            runner=runner,
            num_blocks=num_blocks,
            sampler=sampler,
            chunk=max_num_batched_tokens,
            max_length=drafter.max_length,
            rejection=config.draft_sampling == "rejection",
            state_slots=slots,
        )
    return SpeculativeDecoder(proposer, sampler, config.num_speculative_tokens, memory.drafter_bytes)


def _draft_model(config: SpeculativeConfig) -> DraftModel:
    from torch_armllm.checkpoint.load import load_model
    from torch_armllm.patching.patch import patch
    from torch_armllm.patching.patched_model import servable_model
    from torch_armllm.patching.state import is_patched, patch_state

    model_or_name: Any = config.model
    model = load_model(model_or_name) if isinstance(model_or_name, str) else model_or_name
    if not is_patched(model):
        patch(model, progress=False)
    servable = servable_model(model)
    if servable is None:
        raise ValueError(f"the draft model, a {type(model).__name__}, has no plan; give another model")
    return DraftModel(servable, _max_length(patch_state(model).kind, servable.max_length))


def _max_length(kind: ModelKind, by_plan: int | None) -> int | None:
    """Returns the maximum context length of the draft model; None: unlimited."""
    limits = [n for n in (by_plan, kind.stated_positions) if n is not None]
    return min(limits, default=None)
