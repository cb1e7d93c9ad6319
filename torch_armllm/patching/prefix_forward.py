"""``forward`` of a patched model whose prompts attend to their later tokens (PaliGemma)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch_armllm.hf.base_model import base_model_of
from torch_armllm.patching.forward import PatchedForward
from torch_armllm.patching.module_fallback import Unserved


class PrefixForward(PatchedForward):
    """``forward`` that always runs the modules; the plan is for engines, which know where a prompt ends."""

    def raise_if_by_modules(self) -> None:
        """Raises `Unserved`."""
        raise Unserved("tokens of a prompt attend to later ones")


def is_prefix_model(model: Any) -> bool:
    """True if all tokens of a prompt with pictures attend to each other, and later ones to the earlier."""
    text = model.config.get_text_config()
    sees = getattr(model.config, "vision_config", None) is not None
    return sees and getattr(text, "use_bidirectional_attention", None) is True


@contextmanager
def causal_prefixes(model: Any) -> Iterator[None]:
    """Makes the attention of an `is_prefix_model` causal while the context lasts, as after the prompt."""
    modules = base_model_of(model).language_model.modules() if is_prefix_model(model) else ()
    changed = [m for m in modules if getattr(m, "is_causal", True) is False]
    try:
        for module in changed:
            module.is_causal = True
        yield
    finally:
        for module in changed:
            module.is_causal = False
