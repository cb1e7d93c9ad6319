"""Elementwise programs of native plans: chains of operators in one instruction, against torch in float64."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from torch_armllm.capture.export import weights_as_attributes
from torch_armllm.ops import variants
from torch_armllm.plan.lower import lower
from torch_armllm.plan.lowering import STEP_INPUTS
from torch_armllm.plan.placed_program import lay_out
from torch_armllm.plan.program import Operand, Program

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
RUNNABLE = variants.machine().distinct("pointwise")
VOCABULARY, WIDTH = 23, 90
INFINITE, NAN = 3, 4
"""Tokens whose rows contain one infinity or one NaN."""

ONE_INSTRUCTION = (
    "decay",
    "decay of channels",
    "gated output",
    "clamped",
    "masked",
    "normalized",
    "shares",
    "mixed heads",
    "head factor",
    "channels first",
    "differences",
    "bent",
    "permuted heads",
)
"""Results that one instruction computes."""


def doubly_stochastic(matrices: Tensor) -> Tensor:
    for dim in (-2, -1, -2, -1, -2):
        matrices = matrices / (matrices.sum(dim, keepdim=True) + 1e-6)
    return matrices.flatten(2)


class Chains(nn.Module):
    """Chains of elementwise operators as families of transformers have them, applied to embeddings."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = torch.randn(VOCABULARY, WIDTH) * 2
        table[INFINITE, 5], table[NAN, WIDTH - 1] = float("inf"), float("nan")
        self.table = nn.Parameter(table.to(dtype))
        self.row = nn.Parameter(torch.randn(WIDTH).to(dtype))
        self.by_head = nn.Parameter(torch.randn(1, 1, 5, 1))
        self.by_channel = nn.Parameter(torch.randn(18).to(dtype))
        self.register_buffer("small", 10.0 ** -torch.arange(WIDTH).float().remainder(12))

    def results(self, input_ids: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        x = F.embedding(input_ids, self.table)
        dtype = x.dtype
        first, second, third = x.split([30, 30, 30], -1)
        heads = x.view(1, -1, 5, 18)
        left, right = heads.chunk(2, -1)
        wide = heads.float() + self.by_channel.float()
        shifted = first.transpose(1, 2) * second.transpose(1, 2)
        return {
            "decay": -self.row.float().exp() * F.softplus(x.float() + self.row),
            "decay of channels": (-self.by_head.exp() * F.softplus(wide, beta=2.0)).to(dtype),
            "guarded softplus": torch.where(wide > 20.0, wide, torch.log(torch.exp(wide) + 1.0)),
            "gated output": torch.sigmoid(first) * third,
            "clamped": torch.clamp(x, -1.5, 0.25) - torch.relu(x) / 3.0,
            "masked": x.masked_fill(~(x < 0.5), 0.125) + torch.abs(x),
            "normalized": first * torch.rsqrt(second * second + 1.0) + torch.sqrt(third.square()),
            "shares": torch.tanh(first) + F.gelu(second) - F.silu(third),
            "mixed heads": F.silu(left) * right,
            "head factor": heads * torch.sigmoid(heads[..., :1]),
            "channels first": (shifted * 0.5 + first.transpose(1, 2)).transpose(1, 2),
            "differences": torch.maximum(first, second) - torch.minimum(second, third),
            "joined": torch.cat([third, torch.sigmoid(first), second], -1),
            "joined heads": torch.cat([right, left * 2.0], -1),
            "contiguous heads": left.reshape(1, -1, 45) * 1.0,
            "merged tokens": (F.silu(left).reshape(-1, 9) * right.reshape(-1, 9)).view(1, -1, 45),
            "bent": torch.where(x > 0, x * self.row, torch.expm1(torch.min(x, self.row)) - torch.floor(x)),
            "small logarithms": torch.log1p(x.float().abs() * self.small)
            + torch.expm1(x.float() * self.small),
            "by position": first
            * (torch.log1p(torch.floor((position_ids + 3).float() / 4)) * 0.5 + 1)[..., None],
            "permuted heads": (heads.permute(0, 1, 3, 2) * self.by_head[:, :, :, 0] + 0.5).permute(
                0, 1, 3, 2
            ),
            "stacked": torch.stack([first, second * 0.5, third]).permute(1, 2, 0, 3).flatten(2),
            "stacked last": torch.stack([first, second * 0.5, third], -1).flatten(-2),
            "every other": heads[..., ::2] * torch.sigmoid(heads[..., 1::2]),
            "picked heads": heads[:, :, 1:4] - heads[:, :, 2:5] * 0.5,
            "interleaved heads": x.view(1, -1, 3, 5, 6)[:, :, :, 2]
            * torch.sigmoid(x.view(1, -1, 3, 5, 6)[:, :, :, 4]),
            "repeated heads": heads[:, :, :2].repeat(1, 1, 2, 1) * heads[:, :, 1:],
            "expanded heads": heads[:, :, :1].expand(-1, -1, 4, -1).reshape(1, -1, 72) * 0.5,
            "three dimensions": x.view(1, -1, 3, 5, 6)
            * x.view(1, -1, 3, 5, 6)[:, :, :, :1]
            * x.view(1, -1, 3, 5, 6)[..., :1],
            "means": x.mean(-1, keepdim=True) + heads.mean(-1).mean(-1, keepdim=True),
            "sum of heads": heads.sum(2),
            "sum of all": x.view(1, -1, 3, 30).sum((2, 3), keepdim=True).flatten(2),
            "deviations": x.view(1, -1, 3, 30).std(-1) + x.view(1, -1, 3, 30).std(-1, unbiased=False),
            "norms": torch.linalg.vector_norm(x.view(1, -1, 3, 30), dim=-1),
            "taken apart": (1.0 / (x.view(1, -1, 3, 30).unbind(-2)[1].abs() + 1.0)),
            "mean of streams": torch.stack([first, second, third]).mean(0),
            "matrices": (x.view(1, -1, 15, 6)[..., :4] @ x[..., :20].view(1, -1, 4, 5)).flatten(2),
            "doubly stochastic": doubly_stochastic(torch.sigmoid(x[..., :16].float()).view(1, -1, 4, 4)),
            "weighted streams": (torch.sigmoid(x[..., :3].float())[..., None] * x.view(1, -1, 3, 30))
            .sum(2)
            .to(dtype),
            "read twice": torch.sigmoid(first) + torch.sigmoid(first) * second,
        }

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.results(input_ids, position_ids).values())


class Overwritten(Chains):
    """A sum that is overwritten after it was read."""

    def results(self, input_ids: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        first, second, _ = F.embedding(input_ids, self.table).split([30, 30, 30], -1)
        total = first + second
        before = total * 2.0
        total.mul_(second).add_(before)
        return {"overwritten": total - before}


class AttentionToRows(Chains):
    """Inkling 2: queries that all tokens share attend to rows of the same token."""

    def results(self, input_ids: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        rows = F.embedding(input_ids, self.table).float().view(1, -1, 6, 15)
        queries = self.row.float().view(1, 1, 6, 15).expand(1, input_ids.shape[1], -1, -1)
        return {
            "attention to rows": F.scaled_dot_product_attention(queries, rows, rows, scale=0.3).flatten(2)
        }


class PartOverwritten(Chains):
    """Gemma 3n: all but the first of several streams are changed where they are."""

    def results(self, input_ids: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        parts = F.embedding(input_ids, self.table).split([30, 30, 30], -1)
        streams = torch.stack(parts)
        streams[1:] += torch.sigmoid(parts[0])
        return {"part overwritten": streams.permute(1, 2, 0, 3).flatten(2)}


def names_of(kind: type[Chains]) -> tuple[str, ...]:
    return tuple(kind(torch.float32).results(*[torch.arange(2)[None]] * 2))


KINDS = {
    name: kind for kind in (Chains, Overwritten, PartOverwritten, AttentionToRows) for name in names_of(kind)
}
NAMES = tuple(KINDS)


@functools.cache
def exported_chains(dtype: torch.dtype, kind: type[Chains]) -> tuple[Chains, fx.GraphModule, dict[str, str]]:
    """Returns the module, its graph, and the name of the node of each result."""
    module, ids = kind(dtype), torch.arange(6)[None]
    tokens = torch.export.Dim("tokens", min=2, max=1 << 20)
    with torch.no_grad():
        program = torch.export.export(
            module, (ids, ids.clone()), dynamic_shapes=({1: tokens}, {1: tokens}), strict=False
        )
    nodes = dict(zip(module.results(ids, ids), program.graph_signature.user_outputs, strict=True))
    return module, weights_as_attributes(program).graph_module, nodes


def part_of(graph: fx.Graph, result: str) -> fx.Graph:
    """Returns a graph of the nodes that a result needs, with the placeholders of the whole graph."""
    (end,) = (node for node in graph.nodes if node.name == result)
    # placeholders, and what overwrites its operand
    needed = {end, *(node for node in graph.nodes if node.op != "output" and node.is_impure())}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    part, copies = fx.Graph(), {}
    for node in graph.nodes:
        if node in needed:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(copies[end])
    return part


@functools.cache
def program_of(name: str, dtype: torch.dtype) -> Program:
    """Returns the program with a single result."""
    from torch_armllm.passes import PassContext
    from torch_armllm.passes.clean import run as clean
    from torch_armllm.passes.fold_constants import run as fold
    from torch_armllm.passes.sinkhorn import run as sinkhorn

    _, graph, nodes = exported_chains(dtype, KINDS[name])
    module = fx.GraphModule(graph, part_of(graph.graph, nodes[name]))
    clean(module, PassContext())
    fold(module, PassContext())
    sinkhorn(module, PassContext())
    return lower(module)


@functools.cache
def plan(name: str, dtype: torch.dtype) -> int:
    program = lay_out(program_of(name, dtype)).encode()
    handle: int = torch.ops.armllm.plan_create(program.constants, program.integers, program.floats)
    return handle


def positions_of(ids: Tensor) -> Tensor:
    return ids * 7 + 2


def run(name: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
    inputs = [ids, positions_of(ids), *[ids] * (len(STEP_INPUTS) - 2)]
    out: Tensor = torch.ops.armllm.plan_run(plan(name, dtype), inputs, ids.shape[1])[0]
    return out


def ids_of(tokens: int) -> Tensor:
    return (torch.arange(tokens)[None] * 5 + INFINITE) % VOCABULARY


@functools.cache
@torch.no_grad()
def expected_results(dtype: torch.dtype, kind: type[Chains], tokens: int) -> dict[str, Tensor]:
    """Returns all results of the operators in float64."""
    module, ids = copy.deepcopy(exported_chains(dtype, kind)[0]).double(), ids_of(tokens)
    return module.results(ids, positions_of(ids))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_program_matches_the_operators(name: str, dtype: torch.dtype) -> None:
    for tokens in (0, 1, 2, 17, 50):
        ids = ids_of(tokens)
        actual = []
        for variant in RUNNABLE:
            with variants.use(variant):
                actual.append(run(name, ids, dtype))
        assert all(torch.equal(actual[0].nan_to_num(7.0), other.nan_to_num(7.0)) for other in actual)
        results = expected_results(dtype, KINDS[name], tokens)
        expected = results[name].to(actual[0].dtype).reshape(actual[0].shape)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(actual[0], expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_row_result_is_independent_of_batch(name: str) -> None:
    ids = torch.tensor([[NAN, *range(5, 23), INFINITE] * 4])
    together = run(name, ids, torch.bfloat16)
    for t in (0, 1, 19, 79):
        single = run(name, ids[:, t : t + 1], torch.bfloat16)
        torch.testing.assert_close(together[t : t + 1], single, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ONE_INSTRUCTION)
def test_chain_is_one_instruction(name: str) -> None:
    opcodes = [instruction.opcode for instruction in program_of(name, torch.bfloat16).instructions]
    assert opcodes == ["embed", "pointwise"]


def test_weighted_sum_of_streams_is_one_instruction() -> None:
    instructions = program_of("weighted streams", torch.bfloat16).instructions
    assert [i.opcode for i in instructions] == ["embed", "pointwise", "pointwise"]  # the weights come first


def test_matrices_are_normalized_by_one_instruction() -> None:
    opcodes = [instruction.opcode for instruction in program_of("doubly stochastic", FLOATS[1]).instructions]
    assert opcodes == ["embed", "pointwise", "sinkhorn"]


EXTREMES = (
    *(0.0, -0.0, 1e-45, 1e-30, 1e-7, 0.5, 1.0, 2.0, 2.5, 8388609.0, 3e38, -1e-5, -0.5, -1.0, -2.5, -90.0),
    *(float("inf"), float("-inf"), float("nan")),
)


class Extremes(nn.Module):
    """Logarithms and exponentials of a row for each of `EXTREMES`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor(EXTREMES)[:, None].repeat(1, 18))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = F.embedding(input_ids, self.table)
        logarithms = [torch.log(x), torch.log1p(x)]
        exponentials = [torch.exp(x), torch.expm1(x), F.softplus(x)]
        return torch.cat([*logarithms, *exponentials, torch.floor(x), torch.maximum(x, -x)], -1)


@functools.cache
def plan_of_extremes() -> int:
    tokens = torch.export.Dim("tokens", min=2, max=1 << 20)
    with torch.no_grad():
        exported = torch.export.export(
            Extremes(), (torch.arange(3)[None],), dynamic_shapes=({1: tokens},), strict=False
        )
    program = lay_out(lower(weights_as_attributes(exported).graph_module)).encode()
    handle: int = torch.ops.armllm.plan_create(program.constants, program.integers, program.floats)
    return handle


@pytest.mark.parametrize("row", range(len(EXTREMES)), ids=map(str, EXTREMES))
def test_logarithms_and_exponentials_of_extremes(row: int) -> None:
    ids = torch.full((1, 3), row)
    with torch.no_grad():
        expected = Extremes().double()(ids)[0].float()
    for variant in RUNNABLE:
        with variants.use(variant):
            found = torch.ops.armllm.plan_run(plan_of_extremes(), [ids] * len(STEP_INPUTS), 3)[0]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)


def run_with_triton(name: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Runs a program of one instruction as a Triton kernel."""
    from torch_armllm.ops.triton.pointwise import Step, pointwise

    program = program_of(name, dtype)
    fields: dict[str, Any] = dict(program.instructions[-1].fields)
    rows, sizes = (
        F.embedding(ids[0], exported_chains(dtype, KINDS[name])[0].table),
        (fields["heads"], fields["width"]),
    )

    def tensor(x: Operand, token: int, head: int, column: int) -> Tensor:
        source = rows if x.space == "arena" else program.constants[x.index]
        place = source.storage_offset() + x.column
        return source.detach().as_strided((len(rows), *sizes), (token, head, column), place)

    operands = [
        tensor(o["x"], o["x"].stride * o["by_token"], o["head_stride"], o["column_stride"])
        for o in fields["operands"]
    ]
    steps = [Step(**step) for step in fields["steps"]]
    out = fields["out"]
    results = torch.empty(len(rows), out.stride, dtype=out.dtype)
    shape, strides = (len(rows), *sizes), (out.stride, fields["out_head_stride"], fields["out_column_stride"])
    results.as_strided(shape, strides, out.column).copy_(pointwise(operands, steps, out.dtype))
    return results


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ONE_INSTRUCTION)
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_triton_runs_the_same_programs(name: str, dtype: torch.dtype) -> None:
    try:
        with variants.use("triton"):
            pass
    except RuntimeError as error:
        pytest.skip(str(error))
    for tokens in (0, 1, 17):
        ids = (torch.arange(tokens)[None] * 5 + INFINITE) % VOCABULARY
        expected, actual = run(name, ids, dtype), run_with_triton(name, ids, dtype)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
