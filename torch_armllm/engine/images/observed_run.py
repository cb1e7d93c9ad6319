"""A model's own run on a trial's prompt, and what is added to hidden states between its layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from torch_armllm.capture.output_check import with_other_bits
from torch_armllm.engine.images.decoder_call import DecoderCall, ReadingModel, by_name, layers_of, proportion


class ObservedRun:
    """Results of a model on a prompt by its modules.

    Attributes:
        hidden: the last hidden states, float32 ``(T, hidden)``.
        first: what the first layer is given, ``(T, hidden)``; None: it is given something else.
        added: what a layer's result differs by from what the next one is given, ``(T, hidden)``, by layers.
        rotary: shape of the positions that the rotary embedding is given; None: it is given none.
        layers: number of layers that have run.
        given: arguments of the decoder; None: it is not called.
        given_layer: those of its first layer.
    """

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        self.first: Tensor | None = None
        self.added: dict[int, Tensor] = {}
        self.rotary: tuple[int, ...] | None = None
        self.layers = 0
        self.given: dict[str, Any] | None = None
        self.given_layer: dict[str, Any] | None = None
        self._last: Tensor | None = None

    def take(self, result: Any) -> None:
        """Takes the last hidden states of a decoder's result."""
        hidden = getattr(result, "last_hidden_state", None)
        if hidden is None and isinstance(result, tuple):
            hidden = result[0]
        if isinstance(hidden, Tensor):
            self.hidden = hidden[0].float().clone()

    def _before(self, number: int, given: Any) -> None:
        if not isinstance(given, Tensor):
            return
        if number == 0:
            self.first = given[0].clone() if given.dim() == 3 else None
        elif self._last is not None and given.shape == self._last.shape and given.dim() == 3:
            difference = given - self._last
            if difference.any():
                self.added[number - 1] = difference[0]

    def _after(self, result: Any) -> None:
        result = result[0] if isinstance(result, tuple) else result
        self._last = result.clone() if isinstance(result, Tensor) else None
        self.layers += 1


def observe(reading: ReadingModel, inputs: dict[str, Any]) -> tuple[DecoderCall, ObservedRun]:
    """Runs a model by its modules once; returns what its decoder is given too, see `ReadingModel.call_of`.

    Raises:
        ValueError: its decoder returns no hidden states, or is given none.
    """
    run = ObservedRun()
    with _watching(reading.decoder, run):
        result = reading.run(inputs)
    if run.hidden is None:  # the model is its own decoder
        run.take(result)
    if run.hidden is None:
        raise ValueError("its language model returns no hidden states")
    return reading.call_of(run.given, run.given_layer, inputs["input_ids"]), run


def rounded_otherwise(reading: ReadingModel, inputs: dict[str, Any]) -> Tensor:
    """Returns the last hidden states, float32 ``(T, hidden)``, if the last bits of embeddings were others.

    Routers that are undecided then choose other experts, as they may by a plan.

    Raises:
        ValueError: the first layer is given something else than embeddings.
    """

    def shake(layer: nn.Module, args: Any, named: Any) -> Any:
        if args and isinstance(args[0], Tensor):
            return (with_other_bits(args[0]), *args[1:]), named
        if not isinstance(hidden := named.get("hidden_states"), Tensor):
            raise ValueError(f"{type(layer).__name__} is given no hidden states")
        return args, {**named, "hidden_states": with_other_bits(hidden)}

    layer = layers_of(reading.decoder)[0]
    hook = layer.register_forward_pre_hook(shake, with_kwargs=True)
    try:
        _, run = observe(reading, inputs)
    finally:
        hook.remove()
    assert run.hidden is not None
    return run.hidden


@contextmanager
def _watching(decoder: Any, run: ObservedRun) -> Iterator[None]:
    def before(number: int) -> Any:
        def hook(layer: nn.Module, args: Any, named: Any) -> None:
            if number == 0:
                run.given_layer = by_name(layer, args, named)
            run._before(number, args[0] if args else named.get("hidden_states"))

        return hook

    def of_decoder(_: nn.Module, args: Any, named: Any) -> None:
        run.given = by_name(decoder, args, named)

    def of_rotary(_: nn.Module, args: Any, named: Any) -> None:
        positions = named.get("position_ids", args[1] if len(args) > 1 else None)
        run.rotary = tuple(positions.shape) if isinstance(positions, Tensor) else None

    layers = layers_of(decoder)
    behind = [each for each in decoder.children() if not isinstance(each, nn.ModuleList)]

    def of_last(_: nn.Module, args: Any) -> None:
        if run.layers == len(layers) and args:  # a norm, behind the last layer
            run._before(len(layers), args[0])
            run.layers += 1

    with ExitStack() as stack:
        for each in behind:
            stack.enter_context(each.register_forward_pre_hook(of_last))
        for number, layer in enumerate(layers):
            stack.enter_context(layer.register_forward_pre_hook(before(number), with_kwargs=True))
            stack.enter_context(layer.register_forward_hook(lambda _, __, result: run._after(result)))
        if isinstance(rotary := getattr(decoder, "rotary_emb", None), nn.Module):
            stack.enter_context(rotary.register_forward_pre_hook(of_rotary, with_kwargs=True))
        stack.enter_context(decoder.register_forward_pre_hook(of_decoder, with_kwargs=True))
        stack.enter_context(decoder.register_forward_hook(lambda _, __, result: run.take(result)))
        yield


def multiplier(embeddings: Tensor, first: Tensor | None, text: Tensor) -> float:
    """Returns the factor by which a decoder multiplies embeddings before its first layer.

    Args:
        embeddings: that it is given, ``(T, hidden)``.
        first: what its first layer is given; None: that is not known.
        text: tokens bool ``(T,)`` that nothing is added to.
    """
    if first is None or first.shape != embeddings.shape or not text.any():
        return 1.0
    factor = proportion(embeddings[text].double(), first[text].double())
    return 1.0 if factor is None else factor
