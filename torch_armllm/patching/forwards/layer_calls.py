"""Computation of the calls of an encoder of audio or images: plans compute its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torch_armllm.patching.forwards.calls import CallArguments, Calls
from torch_armllm.patching.forwards.unserved import Unserved

if TYPE_CHECKING:
    from torch_armllm.patching.forwards.encoder_layers import LayersPlan  # imports transformers

LARGEST_DIFFERENCE = 0.1
"""Of results by a plan and by modules; hidden states were compared before, to the bounds of rounding."""


class LayerCalls(Calls):
    """Computation of an encoder's calls whose inputs are no tokens; its modules compute all but the layers.

    Args:
        base: the encoder.
        plans: each of some consecutive layers, all of them in order.  Results of layers between the last one
            of a plan are not kept.
        all_means_kept: a caller that asks for all hidden states reads none but the kept ones, as models of
            images do before transformers 5.23; the others are then those after the plan's last layer.
    """

    changes_modules = True

    def __init__(self, base: nn.Module, plans: Sequence[LayersPlan], *, all_means_kept: bool = False) -> None:
        super().__init__(base)
        self.plans = list(plans)
        self._all_means_kept = all_means_kept
        self._kept = [0]
        for plan in self.plans:
            self._kept.append(self._kept[-1] + len(plan.layers))

    @property
    def count(self) -> int:
        """Number of calls that plans computed."""
        return self.plans[-1].calls

    def compute(self, call: CallArguments) -> Any:
        """See `Calls.compute`."""
        self._check(call.named)
        with self._layers_by_plans():
            return self.by_modules(call)

    def _check(self, named: dict[str, Any]) -> None:
        if self.base.training:
            raise Unserved("the model is in training mode")
        for name in ("output_attentions", "output_hidden_states"):
            requested = named.get(name)
            if requested is None:
                requested = getattr(self.base.config, name, False)
            if requested is False or (name == "output_hidden_states" and self._keeps(requested)):
                continue
            raise Unserved(f"{name} is requested")

    def _keeps(self, requested: Any) -> bool:
        """True if the hidden states of these numbers, that before the first layer is 0, are kept."""
        if requested is True:
            return self._all_means_kept
        numbers = [requested] if isinstance(requested, int) else list(requested)
        count = self._kept[-1] + 1
        return {number % count for number in numbers} <= set(self._kept)

    @contextmanager
    def _layers_by_plans(self) -> Iterator[None]:
        """Lets the first layer of each plan compute all of them while the context lasts."""
        try:
            for plan in self.plans:
                for number, layer in enumerate(plan.layers):
                    layer.__dict__["forward"] = plan.skip if number else plan
            yield
        finally:
            for plan in self.plans:
                for layer in plan.layers:
                    layer.__dict__.pop("forward", None)


def is_close(found: Tensor, expected: Tensor) -> bool:
    """True if results by a plan differ from those by modules by no more than rounding explains."""
    difference = (found.float() - expected.float()).norm()
    return bool(difference <= LARGEST_DIFFERENCE * expected.float().norm())
