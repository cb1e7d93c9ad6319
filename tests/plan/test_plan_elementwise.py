"""Elementwise instructions of native plans, each against its PyTorch operator."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from torch_armllm.capture.export import weights_as_attributes
from torch_armllm.ops import variants
from torch_armllm.plan.lower import lower
from torch_armllm.plan.lowering import STEP_INPUTS, Unlowerable
from torch_armllm.plan.placed_program import lay_out

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
RUNNABLE = variants.machine().distinct("activation")
WIDTH = 70  # four blocks of 16 lanes and a tail of six
VOCABULARY = 53
INFINITE, NAN = 3, 4
"""Tokens whose rows contain one infinity or one NaN."""
TOKENS = (0, 1, 2, 15, 16, 17, 33)  # tiles have 16 rows

EXACT_RESULTS = (
    "number",
    "tensor of a number",
    "row vector",
    "row vector on the left",
    "row vector per head",
    "two row tensors",
    "factor per token",
    "factor per token on the left",
    "add",
    "add scaled",
    "product of chunks",
    "product of splits",
    "square",
    "power",
    "column permutation",
    "broadcast head",
    "factor per head and token",
    "non-contiguous heads",
    "split heads",
)
"""Results without rounding, which must equal the operator's bits."""
ROUNDED_RESULTS = ("silu", "gelu", "gelu_tanh", "relu", "silu of a chunk")
UNSUPPORTED = {
    "cube": "raises to the power 3",
    "mixed dtypes": "computes with torch.float64",
    "first token": "picks tokens out of a step",
    "single column": "by a list that is no permutation",
    "selected sequence": "selects along dimension 0",
}


class Operators(nn.Module):
    """Every tested operator, applied to embeddings."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = torch.randn(VOCABULARY, WIDTH) * 3
        table[INFINITE, 5] = float("inf")
        table[NAN, WIDTH - 1] = float("nan")
        self.table = nn.Parameter(table.to(dtype))
        self.row = nn.Parameter(torch.randn(WIDTH).to(dtype))
        self.head = nn.Parameter(torch.randn(14).to(dtype))
        self.wide = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.register_buffer("one", torch.tensor(0.3, dtype=dtype))
        self.register_buffer("order", torch.randperm(WIDTH))
        self.register_buffer("first", torch.tensor([0]))
        self.register_buffer("by_head", torch.randn(1, 5, 1).to(dtype))

    def results(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = F.embedding(input_ids, self.table)
        left, right = x.chunk(2, -1)
        first, second, third = x.split([30, 10, 30], -1)
        heads = x.view(1, -1, 5, 14)
        first_heads, last_heads = heads.chunk(2, -1)
        by_head = self.by_head * second[..., 3][:, None]  # (1, 5, T): of tokens last
        return {
            "number": x * 0.3,
            "tensor of a number": x * self.one,
            "row vector": x * self.row,
            "row vector on the left": self.row * x,
            "row vector per head": heads * self.head,
            "two row tensors": x * (x * 0.5),
            "factor per token": x * second[..., 3:4],
            "factor per token on the left": second[..., 3:4] * x,
            "add": left + right,
            "add scaled": torch.add(left, right, alpha=-0.5),
            "product of chunks": left * right,
            "product of splits": first * third,
            "square": x.square(),
            "power": right**2,
            "column permutation": x.index_select(-1, self.order),
            "silu": F.silu(x),
            "gelu": F.gelu(x),
            "gelu_tanh": F.gelu(x, approximate="tanh"),
            "relu": F.relu(x),
            "silu of a chunk": F.silu(right) * left,
            "cube": x**3,
            "mixed dtypes": x * self.wide,
            "split heads": heads.split([3, 2], 2)[1] * 2.0,
            "first token": x[:, :1] + x,
            "factor per head and token": (heads.transpose(1, 2) * by_head[..., None]).transpose(1, 2),
            "broadcast head": heads * x[..., :14].view(1, -1, 1, 14),
            "non-contiguous heads": first_heads.reshape(1, -1, 35) * last_heads.reshape(1, -1, 35),
            "single column": x.index_select(-1, self.first),
            "selected sequence": x.index_select(0, self.first),
        }

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.results(input_ids).values())


@functools.cache
def exported_operators(dtype: torch.dtype) -> tuple[Operators, fx.GraphModule, dict[str, str]]:
    """Returns the module, its graph, and the name of the node of each result."""
    module, ids = Operators(dtype), torch.arange(6)[None]
    tokens = torch.export.Dim("tokens", min=2, max=1 << 20)
    with torch.no_grad():
        program = torch.export.export(module, (ids,), dynamic_shapes=({1: tokens},), strict=False)
    nodes = dict(zip(module.results(ids), program.graph_signature.user_outputs, strict=True))
    return module, weights_as_attributes(program).graph_module, nodes


@functools.cache
def plan(name: str, dtype: torch.dtype) -> int:
    """Returns the handle of a native plan with a single result."""
    _, graph, nodes = exported_operators(dtype)
    module = copy.deepcopy(graph)
    result, end = (next(n for n in module.graph.nodes if n.name == name) for name in (nodes[name], "output"))
    end.args = (result,)
    module.graph.eliminate_dead_code()
    program = lay_out(lower(module)).encode()
    handle: int = torch.ops.armllm.plan_create(program.constants, program.integers, program.floats)
    return handle


def run(name: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
    out: Tensor = torch.ops.armllm.plan_run(plan(name, dtype), [ids] * len(STEP_INPUTS), ids.shape[1])[0]
    return out


@contextmanager
def threads(threads_used: int) -> Iterator[None]:
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads_used)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [*EXACT_RESULTS, *ROUNDED_RESULTS])
def test_instruction_matches_operator(name: str, dtype: torch.dtype) -> None:
    module = exported_operators(dtype)[0]
    if name in ROUNDED_RESULTS:  # in float64, as torch's float32 GELU loses digits in the left tail
        module = copy.deepcopy(module).double()
    for tokens in TOKENS:
        ids = (torch.arange(tokens)[None] * 7 + INFINITE) % VOCABULARY
        actual = []
        for variant in RUNNABLE:
            for threads_used in (1, 3):
                with variants.use(variant), threads(threads_used):
                    actual.append(run(name, ids, dtype))
        assert all(torch.equal(actual[0].nan_to_num(7.0), other.nan_to_num(7.0)) for other in actual)
        with torch.no_grad():
            expected = module.results(ids)[name].to(dtype).reshape(actual[0].shape)
        tolerance = 0.0 if name in EXACT_RESULTS else TOLERANCE[dtype]
        torch.testing.assert_close(actual[0], expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [*EXACT_RESULTS, *ROUNDED_RESULTS])
def test_row_result_is_independent_of_batch(name: str, dtype: torch.dtype) -> None:
    ids = torch.tensor([[NAN, *range(10, 43), INFINITE]])
    together = run(name, ids, dtype)
    for t in (0, 1, 15, 16, 17, 34):
        single = run(name, ids[:, t : t + 1], dtype)
        torch.testing.assert_close(together[t : t + 1], single, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "reason"), UNSUPPORTED.items())
def test_unsupported_operations_raise(name: str, reason: str) -> None:
    with pytest.raises(Unlowerable, match=reason):
        plan(name, torch.float32)
