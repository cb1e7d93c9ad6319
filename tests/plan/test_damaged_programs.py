"""Damaged programs that name more work than their memory holds: refused when the plan is created.

Heads that are written to the same elements, or packed weights of the same bytes, fit any memory.  A step of
billions of them does not end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.support.ranks import communicators
from torch_armllm.ops import linear
from torch_armllm.ops.tables import INSTRUCTIONS
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.placed_program import lay_out
from torch_armllm.plan.program import NOTHING, Operand, Program

IDS = Operand("input", 0, torch.int64)
HEADS, SIZE, VOCABULARY = 4, 8, 5
WIDTH = HEADS * SIZE
MANY = 2**31 - 1


def begun() -> tuple[Program, Operand]:
    """Returns a program that looks up embeddings, and their rows."""
    program = Program()
    rows = program.allocate(WIDTH, torch.float32, (HEADS, SIZE))
    table = program.constant(torch.randn(VOCABULARY, WIDTH))
    program.emit("embed", out=rows, ids=IDS, table=table, width=WIDTH, vocab_size=VOCABULARY)
    return program, rows


def run(program: Program, result: Operand) -> torch.Tensor:
    assert result.storage is not None
    program.outputs.append(result.storage)
    plan = NativePlan(lay_out(program))
    found: torch.Tensor = plan._run(plan._handle, [torch.arange(3)[None]], 3)[0]
    return found


def pointwise(heads: int, stride: int, width: int, step: int = 1, read: int = 1) -> torch.Tensor:
    """Copies heads of embeddings, whose elements are ``step`` apart where they are written."""
    program, rows = begun()
    out = program.allocate(WIDTH, torch.float32, (HEADS, SIZE))
    operand = {"x": rows, "head_stride": 0, "by_token": True, "column_stride": read}
    program.emit("pointwise", out=out, out_head_stride=stride, out_column_stride=step, heads=heads,
                 width=width, operands=[operand], steps=[])  # fmt: skip
    return run(program, out)


def rope(heads: int, stride: int, size: int, name: str) -> torch.Tensor:
    """Rotates heads of embeddings, as queries or as keys."""
    program, rows = begun()
    half = max(size // 2, 1)
    cos, sin = (program.allocate(half, torch.float32) for _ in range(2))
    frequencies = program.constant(torch.ones(half))
    program.emit("rope_table", positions=IDS, inv_freq=frequencies, axes=NOTHING, cos=cos, sin=sin,
                 half=half, numbers=1, before=0, scaling=1.0)  # fmt: skip
    other = "k" if name == "q" else "q"
    fields = {name: rows, f"{name}_heads": heads, f"{name}_head_stride": stride}
    fields |= {other: NOTHING, f"{other}_heads": 0, f"{other}_head_stride": 0}
    program.emit("rope", **fields, cos=cos, sin=sin, head_size=size, rotary=size, pairs="halves")
    return run(program, rows)


def experts(
    count: int,
    stride: int,
    communicator: int = 0,
    rank_experts: Sequence[int] = (),
    lora: Mapping[str, Any] | None = None,
    lists: int = 1,
    weigh_input: bool = False,
) -> torch.Tensor:
    """Runs two experts, or more that share the bytes of one, and perhaps adapters of them."""
    generator = torch.Generator().manual_seed(0)
    program, rows = begun()
    ids, weights = program.allocate(1, torch.int32), program.allocate(1, torch.float32)
    program.emit("route", logits=rows, weights=weights, ids=ids, correction_bias=NOTHING, token_ids=NOTHING,
                 choices=NOTHING, vocabulary=0, experts=2, top_k=1,
                 groups=1, top_k_groups=1, scoring="softmax", renormalize=False, scale=1.0,
                 epsilon=0.0)  # fmt: skip
    q = torch.randint(-127, 128, (2, WIDTH, WIDTH), generator=generator, dtype=torch.int8)
    packed = linear.pack_int8(q, torch.rand(2, WIDTH, generator=generator))
    panels = program.constant(packed)
    out = program.allocate(WIDTH, torch.float32)
    adapters = {n: program.constant(a) if isinstance(a, torch.Tensor) else a for n, a in (lora or {}).items()}
    program.emit(
        "moe", x=rows, out=out, ids=ids, weights=weights, gate_up=panels, down=panels,
        gate_up_bias=NOTHING, down_bias=NOTHING, gate_up_expert_stride=stride, down_expert_stride=stride,
        gate_up_panel_stride=packed.stride(1), down_panel_stride=packed.stride(1), scheme="i8", experts=count,
        identity_experts=0, top_k=1, hidden=WIDTH, intermediate=WIDTH, activation="silu", limit=0.0,
        up_limit=0.0, gated=False, weigh_input=weigh_input, rotated=False, communicator=communicator,
        ranks=[], rank_experts=[{"experts": each} for each in rank_experts],
        lora=[adapters] * lists if lora else [],
    )  # fmt: skip
    return run(program, out)


STRIDE = 2 * linear.panel_layout("i8", WIDTH).bytes
ADAPTED: dict[str, Any] = {
    "inner_a": torch.randn(2, 2, 3, WIDTH),
    "inner_b": torch.randn(2, 2, 1, 1, 3, 64),
    "inner_ranks": torch.tensor([3, 2], dtype=torch.int32),
    "outer_a": torch.randn(2, 2, 4, WIDTH),
    "outer_b": torch.randn(2, 2, 1, 1, 4, 64),
    "outer_ranks": torch.tensor([0, 4], dtype=torch.int32),
    "adapters": torch.tensor([1, -1], dtype=torch.int32),
    "slots": 2,
    "inner_rank": 3,
    "outer_rank": 4,
    "listed": 2,
    "integers": False,
}


def test_adapters_of_experts_that_fit_run() -> None:
    assert experts(2, STRIDE, lora=ADAPTED).shape == (3, WIDTH)
    factors = [name for name in ADAPTED if name.endswith(("_a", "_b"))]
    packed = {name: torch.zeros(*ADAPTED[name].shape[:-1], 68, dtype=torch.int8) for name in factors}
    assert experts(2, STRIDE, lora={**ADAPTED, **packed, "integers": True}).shape == (3, WIDTH)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"slots": 3}, "bytes of a memory"),
        ({"inner_rank": 4}, "bytes of a memory"),
        ({"outer_rank": MANY}, "bytes of a memory"),
        ({"outer_rank": 0}, "a size of adapters is 0"),
        ({"listed": MANY}, "bytes of a memory"),
        ({"inner_b": torch.randn(2, 2, 1, 1, 3, 64).bfloat16()}, "different element types"),
        ({"outer_a": torch.zeros(2, 2, 4, WIDTH, dtype=torch.int64)}, "floating-point type"),
        ({"inner_a": torch.randn(2, 1, 3, WIDTH)}, "bytes of a memory"),
        ({"inner_b": torch.zeros(2, 2, 3, 67, dtype=torch.int8), "integers": True}, "bytes of a memory"),
        ({"outer_ranks": torch.zeros(2, dtype=torch.int64)}, "another element type"),
        ({"inner_ranks": torch.tensor([0, 4], dtype=torch.int32)}, "has the rank 4"),
        ({"outer_ranks": torch.tensor([0, -1], dtype=torch.int32)}, "has the rank -1"),
        ({"adapters": torch.tensor([2, 0], dtype=torch.int32)}, "has the adapter 2"),
    ],
    ids=[
        "slots",
        "inner",
        "outer",
        "no-rank",
        "listed",
        "types",
        "integer-a",
        "experts",
        "integers",
        "int64",
        "rank",
        "below",
        "adapters",
    ],
)
def test_adapters_of_experts_past_their_memory_are_refused(damage: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        experts(2, STRIDE, lora={**ADAPTED, **damage})


def test_experts_that_cannot_have_adapters_are_refused() -> None:
    with pytest.raises(RuntimeError, match="with weighed inputs"):
        experts(2, STRIDE, lora=ADAPTED, weigh_input=True)
    with pytest.raises(RuntimeError, match="2 lists of adapters"):
        experts(2, STRIDE, lora=ADAPTED, lists=2)


def test_heads_that_lie_apart_run() -> None:
    assert pointwise(HEADS, SIZE, SIZE).shape == (3, WIDTH)
    assert pointwise(WIDTH, 1, 1).shape == (3, WIDTH)
    assert pointwise(1, 0, WIDTH).shape == (3, WIDTH)
    assert pointwise(HEADS, 1, SIZE, HEADS).shape == (3, WIDTH)
    for name in ("q", "k"):
        assert rope(HEADS, SIZE, SIZE, name).shape == (3, WIDTH)
        assert rope(1, 0, WIDTH, name).shape == (3, WIDTH)


@pytest.mark.parametrize(("heads", "stride", "width"), [(MANY, 0, SIZE), (2, SIZE - 1, SIZE), (2**32, 0, 1)])
def test_elementwise_heads_that_overlap_are_refused(heads: int, stride: int, width: int) -> None:
    message = f"{heads} heads of {width} elements overlap .* their stride is {stride}"
    with pytest.raises(RuntimeError, match=message):
        pointwise(heads, stride, width)


@pytest.mark.parametrize(("stride", "step"), [(SIZE, 0), (1, HEADS - 1), (0, 1), (2, 2)])
def test_elements_that_overlap_are_refused(stride: int, step: int) -> None:
    with pytest.raises(RuntimeError, match=f"stride is {stride}, that of their elements {step};"):
        pointwise(HEADS, stride, SIZE, step)


@pytest.mark.parametrize(("size", "rounds", "refused"), [
    (0, 1, "size is 0"), (9, 1, "a matrix of 9 rows"), (4, -1, "plan"), (4, 2**40, "times are expected"),
    (8, 1, "bytes of a memory"),
])  # fmt: skip
def test_matrices_of_other_sizes_are_refused(size: int, rounds: int, refused: str) -> None:
    program, rows = begun()
    out = program.allocate(WIDTH, torch.float32)
    program.emit("sinkhorn", x=rows, out=out, size=size, rounds=rounds, eps=0.0)
    with pytest.raises(RuntimeError, match=refused):
        run(program, out)


@pytest.mark.parametrize("read", [-1, WIDTH, 2**40])
def test_elements_outside_of_rows_are_refused(read: int) -> None:
    with pytest.raises(RuntimeError, match="plan"):
        pointwise(1, 0, WIDTH, read=read)


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize(("heads", "stride"), [(MANY, 0), (2, SIZE - 1)])
def test_rotated_heads_that_overlap_are_refused(heads: int, stride: int, name: str) -> None:
    message = f"{heads} heads of {SIZE} elements overlap .* their stride is {stride}"
    with pytest.raises(RuntimeError, match=message):
        rope(heads, stride, SIZE, name)


@pytest.mark.parametrize("name", ["q", "k"])
def test_rotated_heads_without_elements_are_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match="the size of a head is 0; it must be positive"):
        rope(MANY, 0, 0, name)


def test_experts_that_overlap_are_refused() -> None:
    size = WIDTH // 16 * (16 * 4 + WIDTH * 16)
    assert experts(2, size).shape == (3, WIDTH)
    for count, stride in ((MANY, 0), (3, size // 2)):
        with pytest.raises(RuntimeError, match="bytes of a memory of .*: the plan is damaged"):
            experts(count, stride)


def test_experts_of_ranks_that_are_not_those_of_the_layer_are_refused() -> None:
    size = WIDTH // 16 * (16 * 4 + WIDTH * 16)
    with communicators(1) as (_, (handle,)), communicators(1, 64) as (_, (small,)):
        assert experts(2, size, handle, [2]).shape == (3, WIDTH)
        for counts in ([1], [3], [1, 1], [0]):
            with pytest.raises(RuntimeError, match="experts of"):
                experts(2, size, handle, counts)
        with pytest.raises(RuntimeError, match="bytes of a memory of .*: the plan is damaged"):
            experts(MANY, size, handle, [MANY])
        with pytest.raises(RuntimeError, match="do not fit the buffers that ranks exchange"):
            experts(2, size, small, [2])
    with pytest.raises(RuntimeError, match="the ranks of experts do not communicate"):
        experts(2, size, 0, [2])


@pytest.mark.parametrize("top_k", [0, 65537])
@pytest.mark.parametrize("opcode", ["select_tokens", "select_blocks"])
def test_indexer_that_selects_none_or_too_many_is_refused(opcode: str, top_k: int) -> None:
    program, rows = begun()
    out = program.allocate(SIZE, torch.int32)
    cache = {"cache": 1, "layer": 0, "block_table": 2, "query_start": 3, "seq_lens": 4}
    sizes = {"heads": HEADS, "head_size": SIZE, "head_stride": SIZE, "top_k": top_k}
    others: dict[str, dict[str, Any]]
    others = {"select_tokens": {"weights": rows, "scale": 1.0}, "select_blocks": {"span": 32, "nearest": 1}}
    program.emit(opcode, q=rows, out=out, **cache, **sizes, **others[opcode])
    with pytest.raises(RuntimeError, match=f"top_k of an indexer is {top_k}; it must be 1 to 65536"):
        run(program, out)


def attention(**damage: Any) -> NativePlan:
    """Attends from rows of embeddings to a cache that a step would be given."""
    program, rows = begun()
    out = program.allocate(WIDTH, torch.float32, (HEADS, SIZE))
    inputs = ("block_table", "query_start", "seq_lens", "k_cache", "v_cache")
    fields: dict[str, Any] = {
        **{field.name: NOTHING if field.kind == "view" else 0 for field in INSTRUCTIONS["attention"].fields},
        **{name: number for number, name in enumerate(inputs, 1)},
        **{"q": rows, "out": out, "k_scales": -1, "v_scales": -1, "scale": 1.0},
        **{"q_heads": HEADS, "head_size": SIZE},
    }
    given = {name: program.constant(v) if isinstance(v, torch.Tensor) else v for name, v in damage.items()}
    program.emit("attention", **{**fields, **given})
    assert out.storage is not None
    program.outputs.append(out.storage)
    return NativePlan(lay_out(program))


def test_biases_of_distances_must_cover_their_reach() -> None:
    attention(biases=torch.zeros(HEADS, 7), reach=3, ahead=MANY)
    for reach in (4, MANY):
        with pytest.raises(RuntimeError, match="plan: "):
            attention(biases=torch.zeros(HEADS, 7), reach=reach)
    with pytest.raises(RuntimeError, match="has neither slopes nor profiles"):
        attention(slopes=torch.zeros(HEADS), ahead=1)
    with pytest.raises(RuntimeError, match="has neither slopes nor profiles"):
        attention(slopes=torch.zeros(HEADS), later=Operand("input", 6, torch.int64, (), 0, 1))
    with pytest.raises(RuntimeError, match="another element type"):
        attention(later=Operand("input", 6, torch.float32, (), 0, 1))


def angles(positions: Operand, numbers: int, axes: torch.Tensor | None, half: int = 4) -> torch.Tensor:
    """Looks cosines of positions up, of several numbers of each token."""
    program, _ = begun()
    cos, sin = (program.allocate(half, torch.float32) for _ in range(2))
    frequencies = program.constant(torch.ones(half))
    chosen = NOTHING if axes is None else program.constant(axes)
    program.emit("rope_table", positions=positions, inv_freq=frequencies, axes=chosen, cos=cos, sin=sin,
                 half=half, numbers=numbers, before=0, scaling=1.0)  # fmt: skip
    return run(program, cos)


def test_axes_are_numbers_of_a_position() -> None:
    wanted = torch.arange(3)[:, None].cos().expand(3, 4)
    torch.testing.assert_close(angles(IDS, 1, torch.zeros(4, dtype=torch.int64)), wanted)
    for axis in (-1, 1, MANY):
        with pytest.raises(RuntimeError, match=f"turns by number {axis} of 1"):
            angles(IDS, 1, torch.tensor([0, 0, 0, axis]))
    for numbers in (0, -1):
        with pytest.raises(RuntimeError, match="numbers is"):
            angles(IDS, numbers, None)
    with pytest.raises(RuntimeError, match="plan: "):  # the input has one number a token
        angles(IDS, 3, torch.tensor([0, 1, 2, 0]))
    with pytest.raises(RuntimeError, match="plan: "):
        angles(IDS, 1, torch.zeros(3, dtype=torch.int64))


def lora(**damage: Any) -> torch.Tensor:
    """Adds an adapter to rows of embeddings, in place."""
    program, rows = begun()
    constants = {
        "a": torch.randn(2, 3, WIDTH),
        "b": torch.randn(2, 1, 3, 64),
        "ranks": torch.tensor([3, 2], dtype=torch.int32),
        "adapters": torch.tensor([1, -1], dtype=torch.int32),
    }
    sizes = {"slots": 2, "most_rank": 3, "listed": 2, "in_features": WIDTH, "out_features": WIDTH}
    sizes["integers"] = False
    for name in constants.keys() & damage.keys():
        constants[name] = damage.pop(name)
    given = {n: program.constant(c) for n, c in constants.items()} | {**sizes, **damage}
    whole = {name: given.pop(name) for name in ("adapters", "slots", "most_rank", "listed", "integers")}
    layers = given.pop("layers", [{"x": rows, "out": rows, **given}])
    program.emit("lora", **whole, layers=layers)
    return run(program, rows)


def gathered(columns: tuple[int, ...] = (WIDTH,), wide: int = WIDTH, unknown: int = 0) -> torch.Tensor:
    """Gathers embeddings of one rank."""
    program, rows = begun()
    out = program.allocate(wide, torch.float32)
    with communicators(1) as (_, (handle,)):
        parts = [{"columns": n} for n in columns]
        program.emit("gather_columns", x=rows, out=out, communicator=handle + unknown, parts=parts)
        return run(program, out)


def test_gathered_columns_past_their_memory_are_refused() -> None:
    assert gathered().shape == (3, WIDTH)
    with pytest.raises(RuntimeError, match="bytes of a memory"):
        gathered((WIDTH + 64,), WIDTH + 64)
    with pytest.raises(RuntimeError, match="bytes of a memory"):
        gathered(wide=8)
    with pytest.raises(RuntimeError, match="columns of 2 ranks"):
        gathered((8, 8))
    with pytest.raises(RuntimeError, match="columns of a rank is 0"):
        gathered((0,))
    with pytest.raises(RuntimeError, match="no communicator"):
        gathered(unknown=999)


INTEGERS = {
    "a": torch.zeros(2, 3, -(-WIDTH // 64) * 68, dtype=torch.int8),
    "b": torch.zeros(2, -(-WIDTH // 64), 3, 68, dtype=torch.int8),
    "integers": True,
}


def test_adapters_that_fit_run() -> None:
    assert lora().shape == (3, WIDTH)
    assert lora(**INTEGERS).shape == (3, WIDTH)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"slots": 3}, "bytes of a memory"),
        ({"most_rank": 4}, "bytes of a memory"),
        ({"listed": MANY}, "bytes of a memory"),
        ({"in_features": 0}, "a size of adapters is 0"),
        ({"out_features": WIDTH + 1}, "bytes of a memory"),
        ({"b": torch.randn(2, 1, 3, 64).bfloat16()}, "different element types"),
        ({"ranks": torch.zeros(2, dtype=torch.int64)}, "another element type"),
        ({"ranks": torch.tensor([3, 4], dtype=torch.int32)}, "has the rank 4"),
        ({"adapters": torch.tensor([2, 0], dtype=torch.int32)}, "has the adapter 2"),
        ({"layers": []}, "adapters of no layer"),
        ({**INTEGERS, "integers": False}, "bytes of a memory"),
        ({**INTEGERS, "a": torch.zeros(2, 3, 67, dtype=torch.int8)}, "bytes of a memory"),
        ({**INTEGERS, "b": torch.zeros(2, 1, 3, 67, dtype=torch.int8)}, "bytes of a memory"),
    ],
    ids=[
        "slots",
        "rank",
        "listed",
        "inputs",
        "outputs",
        "types",
        "int64",
        "ranks",
        "adapters",
        "none",
        "floats",
        "integer-a",
        "integer-b",
    ],
)
def test_adapters_past_their_memory_are_refused(damage: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        lora(**damage)


def lora_embed(**damage: Any) -> torch.Tensor:
    """Adds an adapter to embeddings, in place."""
    program, rows = begun()
    constants = {
        "table": torch.randn(2, VOCABULARY, 3),
        "b": torch.randn(2, 1, 3, 64),
        "ranks": torch.tensor([3, 2], dtype=torch.int32),
        "adapters": torch.tensor([1, -1], dtype=torch.int32),
    }
    sizes = {"slots": 2, "most_rank": 3, "listed": 2, "vocab_size": VOCABULARY, "width": WIDTH}
    for name in constants.keys() & damage.keys():
        constants[name] = damage.pop(name)
    given = {n: program.constant(c) for n, c in constants.items()} | {"integers": False, **sizes, **damage}
    program.emit("lora_embed", out=rows, **{"ids": IDS, **given})
    return run(program, rows)


def test_adapters_of_embeddings_that_fit_run() -> None:
    assert lora_embed().shape == (3, WIDTH)
    assert lora_embed(b=INTEGERS["b"], integers=True).shape == (3, WIDTH)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"slots": 3}, "bytes of a memory"),
        ({"most_rank": 4}, "bytes of a memory"),
        ({"listed": MANY}, "bytes of a memory"),
        ({"vocab_size": VOCABULARY + 1}, "bytes of a memory"),
        ({"vocab_size": 0}, "a size of adapters is 0"),
        ({"width": WIDTH + 1}, "bytes of a memory"),
        ({"width": MANY}, "bytes of a memory"),
        ({"ids": Operand("input", 0, torch.float32)}, "another element type"),
        ({"table": torch.zeros(2, VOCABULARY, 3, dtype=torch.int64)}, "floating-point type"),
        ({"ranks": torch.zeros(2, dtype=torch.int64)}, "another element type"),
        ({"ranks": torch.tensor([3, 4], dtype=torch.int32)}, "has the rank 4"),
        ({"adapters": torch.tensor([2, 0], dtype=torch.int32)}, "has the adapter 2"),
        ({"b": torch.zeros(2, 1, 3, 67, dtype=torch.int8), "integers": True}, "bytes of a memory"),
    ],
    ids=[
        "slots",
        "rank",
        "listed",
        "tokens",
        "no-tokens",
        "width",
        "wide",
        "ids",
        "table",
        "int64",
        "ranks",
        "adapters",
        "integer-b",
    ],
)
def test_adapters_of_embeddings_past_their_memory_are_refused(damage: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        lora_embed(**damage)
