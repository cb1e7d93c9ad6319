"""Facts of a model that its engine is built from."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch_armllm.engine.config import EngineConfig
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.hf.sizes import attention_sizes
from torch_armllm.kv_cache.dtypes import STATE_DTYPES
from torch_armllm.kv_cache.shapes import CacheShape, Shape, with_state_dtype
from torch_armllm.patching.patched_model import positions_of, servable_model
from torch_armllm.patching.state import patch_state
from torch_armllm.plan.expert_store import ExpertStore
from torch_armllm.plan.native import native_plan
from torch_armllm.plan.servable_model import ServableModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFacts:
    """A model as its engine sees it.

    Attributes:
        name: class name.
        drawable: number of token ids that may be sampled: those of both the model and the tokenizer.
        max_model_len: most tokens of a sequence.
        shape: of its cache: of transformers' own, at most, if it has no plan; None: unknown.
        servable: the model by its plan; None: it has none.
    """

    name: str
    drawable: int
    max_model_len: int
    shape: Shape | None
    servable: ServableModel | None = None

    @property
    def experts(self) -> ExpertStore | None:
        """The store of the experts that are on disk; None: all weights are in memory."""
        plan = None if self.servable is None else native_plan(self.servable.plan)
        return None if plan is None else plan.experts


def model_facts(model: Any, tokenizer: PreTrainedTokenizerBase | None, config: EngineConfig) -> ModelFacts:
    """Returns the facts of a patched model, or of one from the plan cache.

    Args:
        model: see above.
        tokenizer: its tokenizer; None: there is none.
        config: of the engine.

    Raises:
        ValueError: the model is not patched, or has too few positions.
    """
    servable = servable_model(model)
    facts = _of_modules(patch_state(model).kind, config) if servable is None else _of_plan(servable, config)
    if config.state_dtype != "float32" and (reason := _why_no_states(servable)):
        logger.warning("%s: state_dtype = %s has no effect, as %s", facts.name, config.state_dtype, reason)
    if tokenizer is None:
        return facts
    return replace(facts, drawable=min(facts.drawable, max(tokenizer.get_vocab().values()) + 1))


def _of_plan(servable: ServableModel, config: EngineConfig) -> ModelFacts:
    positions = servable.position_limit, servable.stated_positions
    length = resolve_max_model_len(config.max_model_len, *positions, servable.max_length)
    shape = with_state_dtype(servable.shape, STATE_DTYPES[config.state_dtype])
    return ModelFacts(servable.name, servable.vocab_size, length, shape, servable)


def _of_modules(kind: ModelKind, config: EngineConfig) -> ModelFacts:
    length = resolve_max_model_len(config.max_model_len, *positions_of(kind), None)
    shape: Shape | None = None
    if (attention := attention_sizes(kind.model.config)) is not None:
        heads = (attention.kv_heads, attention.head_size, attention.head_size)
        shape = CacheShape(attention.layers, *heads, kind.model.dtype)
    return ModelFacts(kind.name, kind.vocab_size, length, shape)


def _why_no_states(servable: ServableModel | None) -> str | None:
    """Returns the reason why a model has no states that ``state_dtype`` is about; None if it has some."""
    if servable is None:
        return "the model has no plan, and its own modules keep its states"
    if not servable.shape.states:
        return "it has no recurrent layers"
    if servable.shape.states.accumulated_dtype is None:
        return "its recurrent layers are convolutions, which keep inputs in the model's dtype"
    return None


def resolve_max_model_len(
    requested: int | None, position_limit: int | None, stated_positions: int, max_length: int | None
) -> int:
    """Returns the maximum number of tokens of a prompt and its output together.

    Args:
        requested: the user's ``max_model_len``, or None.
        position_limit: see `torch_armllm.plan.servable_model.ServableModel`.
        stated_positions: see there.
        max_length: see there.

    Raises:
        ValueError: ``requested`` is too small, or more than the model allows.
    """
    if requested is None:
        return min(position_limit or stated_positions, max_length or stated_positions)
    if requested < 2:
        raise ValueError(
            f"max_model_len = {requested} leaves no room for a prompt and an output token: request at least 2"
        )
    if position_limit is not None and requested > position_limit:
        raise ValueError(
            f"max_model_len = {requested}, but this model supports sequences of at most {position_limit} "
            "tokens: request fewer, or load it with rope scaling"
        )
    if max_length is not None and requested > max_length:
        raise ValueError(
            f"max_model_len = {requested}, but the plan of this model supports sequences of at most "
            f"{max_length} tokens: request at most {max_length}"
        )
    return requested
