"""Creation of an executable plan from a rewritten graph."""

from __future__ import annotations

from torch import Tensor, fx

from torch_armllm.capture.markers.given_rows import given_as_input
from torch_armllm.plan.lower import lower
from torch_armllm.plan.lowering import Unlowerable
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.placed_program import lay_out
from torch_armllm.plan.step import Plan, StepInputs


class GraphPlan:
    """A plan that runs the graph node by node; for graphs with ops that the native plan does not support.

    Args:
        module: the rewritten graph.
        why_not_native: the reason.
    """

    def __init__(self, module: fx.GraphModule, why_not_native: str) -> None:
        self._is_given = given_as_input(module)
        self._module = module
        self.why_not_native = why_not_native

    def run(self, inputs: StepInputs) -> Tensor:
        """See `Plan.run`."""
        i = inputs
        given: tuple[Tensor, ...] = ()
        if self._is_given:
            assert i.given is not None
            given = (i.given[None],)
        out: Tensor = self._module(
            i.input_ids,
            i.position_ids,
            i.slots,
            i.block_table,
            i.query_start,
            i.seq_lens,
            i.max_seq_len,
            *i.caches,
            *given,
        )
        return out[0]


def make_plan(module: fx.GraphModule, native: bool = True) -> tuple[Plan, str | None]:
    """Returns a plan for a rewritten graph, and the reason why it is not a native plan (None if it is).

    Args:
        module: the rewritten graph.
        native: False for a plan that runs node by node.
    """
    if not native:
        reason = "its native plan computes other values"
        return GraphPlan(module, reason), reason
    try:
        return NativePlan(lay_out(lower(module))), None
    except Unlowerable as unlowerable:
        return GraphPlan(module, str(unlowerable)), str(unlowerable)
