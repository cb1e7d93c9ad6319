"""Rows that tensor parallel ranks write to memory that they share; the ranks are threads here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random

import pytest
import torch
from torch import Tensor

from tests.support.models import tiny
from tests.support.rank_plans import built
from tests.support.ranks import at_once, communicators
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.placed_program import lay_out
from torch_armllm.plan.program import Instruction, Operand, Program
from torch_armllm.plan.sample_steps import sample_hidden
from torch_armllm.plan.share_rows import share_rows
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.recipe import Recipe

WIDTH = 8


@pytest.fixture
def handles() -> Iterator[list[int]]:
    with communicators(2, shared_bytes=1 << 16) as (_, opened):
        yield opened


def begun(handle: int) -> tuple[Program, Operand]:
    """Returns a program that gathers the results of an activation, and the rows of all columns."""
    program = Program()
    x = program.allocate(WIDTH, torch.float32)
    table = program.constant(torch.randn(4, WIDTH))
    ids = Operand("input", 0, torch.int64)
    program.emit("embed", out=x, ids=ids, table=table, width=WIDTH, vocab_size=4)
    own, whole = (program.allocate(columns, torch.float32) for columns in (WIDTH, 2 * WIDTH))
    program.emit("gated_act", gate=x, up=x, out=own, width=WIDTH, activation="silu")
    parts = [{"columns": WIDTH}] * 2
    program.emit("gather_columns", x=own, out=whole, communicator=handle, parts=parts)
    return program, whole


def norm(x: Operand, out: Operand) -> dict[str, Operand | int | float]:
    nothing = Operand("none", 0, torch.float32)
    views = dict.fromkeys(("residual", "sum", "weight", "bias"), nothing)
    numbers = {"rows_per_token": 1, "width": x.width, "eps": 1e-6, "weight_offset": 0.0}
    return {"x": x, "out": out, **views, **numbers}


def test_results_of_other_instructions_are_copied(handles: list[int]) -> None:
    program, whole = begun(handles[0])
    out = program.allocate(2 * WIDTH, torch.float32)
    program.emit("rms_norm", **norm(whole, out))
    program.outputs.append(out.storage)  # type: ignore[arg-type]
    assert share_rows(program) == 0, "an activation may read what it overwrites"
    assert "meet" not in lay_out(program).opcodes


@torch.no_grad()
def test_many_steps_of_uneven_ranks_have_the_bits_of_one() -> None:
    model = tiny("llama", torch.bfloat16, num_hidden_layers=3)
    quantize(model, Recipe.of("int4"), progress=False)
    one, shape, _ = built(model, None)
    sizes = [1, 5, 33, 2, 17, 1, 64, 3] * 3
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(3, 90, (1, n), generator=generator) for n in sizes]
    positions = [torch.arange(n)[None] for n in sizes]

    def hidden(plan: NativePlan, shape: Shape, text: int) -> Tensor:
        return sample_hidden(plan, shape, texts[text], positions[text], steps=(sizes[text],))

    expected = [hidden(one, shape, text) for text in range(len(texts))]
    with communicators(3, 1 << 12, shared_bytes=1 << 18) as (_, opened):

        def work(rank: int) -> list[Tensor]:
            random = Random(rank)
            found = []
            for text in range(len(texts)):
                time.sleep(random.choice([0, 0, 0.003]))
                found.append(hidden(*parts[rank][:2], text))
            return found

        parts = [built(model, RankGroup(rank, 3, opened[rank], 16)) for rank in range(3)]
        assert parts[0][0].opcodes[0] == "meet"
        for found in at_once(3, work):
            assert all(map(torch.equal, found, expected))


def test_a_step_that_needs_more_than_ranks_share_is_refused() -> None:
    program = Program()
    x = program.allocate(WIDTH, torch.float32)
    table = program.constant(torch.randn(4, WIDTH))
    program.emit("embed", out=x, ids=Operand("input", 0, torch.int64), table=table, width=WIDTH, vocab_size=4)
    program.outputs.append(x.storage)  # type: ignore[arg-type]
    with communicators(1, shared_bytes=1 << 10) as (_, (handle,)):
        sizes = {"communicator": handle, "bytes_per_token": 512}
        program.instructions.insert(0, Instruction("meet", sizes))
        plan = NativePlan(lay_out(program))
        ids = torch.zeros(1, 3, dtype=torch.int64)
        assert plan._run(plan._handle, [ids[:, :2]], 2)[0].shape == (2, WIDTH)
        with pytest.raises(RuntimeError, match="set max_num_batched_tokens lower"):
            plan._run(plan._handle, [ids], 3)
        program.instructions.insert(1, Instruction("meet", sizes))
        with pytest.raises(RuntimeError, match="ranks meet twice"):
            NativePlan(lay_out(program))
        program.instructions[:2] = [Instruction("meet", sizes | {"bytes_per_token": 0})]
        with pytest.raises(RuntimeError, match="bytes of a token that ranks share is 0"):
            NativePlan(lay_out(program))
