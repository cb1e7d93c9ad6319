"""Runs a model over calibration texts one decoder layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.hf.base_model import base_model_of
from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.calibrated.recorded_call import RecordedCall, first_of

_BATCH_TOKENS = 2048
"""Tokens per batch."""
_PROBE_TOKENS = 16
"""Tokens of a probe: the ops of a layer, a clamp among them, show in few."""
_SHARED = "its layers share more than hidden states"


class NotByLayersError(ValueError):
    """A model that is read layer by layer cannot be run layer by layer."""


class _Stop(Exception):
    """Ends a forward at the module whose inputs are recorded."""


class Stages:
    """The decoder layers of a model, run and calibrated one after the other.

    If the layers pass only hidden states to each other, each runs alone on the recorded outputs of the layers
    before it, which are quantized by then.  Otherwise the whole model runs for each layer.

    Attributes:
        modules: the stages.
        whole: the reason why the whole model runs for each stage; None if each stage runs alone.
        sizes: number of tokens of each batch.
    """

    def __init__(self, model: nn.Module, tokens: Tensor, batch: int, on_meta: bool = False) -> None:
        """Records the calls of the layers, to find out if they can run alone.

        Args:
            model: the model that is calibrated.
            tokens: token ids (sequences, length).
            batch: sequences that run at a time.
            on_meta: decoder layers are on the meta device, and get their weights one after the other.

        Raises:
            NotByLayersError: a model on the meta device cannot be run layer by layer.
        """
        self._model = model
        self._base = base_model_of(model)
        self._batches = list(tokens.split(batch))
        self.sizes = [part.numel() for part in self._batches]
        self.modules: list[nn.Module] = decoder_layers(model)
        self._calls: list[RecordedCall] = []
        self._probes: list[RecordedCall] = []
        self._states: list[Tensor] = []
        self._floats: list[Tensor] = []
        self._on_meta = on_meta
        self._width = 0
        if not self.modules:
            self.whole: str | None = "it has no list of layers"
        else:
            self.whole = self._prepare_on_meta() if on_meta else self._prepare()
        if on_meta and self.whole is not None:
            raise _whole_only(model, self.whole)
        if self.whole is not None:
            self._calls, self._probes, self._states = [], [], []
            self.modules = self.modules or [self._base]

    @property
    def streamed(self) -> bool:
        """True if each stage runs alone."""
        return self.whole is None

    def stage_indices(self, layers: Sequence[Layer]) -> dict[str, int]:
        """Returns the stage of each layer by name; heads and layers outside of all stages have none."""
        stages = {id(m): i for i, stage in enumerate(self.modules) for m in stage.modules()}
        return {x.name: stages[id(x.module)] for x in layers if x.kind != "head" and id(x.module) in stages}

    def sample(self, stage: int) -> Tensor:
        """Returns the output for the first text of the stage that `run_float` ran last."""
        if not self.streamed:
            return first_of(tuple(self._forward(self._batches[0][:1]).values()))
        return self._calls[stage].cut(1)(self._sample)

    def probe(self, stage: int) -> Tensor:
        """Returns the output for the first tokens of the text of `sample`: a cheap run of the stage's ops."""
        if not self.streamed:
            return first_of(tuple(self._forward(self._batches[0][:1, :_PROBE_TOKENS]).values()))
        probe = self._probes[stage]
        # more than the tokens, where the model pads them
        return probe(self._sample[:, : probe.states.shape[1]])

    def run_float(self, stage: int) -> None:
        """Runs a stage on its inputs in the float model, for hooks; call it once per stage, in order."""
        if self.streamed:
            self._sample = self._floats[0][:1]
        for index, tokens in enumerate(self._batches):
            if self.streamed:
                self._floats[index] = self._calls[stage].cut(len(tokens))(self._floats[index])
            else:
                self._forward(tokens)
        self._check_stateless(stage)

    def run_until(self, stage: int, module: nn.Module, see: Callable[[tuple[Any, ...]], None]) -> None:
        """Runs a stage batch by batch up to a module, and calls ``see`` with the module's arguments."""

        def stop(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            see(arguments)
            raise _Stop

        handle = module.register_forward_pre_hook(stop)
        try:
            for index, tokens in enumerate(self._batches):
                with suppress(_Stop):
                    if self.streamed:
                        self._calls[stage].cut(len(tokens))(self._states[index])
                    else:
                        self._forward(tokens)
        finally:
            handle.remove()

    def advance(self, stage: int) -> None:
        """Replaces the inputs of a stage by its outputs."""
        if self.streamed:
            call = self._calls[stage]
            for index, tokens in enumerate(self._batches):
                self._states[index] = call.cut(len(tokens))(self._states[index])

    def run(self, stage: int, states: Sequence[Tensor]) -> list[Tensor]:
        """Returns a streamed stage's output for a hidden state of each batch."""
        call = self._calls[stage]
        outputs = [call.cut(len(x))(x) for x in states]
        self._check_stateless(stage)
        return outputs

    def inputs(self) -> list[Tensor]:
        """Returns the inputs of the first streamed stage, by batch."""
        return list(self._states)

    def logits(self, batch: int, states: Tensor) -> Tensor:
        """Returns the model's logits of a batch if the last streamed stage's output is ``states``."""
        with _passing_through(self.modules, self._width, states):
            logits = self._model(input_ids=self._batches[batch], use_cache=False).logits
        assert isinstance(logits, Tensor)
        return logits

    def state(self) -> dict[str, list[Tensor]]:
        """Returns the inputs of the next stage, for `restore` in another run."""
        return {"states": self._states, "floats": self._floats}

    def restore(self, state: dict[str, list[Tensor]]) -> None:
        """Restores the result of `state`."""
        self._states, self._floats = state["states"], state["floats"]

    def _check_stateless(self, stage: int) -> None:
        """Raises NotByLayersError if a stage that was on the meta device has written a shared state."""
        if self._on_meta and not self._calls[stage].stateless:
            raise _whole_only(self._base, _SHARED)

    def _forward(self, tokens: Tensor) -> Any:
        return self._base(input_ids=tokens, use_cache=False)

    def _prepare(self) -> str | None:
        """Records calls and the inputs of the first layer; returns the reason if layers cannot run alone."""
        self._calls = self._record()
        if [call.module for call in self._calls] != self.modules:
            return "its layers do not run once each, in order"
        for call, following in zip(self._calls, self._calls[1:], strict=False):
            if first_of(call.output) is not following.states:
                return "it computes something between its layers"
            if following.takes_from(call.output):
                return _SHARED
        output = self._calls[0].output
        self._width = len(output) if isinstance(output, tuple) else 0
        for call in self._calls:
            call.output = None
            if not call.stateless:
                return _SHARED
        self._states = []
        for tokens in self._batches:
            first = self._record(tokens, only_first=True)[0]
            if len(tokens) == len(self._batches[0]) and not first.same_context(self._calls[0]):
                return "its layers have arguments that depend on the text"
            self._states.append(first.states)
        with _passing_through(self.modules, self._width):
            self._probes = self._record(self._batches[0][:1, :_PROBE_TOKENS])
        self._floats = list(self._states)
        self._sample = self._floats[0][:1]
        return None

    def _prepare_on_meta(self) -> str | None:
        """Prepares with layers that return their input: as a tensor, or in a tuple, as some models need."""
        reason = ""
        for width in (0, 1, 2):
            with _passing_through(self.modules, width, rest=torch.empty(0)):
                try:
                    found = self._prepare()
                except Exception as error:  # noqa: BLE001 - of transformers' code, which takes another form
                    reason = reason or f"its layers cannot be left out: {type(error).__name__}: {error}"
                    continue
            if found is None:
                return None
            reason = found
        return reason

    def _record(self, tokens: Tensor | None = None, only_first: bool = False) -> list[RecordedCall]:
        calls: list[RecordedCall] = []

        def before(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            named = dict(named)
            states, rest = (args[0], args[1:]) if args else (named.pop("hidden_states", None), ())
            calls.append(RecordedCall(module, states, rest, named))
            if only_first:
                raise _Stop

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            calls[-1].output = output

        handles = [m.register_forward_pre_hook(before, with_kwargs=True) for m in self.modules]
        handles += [m.register_forward_hook(after) for m in self.modules]
        try:
            self._forward(self._batches[0] if tokens is None else tokens)
        except _Stop:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return calls


def batch_size_for(tokens: Tensor) -> int:
    """Returns how many sequences (n, length) run at a time."""
    return max(1, _BATCH_TOKENS // tokens.shape[1])


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the module list with the most weights."""
    lists = [m for m in base_model_of(model).modules() if isinstance(m, nn.ModuleList) and len(m)]
    size = {id(m): sum(p.numel() for p in m.parameters()) for m in lists}
    return list(max(lists, key=lambda m: size[id(m)])) if lists else []


@contextmanager
def _passing_through(
    layers: Sequence[nn.Module], width: int, result: Tensor | None = None, rest: Tensor | None = None
) -> Iterator[None]:
    """Makes layers return their input, or a given ``result``.

    It is the first of a tuple of ``width``, if that is not 0, and ``rest`` stands for all others.
    """

    def forward(*arguments: Any, **named: Any) -> Any:
        states = arguments[0] if arguments else named["hidden_states"]
        states = states if result is None else result
        return (states, *[rest] * (width - 1)) if width else states

    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                del layer.__dict__["forward"]
            else:
                layer.forward = own  # type: ignore[method-assign]


def _whole_only(model: nn.Module, reason: str) -> NotByLayersError:
    return NotByLayersError(
        f"{type(model).__name__} cannot be calibrated layer by layer ({reason}): load the whole model and "
        "use torch_armllm.quantize(model, …, calibration=…) and model.save_pretrained"
    )
