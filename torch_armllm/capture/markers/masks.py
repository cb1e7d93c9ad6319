"""Windows that models put into their attention masks, which capture leaves out."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from torch_armllm.capture.markers.attention import UnsupportedAttention, ahead_of
from torch_armllm.capture.markers.replaced_functions import replaced_functions
from torch_armllm.ops.op_call import OpCall

_FULL, _SLIDING = "create_causal_mask", "create_sliding_window_causal_mask"
_BOTH_SIDES = "create_bidirectional_sliding_window_mask"
_BLOCKS = "block_sequence_ids"
"""Argument with the numbers of the images whose tokens see each other; a captured text has none."""


def _window_of(config: Any) -> int | None:
    """Returns a configuration's window; None if it has none, or none of its layers uses it."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    used = kinds is None or "sliding_attention" in kinds  # models may make masks of each kind in any case
    return window if window and used else None


class MaskedWindows:
    """The masks that a model asks transformers for while it is captured.

    Attributes:
        full: True if it asks for a mask without a window.
        windows: the windows of the other masks, in tokens.
        reaches: those of masks of both sides: the largest distance of two tokens.
    """

    def __init__(self) -> None:
        self.full = False
        self.windows: set[int] = set()
        self.reaches: set[int] = set()

    def record(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of transformers that also records its calls."""

        @functools.wraps(original)
        def create(config: Any, *args: Any, **kwargs: Any) -> Any:
            if name == _FULL:
                self.full = True
            elif name == _BOTH_SIDES:
                self.reaches.add(int(config.sliding_window))
            elif (window := _window_of(config)) is not None:
                self.windows.add(window)
            kwargs.pop(_BLOCKS, None)
            return original(config, *args, **kwargs)

        return create

    def apply(self, graph: fx.Graph) -> None:
        """Gives the window to attentions whose layers rely on the mask for it.

        Raises:
            UnsupportedAttention: it is not known which layers the window is for.
        """
        nodes = [n for n in graph.nodes if n.target is torch.ops.armllm.attention.default]
        told = {OpCall(n).window for n in nodes if OpCall(n).window and ahead_of(n)}
        if self.reaches and told != {reach + 1 for reach in self.reaches}:
            raise UnsupportedAttention(
                f"a mask hides tokens more than {', '.join(map(str, sorted(self.reaches)))} apart, but its "
                f"attentions are told of windows of {', '.join(map(str, sorted(told))) or 'no'} tokens"
            )
        if not self.windows or any(OpCall(n).window for n in nodes):
            return
        if self.full or len(self.windows) > 1:
            raise UnsupportedAttention(
                f"a mask with a window of {', '.join(map(str, sorted(self.windows)))} tokens is made, but no "
                "attention is told which layers it is for"
            )
        (window,) = self.windows
        for node in nodes:
            OpCall(node).replace(window=window)


@contextlib.contextmanager
def record_masks(model: nn.Module) -> Iterator[MaskedWindows]:
    """Records the masks that a model asks for while the context lasts.

    The functions are replaced for the whole process, so the caller must be alone with the model's code.
    """
    masks = MaskedWindows()
    with replaced_functions(model, (_FULL, _SLIDING, _BOTH_SIDES), masks.record):
        yield masks
