"""The call of a model's decoder, which its own forward makes: what a prompt's tokens are computed from."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class _ReachedDecoderError(Exception):
    """Carries the arguments of the decoder's call out of the model's own forward."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class DecoderCall:
    """Arguments that a model gives to its decoder for one prompt.

    Args:
        arguments: of the call, by their names.

    Attributes:
        embeddings: ``(T, hidden)``.
        positions: as the decoder takes them; None: it counts.
        mask: as the decoder takes it; None: it is causal.
        others: tensors, lists and dicts that are given beside these.
    """

    _KNOWN = ("attention_mask", "inputs_embeds", "position_ids", "cache_position")

    def __init__(self, arguments: dict[str, Any]) -> None:
        embeddings = arguments.get("inputs_embeds")
        if not isinstance(embeddings, Tensor) or embeddings.dim() != 3 or len(embeddings) != 1:
            raise ValueError("its language model is given no embeddings")
        self.embeddings = embeddings[0]
        self.positions: Tensor | None = arguments.get("position_ids")
        self.mask = arguments.get("attention_mask")
        self.others = {
            name: value
            for name, value in arguments.items()
            if name not in self._KNOWN and isinstance(value, (Tensor, list, tuple, dict))
        }

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return len(self.embeddings)


def decoder_of(module: Any) -> Any:
    """Returns the innermost model within another one that embeds the tokens of texts; itself if none does."""
    from transformers import PreTrainedModel  # deferred: the import takes seconds

    table = module.get_input_embeddings()
    found = [
        each
        for each in module.modules()
        if isinstance(each, PreTrainedModel) and any(inner is table for inner in each.modules())
    ]
    return found[-1] if found else module


def layers_of(decoder: Any) -> list[nn.Module]:
    """Returns the layers of a decoder."""
    own = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    lists = own or [each for each in decoder.modules() if isinstance(each, nn.ModuleList)]
    return list(max(lists, key=len, default=()))


class ReadingModel:
    """A model that takes what its processor makes, and calls its decoder.

    Args:
        module: its modules.
        forward: its own ``forward``, not that of a plan.
        modules_only: context in which no plan computes.

    Attributes:
        decoder: its language model.
        embed: its table of the embeddings of texts.
        asks: arguments of its processor, for inputs that it takes and that are not made unasked.
        has_decoder: True if it calls a decoder with embeddings; False: it hands them to its first layer.
    """

    def __init__(
        self,
        module: Any,
        forward: Callable[..., Any],
        modules_only: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.module, self._forward, self._modules_only = module, forward, modules_only
        self.decoder = decoder_of(module)
        self.has_decoder = self.decoder is not module
        self.embed: Callable[[Tensor], Tensor] = module.get_input_embeddings()
        named = inspect.signature(forward).parameters
        self._names = None if any(p.kind is p.VAR_KEYWORD for p in named.values()) else set(named)
        self.asks: dict[str, Any] = {"return_mm_token_type_ids": True} if "mm_token_type_ids" in named else {}
        self._factor: float | None = None
        self._offsets = [each for each in module.modules() if "rope_deltas" in each.__dict__]

    @torch.no_grad()
    def decoder_call(self, inputs: dict[str, Any]) -> DecoderCall:
        """Returns what the model gives to its decoder: its own forward runs up to that call.

        Raises:
            ValueError: it does not call its decoder so.
        """
        if self.has_decoder:
            given = self._reached(self.decoder, inputs)
            if given.get("inputs_embeds") is not None:
                return DecoderCall(given)
            self.has_decoder = False
        if not (layers := layers_of(self.decoder)):
            raise ValueError("its language model is no part of its own, and has no layers")
        return self.call_of(None, self._reached(layers[0], inputs), inputs["input_ids"])

    def call_of(
        self, given: dict[str, Any] | None, of_layer: dict[str, Any] | None, ids: Tensor
    ) -> DecoderCall:
        """Returns the call of the decoder, by its arguments or those of its first layer.

        A decoder that is given no embeddings embeds what the processor makes, as it embeds token ids
        ``(1, T)``.

        Raises:
            ValueError: it is given none.
        """
        if self.has_decoder and given is not None and given.get("inputs_embeds") is not None:
            return DecoderCall(given)
        self.has_decoder = False
        if of_layer is None:
            raise ValueError("the model does not call its language model")
        others = {name: value for name, value in of_layer.items() if name != "hidden_states"}
        hidden = of_layer.get("hidden_states")
        if isinstance(hidden, Tensor) and hidden.shape[:2] == ids.shape:
            hidden = self._embeddings_of(ids, hidden)
        return DecoderCall({**others, "inputs_embeds": hidden})

    def _embeddings_of(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Returns the embeddings ``(1, T, hidden)`` that the first layer's hidden states are made of.

        A model may multiply them by a factor, and add embeddings of positions.  Two texts of the same length
        show both: ids that are those of the prompt, and the same ids in another order.
        """
        table, known = self.looked_up(ids)
        differ = (table.to(hidden.dtype) != hidden).any(-1)
        if not differ.all() or not known.any():
            return hidden  # they are the embeddings
        texts = []
        for each in (ids.clamp(0, self._table_size - 1), ids.roll(1, -1).clamp(0, self._table_size - 1)):
            found = self._reached(layers_of(self.decoder)[0], {"input_ids": each}).get("hidden_states")
            if not isinstance(found, Tensor) or found.shape != hidden.shape:
                return hidden
            texts.append((found, self.embed(each)))
        (text, given), (other, given_other) = texts
        if self._factor is None:  # of the first prompt, so that equal images have equal rows in all others
            self._factor = proportion((given - given_other).double(), (text - other).double())
        if self._factor is None:
            return hidden
        added = text.double() - self._factor * given.double()
        shown = (hidden != text).any(-1, keepdim=True)
        return torch.where(shown, (hidden.double() - added) / self._factor, given.double()).to(hidden.dtype)

    def _reached(self, module: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a module's first call."""
        with _stopping(module):
            try:
                self.run(inputs)
            except _ReachedDecoderError as reached:
                return reached.arguments
        raise ValueError("the model does not call its language model")

    @torch.no_grad()
    def run(self, inputs: dict[str, Any]) -> Any:
        """Runs the model by its modules."""
        if self._names is not None:
            inputs = {name: value for name, value in inputs.items() if name in self._names}
        with self._modules_only(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this call without a plan is no fault of the user's
            try:
                return self._forward(**inputs, use_cache=False)
            finally:
                for each in self._offsets:
                    each.rope_deltas = None  # that of this prompt is no other's

    def looked_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the embeddings ``(T, hidden)`` of ids as of texts, and which ids the table has."""
        known = (ids >= 0) & (ids < self._table_size)
        return self.embed(ids.clamp(0, self._table_size - 1)), known

    @property
    def _table_size(self) -> int:
        return int(self.module.get_input_embeddings().num_embeddings)


@torch.no_grad()
def proportion(given: Tensor, found: Tensor) -> float | None:
    """Returns the positive factor by which one tensor, float64, is another; None: it is no multiple of it."""
    factor = float((given * found).sum() / given.square().sum().clamp_min(torch.finfo(torch.double).tiny))
    fits = (found - factor * given).norm() <= 1e-2 * found.norm()
    return factor if fits and factor > 0 else None


def by_name(module: Any, values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a module's call by their names."""
    return {**dict(zip(inspect.signature(module.forward).parameters, values, strict=False)), **named}


@contextmanager
def _stopping(decoder: Any) -> Iterator[None]:
    """Makes calls of a module raise `_ReachedDecoderError` while the context lasts."""
    own = decoder.__dict__.get("forward")
    names = list(inspect.signature(decoder.forward).parameters)

    def forward(*values: Any, **arguments: Any) -> None:
        raise _ReachedDecoderError({**dict(zip(names, values, strict=False)), **arguments})

    decoder.forward = forward
    try:
        yield
    finally:
        del decoder.forward
        if own is not None:
            decoder.forward = own
