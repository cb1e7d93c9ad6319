"""Logit processors of users for single requests, in the shape of vLLM's `AdapterLogitsProcessor`."""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from typing import Any

import torch
from torch import Tensor

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.sampling.batch_processors import LogitsProcessor
from torch_armllm.engine.sampling_params import SamplingParams

RequestProcessor = Callable[..., Tensor]
"""``(output_token_ids, logits)`` or ``(prompt_token_ids, output_token_ids, logits)`` to logits; float32
``(V,)``, which may be changed in place."""


class AdapterLogitsProcessor(ABC):
    """Base of users' logit processors: makes a function for each request that wants one.

    Subclasses are given to ``LLM(logits_processors=[…])``, and are created once for an engine.  Their
    functions are called before each token, also for contexts that end with draft tokens.

    Args:
        config: the engine's `EngineConfig`.
        device: the CPU.
        is_pin_memory: False.
    """

    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool) -> None:  # noqa: B027
        """See the class."""

    @classmethod  # noqa: B027
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError for ``extra_args`` that the processor cannot use."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if the most probable token stays the same, so that greedy requests need no call."""

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestProcessor | None:
        """Returns the function of a request, see `RequestProcessor`; None: its logits are not changed."""


def load_processors(
    given: GenericSequence[str | type[Any]], config: Any
) -> list[AdapterLogitsProcessor | LogitsProcessor]:
    """Creates the processors of an engine.

    Args:
        given: classes, or their names as ``module:Class``.
        config: the engine's settings.

    Raises:
        ValueError: a name is not one, or the class has another shape.
        ImportError: a module does not exist.
    """
    return [_loaded(each)(config, torch.device("cpu"), False) for each in given]


def _loaded(given: str | type[Any]) -> type[AdapterLogitsProcessor | LogitsProcessor]:
    name = given if isinstance(given, str) else getattr(given, "__name__", repr(given))
    found: Any = given
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        if not module or not attribute:
            raise ValueError(f"logits_processors holds {found!r}; give a class, or 'module:Class'")
        found = getattr(importlib.import_module(module), attribute, None)
    if isinstance(found, type) and (is_for_requests(found) or is_for_batches(found)):
        return found
    raise ValueError(
        f"logits_processors holds {name}, which is no class with new_req_logits_processor, or with apply and "
        "update_state; give a subclass of torch_armllm.AdapterLogitsProcessor or LogitsProcessor"
    )


def is_for_requests(processor: Any) -> bool:
    """True for an `AdapterLogitsProcessor`, or a class of its shape."""
    return hasattr(processor, "new_req_logits_processor")


def is_for_batches(processor: Any) -> bool:
    """True for a `LogitsProcessor`, or a class of its shape."""
    shape = hasattr(processor, "apply") and hasattr(processor, "update_state")
    return shape and not is_for_requests(processor)


class CustomProcessor:
    """The function of one request.

    Args:
        function: see `RequestProcessor`.
        name: of its class, for errors.
    """

    def __init__(self, function: RequestProcessor, name: str) -> None:
        self._function = function
        self._name = name
        self._takes_prompt = len(inspect.signature(function).parameters) == 3

    def apply(self, row: Tensor, sequence: Sequence, prefix: GenericSequence[int]) -> None:
        """Changes logits, float32 ``(V,)``, of the token after the sequence and ``prefix``, in place.

        Raises:
            ValueError: the function returned something else than logits.
        """
        output = [*sequence.output_token_ids, *prefix]
        given = (list(sequence.request.prompt_token_ids), output) if self._takes_prompt else (output,)
        changed = self._function(*given, row)
        if changed is row:
            return
        if not isinstance(changed, Tensor) or changed.shape != row.shape:
            got = f"a tensor {tuple(changed.shape)}" if isinstance(changed, Tensor) else repr(changed)
            raise ValueError(
                f"the logits processor {self._name} returned {got[:200]}; return logits {tuple(row.shape)}"
            )
        row.copy_(changed)


def custom_processors(
    processors: GenericSequence[AdapterLogitsProcessor], params: SamplingParams, greedy: bool
) -> list[CustomProcessor]:
    """Returns the functions of a request.

    Args:
        processors: of the engine.
        params: of the request.
        greedy: True if it takes the most probable token.
    """
    made = []
    for processor in processors:
        if greedy and processor.is_argmax_invariant():
            continue
        function = processor.new_req_logits_processor(params)
        if function is not None:
            made.append(CustomProcessor(function, type(processor).__name__))
    return made
