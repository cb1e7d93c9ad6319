"""``forward`` of a patched encoder of audio or pictures: its layers are a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from torch_armllm.patching.encoder_forward import EncoderForward, whole_texts
from torch_armllm.patching.forward import Unserved
from torch_armllm.system.forks import warn_if_forked

_IDS = 1000
"""Token ids of the checks of a plan, whose rows are functions of them."""
_LARGEST_DIFFERENCE = 0.1
"""Of results by a plan and by modules; hidden states were compared before, to the bounds of rounding."""


class EncoderLayers(nn.Module):
    """The layers of an encoder as a base model; capture makes a graph of it as of any model.

    Args:
        encoder: its ``layers`` take hidden states ``(batch, T, hidden)`` and a mask, which is None.
    """

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.config = encoder.config
        self.layers: nn.ModuleList = encoder.layers
        self._columns = encoder.config.hidden_size
        self._dtype = next(p.dtype for p in encoder.parameters() if p.is_floating_point())
        self._ids = nn.Embedding(_IDS, 1, dtype=self._dtype)

    def get_input_embeddings(self) -> nn.Module:
        """Returns an embedding of the ids of checks; it is not computed."""
        return self._ids

    def forward(self, input_ids: Tensor, **_: Any) -> BaseModelOutput:
        """Computes the hidden states after the last layer of rows that are given."""
        hidden = torch.ops.armllm.given_rows(input_ids, self._columns, self._dtype)
        for layer in self.layers:
            hidden = layer(hidden, None)
        return BaseModelOutput(last_hidden_state=hidden)


class EncoderLayersForward(EncoderForward):
    """``forward`` of an encoder whose inputs are no tokens; its own modules compute all but the layers.

    Attributes:
        calls: number of those that the plan computed.
    """

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the encoder; its own ``forward`` documents the arguments."""
        warn_if_forked()
        try:
            if self._modules_only is not None:
                raise Unserved(self._modules_only)
            named = {**dict(zip(self._signature.parameters, args, strict=False)), **kwargs}
            recorded = ("output_attentions", "output_hidden_states")
            self._check(None, None, {name: named.get(name) for name in recorded})
            with self._layers_by_plan():
                return self.module_forward(*args, **kwargs)
        except Unserved as reason:
            self._warn(str(reason))
            return self.module_forward(*args, **kwargs)

    @contextmanager
    def _layers_by_plan(self) -> Iterator[None]:
        """Lets the first layer compute all of them while the context lasts."""
        layers: Any = self.base.layers
        try:
            for number, layer in enumerate(layers):
                layer.__dict__["forward"] = _unchanged if number else self._all_layers
            yield
        finally:
            for layer in layers:
                layer.__dict__.pop("forward", None)

    def _all_layers(self, hidden: Tensor, *others: Any, **named: Any) -> Tensor:
        if any(isinstance(other, Tensor) for other in (*others, *named.values())):
            raise Unserved("the encoder's layers have a mask")
        self.calls += 1
        texts, length, width = hidden.shape
        parts = []
        for begin, end in whole_texts([length] * texts):
            rows = hidden[begin:end].reshape(1, -1, width).contiguous()
            ids = torch.zeros(1, rows.shape[1], dtype=torch.int64)
            positions = torch.arange(length).repeat(end - begin)[None]
            counts = torch.full((end - begin,), length)
            parts.append(self.plan.run(self._step_of(counts, [ids, positions, rows])).clone())
        return torch.cat(parts).view(texts, length, width) if parts else hidden


def is_close(found: Tensor, expected: Tensor) -> bool:
    """True if results by a plan differ from those by modules by no more than rounding explains."""
    difference = (found.float() - expected.float()).norm()
    return bool(difference <= _LARGEST_DIFFERENCE * expected.float().norm())


def _unchanged(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden
