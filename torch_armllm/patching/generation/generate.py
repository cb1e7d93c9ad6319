"""``generate`` of a patched model."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any

from torch_armllm.patching.generation.token_loop import TokenLoop

if TYPE_CHECKING:
    from torch_armllm.patching.forwards.decoder_calls import DecoderCalls
    from torch_armllm.patching.forwards.forward import PatchedForward

_OTHER_METHODS = (
    "custom_generate",
    "assistant_model",
    "cache_implementation",
    "synced_gpus",
    "tokenizer",  # transformers drops it, and with it stop strings, for a method that is not its own
)
"""Arguments of ``generate`` that need a method of transformers."""


class PatchedGenerate:
    """The model's own ``generate``, whose greedy and sampled tokens come from a `TokenLoop`.

    Args:
        model: a patched causal language model.
        forward: the patched forward of its base model.
    """

    def __init__(self, model: Any, forward: PatchedForward[DecoderCalls]) -> None:
        functools.update_wrapper(self, model.generate)
        self._model = model
        self._own = model.generate
        self._forward = forward
        self._loop = TokenLoop(model, forward)
        self._names = list(inspect.signature(self._own).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See ``GenerationMixin.generate`` of transformers."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        by_plan = not self._forward.is_by_modules and self._loop.serves(self._model)
        if not by_plan or not self._samples(given):
            return self._own(*args, **kwargs)

        def decode(*tensors: Any, **settings: Any) -> Any:
            settings.setdefault("streamer", given.get("streamer"))  # dropped like the tokenizer
            return self._loop(*tensors, **settings)

        return self._own(*args, **kwargs, custom_generate=decode)

    def _samples(self, given: dict[str, Any]) -> bool:
        """True if nothing in a call asks for another method than greedy search or sampling."""
        if any(given.get(name) is not None for name in _OTHER_METHODS):
            return False
        configs = (self._model.generation_config, given.get("generation_config"))
        return all(config is None or _names_sampling(config, given) for config in configs)


def _names_sampling(config: Any, given: dict[str, Any]) -> bool:
    merged = copy.copy(config)
    for name, value in given.items():
        if hasattr(merged, name):
            setattr(merged, name, value)
    return merged.get_generation_mode() in ("greedy_search", "sample")
