"""`plan_create` checks a program before anything runs: programs are read from disk too."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch

from torch_armllm.plan.placed_program import lay_out
from torch_armllm.plan.program import NOTHING, Operand, Program, Storage

create = torch.ops.armllm.plan_create


def program() -> tuple[list[torch.Tensor], list[int], list[float]]:
    """Returns the arguments of `plan_create` for an embedding, a norm and the best tokens."""
    p = Program()
    ids = Operand("input", 0, torch.int64)
    x = p.allocate(8, torch.float32)
    p.emit("embed", out=x, ids=ids, table=p.constant(torch.randn(10, 8)), width=8, vocab_size=10)
    y = p.allocate(8, torch.float32)
    nothing = Operand("none", 0, torch.float32)
    p.emit(
        "rms_norm",
        x=x,
        out=y,
        residual=nothing,
        sum=nothing,
        weight=p.constant(torch.ones(8)),
        bias=nothing,
        rows_per_token=1,
        width=8,
        eps=1e-5,
        weight_offset=0.0,
    )
    best = p.allocate(1, torch.int64)
    p.emit("best_tokens", logits=y, ids=best, vocab_size=8, communicator=0, first=0)
    assert best.storage is not None
    p.outputs.append(best.storage)
    return lay_out(p).encode()


def test_valid_program_runs() -> None:
    plan = create(*program())
    (best,) = torch.ops.armllm.plan_run(plan, [torch.arange(5)], 5)
    torch.ops.armllm.plan_free(plan)
    assert best.shape == (5, 1)


@pytest.mark.parametrize(("remove", "message"), [("floats", "no float 0 of 0"), ("constants", "no constant")])
def test_missing_parts_raise(remove: str, message: str) -> None:
    constants, integers, floats = program()
    with pytest.raises(RuntimeError, match=message):
        create([] if remove == "constants" else constants, integers, [] if remove == "floats" else floats)


def test_output_larger_than_the_memory_raises() -> None:
    constants, integers, floats = program()
    integers[2] = 2**40  # columns of the first output
    plan = create(constants, integers, floats)
    with pytest.raises(RuntimeError, match=r"no memory for a tensor of shape \(5000, 1099511627776\)"):
        torch.ops.armllm.plan_run(plan, [torch.zeros(5000, dtype=torch.int64)], 5000)
    torch.ops.armllm.plan_free(plan)


def route(weights_column: int) -> None:
    """Creates a plan that routes tokens, and frees it."""
    p = Program()
    ids = Operand("input", 0, torch.int64)
    x = p.allocate(4, torch.float32)
    p.emit("embed", out=x, ids=ids, table=p.constant(torch.randn(10, 4)), width=4, vocab_size=10)
    weights, experts = p.allocate(2, torch.float32), p.allocate(2, torch.int32)
    moved = dataclasses.replace(weights, column=weights_column)
    p.emit(
        *("route",), logits=x, weights=moved, ids=experts, correction_bias=NOTHING, token_ids=NOTHING,
        choices=NOTHING, vocabulary=0, experts=4, top_k=2,
        groups=1, top_k_groups=1, scoring="softmax", renormalize=False, scale=1.0, epsilon=1e-20,
    )  # fmt: skip
    assert x.storage is not None
    p.outputs.append(x.storage)
    torch.ops.armllm.plan_free(create(*lay_out(p).encode()))


def test_results_that_overlap_raise() -> None:
    """The kernel reads the ids back after it wrote the weights over them."""
    route(0)
    with pytest.raises(RuntimeError, match="two results of an instruction overlap"):
        route(16)


@pytest.mark.parametrize("space", ["constant", "input"])
def test_writing_to_constants_and_inputs_raises(space: Literal["constant", "input"]) -> None:
    p = Program()
    ids, table = Operand("input", 0, torch.int64), p.constant(torch.randn(10, 8))
    out = Operand(space, 0, torch.float32, (8,))
    p.emit("embed", out=out, ids=ids, table=table, width=8, vocab_size=10)
    p.outputs.append(Storage(8, torch.float32))
    with pytest.raises(RuntimeError, match="writes to a constant or to an input"):
        create(*lay_out(p).encode())


def by_position(operand: Operand, constant: torch.Tensor | None = None) -> int:
    """Returns a plan of the logarithm of an operand plus one."""
    p = Program()
    if constant is not None:
        p.constant(constant)
    out = p.allocate(1, torch.float32)
    step = {"op": "log1p", "number": 0.0, "a": 0, "b": 0, "c": 0}
    read = {"x": operand, "head_stride": 0, "by_token": operand.space != "constant", "column_stride": 0}
    sizes = {"out_head_stride": 0, "out_column_stride": 1, "heads": 1, "width": 1}
    p.emit("pointwise", out=out, **sizes, operands=[read], steps=[step])
    assert out.storage is not None
    p.outputs.append(out.storage)
    handle: int = create(*lay_out(p).encode())
    return handle


def test_programs_read_positions() -> None:
    positions = torch.tensor([0, 5, 1 << 23])
    plan = by_position(Operand("input", 0, torch.int64, stride=1))
    (found,) = torch.ops.armllm.plan_run(plan, [positions], 3)
    torch.testing.assert_close(found.flatten(), torch.log1p(positions.float()))
    with pytest.raises(RuntimeError, match="has 3 elements for 4 tokens"):
        torch.ops.armllm.plan_run(plan, [positions], 4)
    torch.ops.armllm.plan_free(plan)


def test_programs_read_other_whole_numbers_nowhere() -> None:
    with pytest.raises(RuntimeError, match="must have a floating-point type"):
        by_position(Operand("input", 0, torch.int32, stride=1))
    with pytest.raises(RuntimeError, match="must have a floating-point type"):
        by_position(Operand("constant", 0, torch.int64), torch.arange(3))
    with pytest.raises(RuntimeError, match="bytes of a memory of"):
        by_position(Operand("arena", 0, torch.int64, column=1 << 20, stride=1))
