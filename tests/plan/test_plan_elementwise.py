"""Instructions of native plans that work element by element: each against the operator that it stands for."""

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

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
RUNNABLE = variants.machine().distinct("activation")
WIDTH = 70  # four blocks of 16 lanes and six more
VOCABULARY = 53
INFINITE, NOT_A_NUMBER = 3, 4
"""Ids of tokens whose rows hold one such value."""
TOKENS = (0, 1, 2, 15, 16, 17, 33)  # tiles hold 16

EXACT = (
    *("number", "its constant", "row", "row from the left", "row a head", "rows", "factor a token"),
    *("factor from the left", "add", "add scaled", "chunks", "splits", "square", "power", "columns in order"),
)
ROUNDED = ("silu", "gelu", "gelu_tanh", "relu", "silu of a chunk")
REFUSED = {
    "cube": "raises to the power 3",
    "mixed": "is not a product of rows of one type",
    "tokens split": "splits another dimension than the last",
    "a head for all": "is not a product of rows",
    "heads apart": "the heads of getitem_[0-9]+ are not contiguous",
    "one column": "is no order of columns",
    "texts in order": "selects along dimension 0",
}


class Everything(nn.Module):
    """Each operator on the rows of a table."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = torch.randn(VOCABULARY, WIDTH) * 3
        table[INFINITE, 5] = float("inf")
        table[NOT_A_NUMBER, WIDTH - 1] = float("nan")
        self.table = nn.Parameter(table.to(dtype))
        self.row = nn.Parameter(torch.randn(WIDTH).to(dtype))
        self.head = nn.Parameter(torch.randn(14).to(dtype))
        self.wide = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.register_buffer("one", torch.tensor(0.3, dtype=dtype))
        self.register_buffer("order", torch.randperm(WIDTH))
        self.register_buffer("first", torch.tensor([0]))

    def results(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = F.embedding(input_ids, self.table)
        left, right = x.chunk(2, -1)
        first, second, third = x.split([30, 10, 30], -1)
        heads = x.view(1, -1, 5, 14)
        near, far = heads.chunk(2, -1)
        return {
            "number": x * 0.3,
            "its constant": x * self.one,
            "row": x * self.row,
            "row from the left": self.row * x,
            "row a head": heads * self.head,
            "rows": x * (x * 0.5),
            "factor a token": x * second[..., 3:4],
            "factor from the left": second[..., 3:4] * x,
            "add": left + right,
            "add scaled": torch.add(left, right, alpha=-0.5),
            "chunks": left * right,
            "splits": first * third,
            "square": x.square(),
            "power": right**2,
            "columns in order": x.index_select(-1, self.order),
            "silu": F.silu(x),
            "gelu": F.gelu(x),
            "gelu_tanh": F.gelu(x, approximate="tanh"),
            "relu": F.relu(x),
            "silu of a chunk": F.silu(right) * left,
            "cube": x**3,
            "mixed": x * self.wide,
            "tokens split": x.squeeze(0).view(-1, 5, 14).split(3, 1)[0] * 2.0,
            "a head for all": heads * x[..., :14].view(1, -1, 1, 14),
            "heads apart": near.reshape(1, -1, 35) * far.reshape(1, -1, 35),
            "one column": x.index_select(-1, self.first),
            "texts in order": x.index_select(0, self.first),
        }

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.results(input_ids).values())


@functools.cache
def everything(dtype: torch.dtype) -> tuple[Everything, fx.GraphModule, dict[str, str]]:
    """The operators, their graph, and the node in it of each result."""
    module, ids = Everything(dtype), torch.arange(6)[None]
    tokens = torch.export.Dim("tokens", min=2, max=1 << 20)
    with torch.no_grad():
        program = torch.export.export(module, (ids,), dynamic_shapes=({1: tokens},), strict=False)
    nodes = dict(zip(module.results(ids), program.graph_signature.user_outputs, strict=True))
    return module, weights_as_attributes(program).graph_module, nodes


@functools.cache
def plan(name: str, dtype: torch.dtype) -> int:
    """A native plan of one operator."""
    _, whole, nodes = everything(dtype)
    module = copy.deepcopy(whole)
    result, end = (next(n for n in module.graph.nodes if n.name == name) for name in (nodes[name], "output"))
    end.args = (result,)
    module.graph.eliminate_dead_code()
    program = lower(module).encode()
    handle: int = torch.ops.armllm.plan_create(program.constants, program.integers, program.floats)
    return handle


def run(name: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
    out: Tensor = torch.ops.armllm.plan_run(plan(name, dtype), [ids] * len(STEP_INPUTS), ids.shape[1])[0]
    return out


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_instruction_matches_operator(name: str, dtype: torch.dtype) -> None:
    module = everything(dtype)[0]
    if name in ROUNDED:  # in float64: torch's float32 GELU cancels in the left tail
        module = copy.deepcopy(module).double()
    for tokens in TOKENS:
        ids = (torch.arange(tokens)[None] * 7 + INFINITE) % VOCABULARY
        found = []
        for variant in RUNNABLE:
            for number in (1, 3):
                with variants.use(variant), threads(number):
                    found.append(run(name, ids, dtype))
        assert all(torch.equal(found[0].nan_to_num(7.0), other.nan_to_num(7.0)) for other in found)
        with torch.no_grad():
            expected = module.results(ids)[name].to(dtype).reshape(found[0].shape)
        tolerance = 0.0 if name in EXACT else TOLERANCE[dtype]
        torch.testing.assert_close(found[0], expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_row_result_is_independent_of_batch(name: str, dtype: torch.dtype) -> None:
    ids = torch.tensor([[NOT_A_NUMBER, *range(10, 43), INFINITE]])
    together = run(name, ids, dtype)
    for t in (0, 1, 15, 16, 17, 34):
        alone = run(name, ids[:, t : t + 1], dtype)
        torch.testing.assert_close(together[t : t + 1], alone, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_unsupported_operations_raise(name: str, reason: str) -> None:
    with pytest.raises(Unlowerable, match=reason):
        plan(name, torch.float32)
