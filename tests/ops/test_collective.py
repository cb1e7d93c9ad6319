"""Exchanges between ranks, which are threads here."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.ranks import at_once, communicators, network_communicators
from torch_armllm.ops import collective
from torch_armllm.ops.linear import interleave_panels
from torch_armllm.ops.moe import int4_moe
from torch_armllm.ops.sample import best_tokens
from torch_armllm.parallel.rank_group import shares
from torch_armllm.plan.placed_program import lay_out
from torch_armllm.plan.program import Operand, Program
from torch_armllm.quant.packing import quantize_matrices
from torch_armllm.quant.schemes.registry import scheme_named


@settings(max_examples=16, deadline=None)
@given(
    rows=st.sampled_from((0, 1, 2, 7, 130)),
    columns=st.lists(st.sampled_from((1, 16, 33, 400)), min_size=1, max_size=4),
    buffer_bytes=st.sampled_from((64, 832, 1 << 16)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
)
def test_every_rank_gets_the_columns_of_all(
    rows: int, columns: list[int], buffer_bytes: int, dtype: torch.dtype
) -> None:
    size = max(buffer_bytes, -(-max(columns) * dtype.itemsize // 64) * 64)
    parts = [torch.randn(rows, n).to(dtype) for n in columns]
    expected = torch.cat(parts, 1)
    with communicators(len(columns), size) as (_, handles):

        def work(rank: int) -> list[Tensor]:
            wide = torch.cat([parts[rank], parts[rank]], 1)[:, : columns[rank]]  # rows with a stride
            given = parts[rank], wide, parts[rank].unsqueeze(0)
            return [collective.gather_columns(x, handles[rank], columns) for x in given]

        for first, second, third in at_once(len(columns), work):
            assert torch.equal(first, expected) and torch.equal(second, expected)
            assert torch.equal(third, expected.unsqueeze(0))


@settings(max_examples=10, deadline=None)
@given(
    rows=st.sampled_from((0, 1, 7, 130)),
    columns=st.lists(st.sampled_from((1, 16, 33, 4000)), min_size=2, max_size=4),
    buffer_bytes=st.sampled_from((16_000, 1 << 20)),
)
def test_ranks_that_share_no_memory(rows: int, columns: list[int], buffer_bytes: int) -> None:
    parts = [torch.randn(rows, n) for n in columns]
    with network_communicators(len(columns), buffer_bytes) as handles:

        def work(rank: int) -> list[Tensor]:
            return [collective.gather_columns(parts[rank], handles[rank], columns) for _ in range(3)]

        for gathered in at_once(len(columns), work):
            assert all(torch.equal(each, torch.cat(parts, 1)) for each in gathered)


def test_a_rank_that_is_gone_or_silent_on_a_network_is_an_error() -> None:
    x = torch.zeros(1, 1)
    with (
        network_communicators(2, timeout=0.3) as handles,
        pytest.raises(RuntimeError, match="rank 1 has not"),
    ):
        collective.gather_columns(x, handles[0], [1, 1])
    own, other = socket.socketpair()
    memory = collective.communicator_memory(2, 64)
    handle = collective.open_communicator(memory, 0, 2, 64, sockets=[-1, own.fileno()])
    other.close()
    with own, pytest.raises(RuntimeError, match="(closed its|the) connection"):
        collective.gather_columns(x, handle, [1, 1])
    collective.close_communicator(handle)
    with pytest.raises(RuntimeError, match="1 sockets for 2 ranks"):
        collective.open_communicator(memory, 0, 2, 64, sockets=[3])


def best_of_rank(own: Tensor, first: int, communicator: int, rows: int) -> list[int]:
    """Returns what a rank finds with its own logits, which a program looks up by row."""
    program = Program()
    logits, best = program.allocate(own.shape[1], own.dtype), program.allocate(1, torch.int64)
    ids, table = Operand("input", 0, torch.int64), program.constant(own)
    sizes = {"width": own.shape[1], "vocab_size": own.shape[0]}
    program.emit("embed", out=logits, ids=ids, table=table, **sizes)
    ranks = {"communicator": communicator, "first": first}
    program.emit("best_tokens", logits=logits, ids=best, vocab_size=own.shape[1], **ranks)
    assert best.storage is not None
    program.outputs.append(best.storage)
    plan = torch.ops.armllm.plan_create(*lay_out(program).encode())
    (found,) = torch.ops.armllm.plan_run(plan, [torch.arange(rows)], rows)
    torch.ops.armllm.plan_free(plan)
    return list(map(int, found[:, 0]))


@pytest.mark.parametrize("rows", [1, 5, 30])
@pytest.mark.parametrize("by_network", [False, True])
def test_ranks_find_the_best_tokens_of_all(rows: int, by_network: bool) -> None:
    """Equal logits: the lowest token, whichever rank has it; no number above -inf: no token."""
    logits = torch.randn(30, 60)
    logits[0, [7, 25, 59]] = 9.0
    logits[1, [40, 59]] = 8.0
    logits[2], logits[3] = float("nan"), float("-inf")
    logits[4, :30] = float("nan")
    columns = [20, 24, 16]
    parts = logits.split(columns, 1)
    with communicators(3, 64) as (_, shared), network_communicators(3, 64) as linked:  # 8 rows a round
        handles = linked if by_network else shared

        def work(rank: int) -> list[int]:
            return best_of_rank(parts[rank].contiguous(), sum(columns[:rank]), handles[rank], rows)

        found = at_once(3, work)
    assert found == [best_tokens(logits[:rows]).tolist()] * 3
    assert found[0][:1] == [7] and (rows == 1 or found[0][1:4] == [40, -1, -1])


def test_rows_that_exceed_the_buffers_take_several_rounds() -> None:
    parts = [torch.randn(1000, 16), torch.randn(1000, 3)]
    with communicators(2, 128) as (_, handles):
        gathered = at_once(2, lambda r: collective.gather_columns(parts[r], handles[r], [16, 3]))
    assert all(torch.equal(x, torch.cat(parts, 1)) for x in gathered)


@pytest.mark.parametrize(
    ("x", "columns", "message"),
    [
        (torch.zeros(2, 3), [4], r"x has the shape \(2, 3\); rank 0 has 4 columns"),
        (torch.zeros(2, 3), [3, 3], "2 sizes for 1 ranks"),
        (torch.zeros(2, 3), [0], "a rank has 0 columns"),
        (torch.zeros(2, 3, dtype=torch.int64), [3], "float32, bfloat16 or float16"),
    ],
)
def test_wrong_sizes_are_refused(x: Tensor, columns: list[int], message: str) -> None:
    with communicators(1) as (_, (handle,)), pytest.raises(RuntimeError, match=message):
        collective.gather_columns(x, handle, columns)


@pytest.mark.parametrize(
    ("rank", "ranks", "size", "message"),
    [
        (2, 2, 1 << 12, "there is no rank 2 of 2"),
        (0, 65, 1 << 12, "there is no rank 0 of 65"),
        (0, 2, 100, "whole lines of 64"),
        (0, 2, 1 << 20, "memory must be"),
    ],
)
def test_communicators_of_wrong_sizes_are_refused(rank: int, ranks: int, size: int, message: str) -> None:
    memory = torch.zeros(1 << 15, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=message):
        collective.open_communicator(memory, rank, ranks, size)


def test_a_closed_communicator_is_unknown() -> None:
    with communicators(1) as (_, (handle,)):
        pass
    with pytest.raises(RuntimeError, match=f"no communicator with handle {handle}"):
        collective.gather_columns(torch.zeros(1, 1), handle, [1])


def test_a_rank_that_does_not_answer_is_an_error() -> None:
    with communicators(2, timeout=0.2) as (_, handles), pytest.raises(RuntimeError, match="rank 1 has not"):
        collective.gather_columns(torch.zeros(1, 1), handles[0], [1, 1])


def test_a_rank_that_failed_ends_the_exchange() -> None:
    with communicators(2) as (memory, handles):
        memory[:8].view(torch.int64).fill_(2)
        with pytest.raises(RuntimeError, match="rank 1 has failed"):
            collective.gather_columns(torch.zeros(1, 1), handles[0], [1, 1])


def _experts(
    experts: int, hidden: int, inner: int, scheme: str, gated: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Returns packed random weights of experts, and their biases."""
    packer = scheme_named("int8" if scheme == "i8" else scheme)

    def packed(rows: int, columns: int) -> Tensor:
        return quantize_matrices(list(torch.randn(experts, rows, columns)), packer)[0]

    gate_up, down = packed(inner, hidden), packed(hidden, inner)
    if gated:
        gate_up = interleave_panels(gate_up, packed(inner, hidden))
    biases = (
        torch.randn(experts, 2, inner) if gated else torch.randn(experts, inner),
        torch.randn(experts, hidden),
    )
    return gate_up, down, biases


@settings(max_examples=12, deadline=None)
@given(
    ranks=st.sampled_from((2, 3)),
    tokens=st.sampled_from((1, 2, 9, 60)),
    sizes=st.sampled_from(((48, 96), (80, 50), (100, 33))),
    scheme=st.sampled_from(("g32iz", "g32", "i8")),
    gated=st.booleans(),
    weigh_input=st.booleans(),
    identities=st.sampled_from((0, 2)),
)
def test_ranks_compute_the_bits_of_whole_experts(
    ranks: int,
    tokens: int,
    sizes: tuple[int, int],
    scheme: str,
    gated: bool,
    weigh_input: bool,
    identities: int,
) -> None:
    torch.manual_seed(tokens + sizes[0])
    experts, (hidden, inner) = 5, sizes
    if inner < 16 * ranks:
        ranks = 2
    gate_up, down, biases = _experts(experts, hidden, inner, scheme, gated)
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, 3)
    ids = torch.randint(0, experts + identities, (tokens, 3))
    rest = "silu", 7.0, *biases, gated, weigh_input, identities
    expected = int4_moe(x, ids, weights, gate_up, down, inner, scheme, *rest)
    parts = [shares(-(-n // 16), ranks) for n in (inner, hidden)]
    columns = [
        [min(16 * p.stop, n) - 16 * p.start for p in part]
        for part, n in zip(parts, (inner, hidden), strict=True)
    ]
    step = 2 if gated else 1
    with communicators(ranks, 1 << 12) as (_, handles):

        def work(rank: int) -> Tensor:
            first, second = (part[rank] for part in parts)
            own = gate_up[:, step * first.start : step * first.stop], down[:, second.start : second.stop]
            return int4_moe(
                *(x, ids, weights, *own, inner, scheme, *rest),
                communicator=handles[rank],
                inner_columns=columns[0],
                outer_columns=columns[1],
            )

        assert torch.equal(torch.cat(at_once(ranks, work), 1), expected)


@settings(max_examples=16, deadline=None)
@given(
    ranks=st.sampled_from((1, 2, 3, 5)),
    tokens=st.sampled_from((0, 1, 2, 9, 60, 200)),
    sizes=st.sampled_from(((48, 96), (80, 50), (100, 33))),
    scheme=st.sampled_from(("g32iz", "g32i", "g32", "i8")),
    gated=st.booleans(),
    weigh_input=st.booleans(),
    identities=st.sampled_from((0, 2)),
    routing=st.sampled_from(("even", "one expert", "one rank has none")),
    by_network=st.booleans(),
)
def test_ranks_with_whole_experts_compute_the_bits_of_one(
    ranks: int,
    tokens: int,
    sizes: tuple[int, int],
    scheme: str,
    gated: bool,
    weigh_input: bool,
    identities: int,
    routing: str,
    by_network: bool,
) -> None:
    torch.manual_seed(tokens + sizes[0])
    experts, (hidden, inner) = 7, sizes
    gate_up, down, biases = _experts(experts, hidden, inner, scheme, gated)
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, 3)
    first = len(shares(experts, ranks)[0]) if routing == "one rank has none" and ranks > 1 else 0
    ids = torch.randint(first, experts + identities, (tokens, 3))
    if routing == "one expert":
        ids.fill_(4)
    rest = "silu", 7.0, *biases, gated, weigh_input, identities
    expected = int4_moe(x, ids, weights, gate_up, down, inner, scheme, *rest)
    parts = shares(experts, ranks)
    opened = network_communicators(ranks, 1 << 12) if by_network else communicators(ranks, 1 << 12)
    with opened as found:
        handles = found if isinstance(found, list) else found[1]

        def work(rank: int) -> list[Tensor]:
            own = (each[parts[rank].start : parts[rank].stop] for each in (gate_up, down))
            given = x, ids, weights, *own, inner, scheme, *rest
            counts = {"communicator": handles[rank], "rank_experts": [len(part) for part in parts]}
            return [int4_moe(*given, **counts) for _ in range(2)]

        for found in at_once(ranks, work):
            assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize(
    ("counts", "hidden", "message"),
    [
        ({"rank_experts": [3, 4]}, 48, "has 2 numbers for 1 ranks"),
        ({"rank_experts": [4]}, 48, "gate_up holds 3 experts; rank 0 has 4"),
        ({"rank_experts": [0]}, 48, "a rank has 0 experts"),
        ({"rank_experts": [3], "inner_columns": [48]}, 48, "give one of both"),
        ({"rank_experts": [3]}, 1040, "rows of 1040 do not fit the communicator's buffers of 4096 bytes"),
    ],
)
def test_wrong_shares_of_experts_are_refused(counts: dict[str, list[int]], hidden: int, message: str) -> None:
    gate_up, down, _ = _experts(3, hidden, 48, "g32i", True)
    x, ids, weights = torch.randn(2, hidden), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    with communicators(1, 1 << 12) as (_, (handle,)), pytest.raises(RuntimeError, match=message):
        int4_moe(x, ids, weights, gate_up, down, 48, "g32i", communicator=handle, **counts)


def test_experts_whose_results_take_several_passes_and_rounds() -> None:
    torch.manual_seed(0)
    gate_up, down, _ = _experts(4, 1280, 32, "g32i", False)
    x, weights, ids = torch.randn(900, 1280), torch.rand(900, 2), torch.randint(0, 4, (900, 2))
    rest: dict[str, Any] = {"scheme": "g32i", "gated": False}
    expected = int4_moe(x, ids, weights, gate_up, down, 32, **rest)
    with communicators(2, 1 << 18) as (_, handles):

        def work(rank: int) -> Tensor:
            own = (each[2 * rank : 2 * rank + 2] for each in (gate_up, down))
            counts = {"communicator": handles[rank], "rank_experts": [2, 2]}
            return int4_moe(x, ids, weights, *own, 32, **rest, **counts)

        assert all(torch.equal(found, expected) for found in at_once(2, work))
