"""Calls of a patched module, and the base of what computes them by a plan."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache

from torch_armllm.hf.cache_names import cache_argument
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.hf.outputs import OutputForm
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.patching.cache.paged_cache import PagedCache
from torch_armllm.patching.forwards.padding import check_mask, check_packing
from torch_armllm.patching.forwards.unserved import Unserved
from torch_armllm.plan.step import Plan

_IGNORED = {
    "cache_position",
    "return_dict",
    "output_router_logits",
    "output_attentions",
    "output_hidden_states",
    "logits_to_keep",  # a base model may drop positions for it; the head computes all that it receives
}
_RECORDED = ("output_attentions", "output_hidden_states", "output_router_logits")


@dataclass
class CallArguments:
    """A call of a patched module.

    Attributes:
        named: its arguments by name, without the cache.
        past: the cache; None: it begins one, or has none.
    """

    named: dict[str, Any]
    past: Any = None

    @property
    def ids(self) -> Tensor | None:
        """Token ids int64 ``(batch, T)``."""
        return self.named.get("input_ids")

    @property
    def mask(self) -> Any:
        """The attention mask."""
        return self.named.get("attention_mask")

    @property
    def positions(self) -> Tensor | None:
        """Position ids."""
        return self.named.get("position_ids")

    @property
    def is_step(self) -> bool:
        """True if it continues a cache by one token, whose time counts most."""
        return self.past is not None and self.ids is not None and self.ids.shape[-1] <= 1


class Calls(ABC):
    """Computation of the calls of a module by plans.

    Args:
        base: the module.

    Attributes:
        changes_modules: modules are changed while a call is computed, so no other call may run them then.
    """

    changes_modules = False

    def __init__(self, base: nn.Module) -> None:
        self.base: Any = base
        self.module_forward: Any = base.forward
        self._cache_name = cache_argument(base.forward)

    @abstractmethod
    def compute(self, call: CallArguments) -> Any:
        """Returns the result of a call.

        Raises:
            Unserved: no plan computes it.
        """

    def reads_weights(self, call: CallArguments) -> bool:
        """True if the weights are compared with what they were before a call."""
        return True

    def by_modules(self, call: CallArguments) -> Any:
        """Returns the result of a call by the module's own ``forward``."""
        cache = {} if call.past is None else {self._cache_name: call.past}
        return self.module_forward(**call.named, **cache)


class TokenCalls(Calls):
    """Computation of the calls of a module that takes token ids and returns hidden states, by a plan.

    Args:
        kind: of the model; its base model is the module.
        plan: computes hidden states of a step.
        shape: shape of the cache that steps write and read.
        max_length: most tokens of a sequence that the plan computes; None: any number.
    """

    arguments: Collection[str] = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache")
    """Names of the arguments that are known, but for the cache."""

    def __init__(self, kind: ModelKind, plan: Plan, shape: Shape, max_length: int | None) -> None:
        super().__init__(kind.base)
        self.kind = kind
        self.plan = plan
        self.shape = shape
        self.max_length = max_length
        self.vocab_size = kind.vocab_size
        self.first_position = kind.first_position
        self._known = _IGNORED.union(self.arguments)
        taken = inspect.signature(kind.base.forward).parameters
        self._defaults = {name: parameter.default for name, parameter in taken.items()}
        self._outputs = OutputForm(kind.base)

    def reads_weights(self, call: CallArguments) -> bool:
        """See `Calls.reads_weights`."""
        return not call.is_step

    def output(self, hidden: Tensor, cache: Any, call: CallArguments) -> Any:
        """Returns hidden states and the cache in the form that the arguments of a call ask for."""
        out = self._outputs.make(hidden, cache, **self.results_of(hidden))
        wants_dict = call.named.get("return_dict")
        if wants_dict is None:
            wants_dict = getattr(self.base.config, "return_dict", True)
        return out if wants_dict else out.to_tuple()

    def results_of(self, hidden: Tensor) -> dict[str, Any]:
        """Returns further results of the module, which it computes of the hidden states."""
        return {}

    def checked_ids(self, call: CallArguments, past: Any) -> Tensor:
        """Returns the token ids of a call.

        Args:
            call: the call.
            past: its cache of the module's own tokens.

        Raises:
            Unserved: it has none, or something that the plan does not know.
        """
        if (ids := call.ids) is None or call.named.get("inputs_embeds") is not None:
            raise Unserved("inputs_embeds are given")
        if past is not None and type(past) not in (DynamicCache, PagedCache):
            raise Unserved(f"the cache is a {type(past).__name__}")
        for name in _RECORDED:
            requested = call.named.get(name)
            if requested if requested is not None else getattr(self.base.config, name, False):
                raise Unserved(f"{name} is requested")
        # `generate` passes empty encodings to a multimodal model if no other modality is given
        given = {name: value for name, value in call.named.items() if name not in self._known}
        unknown = sorted(name for name, value in given.items() if not self._is_nothing(name, value))
        if unknown:
            raise Unserved(f"the fast path does not know {', '.join(unknown)}")
        check_mask(call.mask)
        if self.base.training:
            raise Unserved("the model is in training mode")
        check_packing(call.positions, call.mask, past)
        return ids

    def check_length(self, tokens: int, past: Any = None) -> None:
        """Raises `Unserved` if so many tokens make a cache longer than what the plan computes."""
        if self.max_length is None:
            return
        if tokens + (0 if past is None else past.get_seq_length()) > self.max_length:
            raise Unserved(f"the plan supports at most {self.max_length} tokens")

    def check_ids(self, least: int, most: int) -> None:
        """Raises IndexError unless the least and the greatest token id of an input are the model's."""
        if most >= self.vocab_size or least < 0:
            raise IndexError(
                f"token ids must be in 0 … {self.vocab_size - 1}; the input has {least} … {most}"
            )

    def check_position(self, most: int) -> None:
        """Raises ValueError if the greatest position of an input is past the model's last one."""
        limit = self.kind.position_limit
        if limit is not None and most >= limit:
            raise ValueError(
                f"the input reaches position {most}, but max_position_embeddings is {limit}: "
                "shorten the prompt or max_new_tokens, or load the model with rope scaling for longer texts"
            )

    def _is_nothing(self, name: str, value: Any) -> bool:
        """True for no value, and for the default of the module's ``forward``, by which it was captured."""
        default = self._defaults.get(name)
        is_default = isinstance(value, bool | int | float | str) and type(value) is type(default)
        return value is None or (isinstance(value, dict) and not value) or (is_default and value == default)
