"""The output layer as a plan that runs after the base model's and also computes the most probable tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.collective import gather_columns
from torch_armllm.plan.add_adapters import add_adapters
from torch_armllm.plan.expression import Expression, apply, number, pointwise_fields
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.placed_program import lay_out
from torch_armllm.plan.plan_model import HeadWeights, LogitScaling
from torch_armllm.plan.program import NOTHING, Operand, Program
from torch_armllm.plan.shared_buffer import SharedBuffer
from torch_armllm.plan.step import StepInputs, StepResult

_KEPT = 8
"""Numbers of tokens whose results keep their memory."""


class FusedHead:
    """Computes logits and the most probable tokens of a step in one call that starts the threads once.

    Of tensor parallel ranks, each returns its own logits; those of all are gathered only where a token has no
    most probable successor.

    Results of as many tokens are written to the same memory: they are valid until the next step.

    Args:
        body: plan of the base model; computes the hidden states of all tokens.
        head: weights of the output layer.
        drawable: number of token ids that may be sampled; higher ids are never the most probable ones.
        hidden_size: columns of the last hidden state; None: all.
        kept: columns of the body's results that are returned too; None: none.
    """

    def __init__(
        self,
        body: NativePlan,
        head: HeadWeights,
        drawable: int,
        hidden_size: int | None = None,
        kept: range | None = None,
    ) -> None:
        self._body = body
        columns = body.program.columns if hidden_size is None else hidden_size
        self._kept = kept
        program = _program(body, head, min(drawable, head.out_features), columns, kept)
        self._head = NativePlan(lay_out(program))
        self._replay = body.replay(self._head)
        self._logits, self._dtype = head.own_features, body.program.dtype
        self._ranks = head.ranks
        self._inputs: StepInputs | None = None  # of the last step
        self._binding = 0
        self._times = torch.empty(body.instructions + self._head.instructions + 2, 3, dtype=torch.int64)
        self._reserved: dict[int, tuple[list[Tensor], StepResult]] = {}  # by number of tokens
        self._results, self._computed = self._reserve(1)

    def run(self, inputs: StepInputs) -> StepResult:
        """Computes a step in which every token needs logits."""
        if inputs is not self._inputs or not self._replay(self._binding, None):
            self._begin(inputs)
        return self._gathered()

    def run_timed(self, inputs: StepInputs) -> tuple[StepResult, Tensor | None]:
        """Computes a step like `run`, and times it if it replays the last one with new values.

        Returns:
            The result, and a table as of `NativePlan.profile` for base model and head; None if the step was
            not a replay.
        """
        if inputs is self._inputs and self._replay(self._binding, self._times.data_ptr()):
            return self._gathered(), self._times
        self._begin(inputs)
        return self._gathered(), None

    def _gathered(self) -> StepResult:
        """Returns the result with the logits of all ranks, where a token's are not numbers.

        All ranks know the same tokens, so that they gather in the same steps.
        """
        computed, ranks = self._computed, self._ranks
        if ranks is None or computed.best is None or -1 not in computed.best:
            return computed
        whole = gather_columns(computed.logits, ranks.communicator, ranks.columns)
        return computed._replace(logits=whole)

    def _begin(self, inputs: StepInputs) -> None:
        self._inputs = None
        if inputs.tokens != self._results[0].shape[0]:
            self._results, self._computed = self._reserve(inputs.tokens)
        self._binding = self._body.run_then(self._head, inputs, self._results)
        self._inputs = inputs

    def _reserve(self, tokens: int) -> tuple[list[Tensor], StepResult]:
        """Returns memory for the results of ``tokens`` tokens; draft tokens change the number often."""
        reserved = self._reserved.pop(tokens, None)
        if reserved is None:
            best = SharedBuffer("q", tokens)
            logits = torch.empty(tokens, self._logits, dtype=self._dtype)
            results = [logits, best.view(tokens, 1)]
            hidden = None
            if self._kept is not None:
                hidden = torch.empty(tokens, len(self._kept), dtype=self._dtype)
                results.append(hidden)
            reserved = results, StepResult(logits, best.items, hidden)
            if len(self._reserved) == _KEPT:
                del self._reserved[next(iter(self._reserved))]  # the least recently used
        self._reserved[tokens] = reserved
        return reserved


def _program(body: NativePlan, head: HeadWeights, drawable: int, columns: int, kept: range | None) -> Program:
    program = Program()
    dtype, stride = body.program.dtype, body.program.columns
    hidden = Operand("input", 0, dtype, (columns,), 0, stride)
    weight = program.constant(head.weight)
    bias = NOTHING if head.bias is None else program.constant(head.bias)
    logits = program.allocate(head.own_features, dtype)
    if head.scheme is None:
        program.emit(
            "dense_linear",
            x=hidden,
            out=logits,
            weight=weight,
            bias=bias,
            in_features=columns,
            out_features=head.own_features,
        )
    else:
        program.emit(
            "linear",
            x=hidden,
            out=logits,
            residual=NOTHING,
            weight=weight,
            bias=bias,
            panel_stride=weight.stride,
            scheme="i8" if head.scheme == "int8" else head.scheme,
            in_features=columns,
            out_features=head.own_features,
            digits=head.digits,
            rotated=head.rotated,
        )
    if head.lora is not None:
        add_adapters(program, hidden, logits, head.lora.a, head.lora.b, head.lora.ranks, head.lora.adapters)
    if head.scaling is not None:
        logits = _scaled(program, logits, head.scaling)
    best = program.allocate(1, torch.int64)
    ranks = head.ranks
    program.emit(
        "best_tokens",
        logits=logits,
        ids=best,
        vocab_size=drawable if ranks is None else ranks.own_below(drawable),
        communicator=0 if ranks is None else ranks.communicator,
        first=0 if ranks is None else ranks.first,
    )
    outputs = [logits, best]
    if kept is not None:
        rows = Operand("input", 0, dtype, (len(kept),), kept.start, stride)
        copy = program.allocate(len(kept), dtype)
        expression = Expression(rows.inner, dtype, operand=rows)
        program.emit("pointwise", **pointwise_fields(expression, copy))
        outputs.append(copy)
    for output in outputs:
        assert output.storage is not None
        program.outputs.append(output.storage)
    return program


def _scaled(program: Program, logits: Operand, scaling: LogitScaling) -> Operand:
    scaled = program.allocate(logits.width, logits.dtype)
    rows = Expression(logits.inner, logits.dtype, operand=logits)
    expression = apply(scaling.op, logits.dtype, rows, number(scaling.number))
    program.emit("pointwise", **pointwise_fields(expression, scaled))
    return scaled
