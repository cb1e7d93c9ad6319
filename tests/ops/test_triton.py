"""The ops of kernel variant ``triton`` against their references.

They need a triton with a CPU backend, or any triton and ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from torch_armllm.ops import activation, norm, rope, variants
from torch_armllm.ops.tables import ENUMS

try:
    with variants.use("triton"):
        from torch_armllm.ops import triton
        from torch_armllm.ops.triton.pointwise import Step, pointwise
except RuntimeError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of numpy, on NaN
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
PAGE = Path(__file__).parents[2] / "docs/how-to/try-a-kernel-in-triton.md"
PAIRS = ((False, False), (True, False), (True, True))
EXTREME_VALUES = (
    math.nan,
    math.inf,
    3e38,
    200.0,
    90.0,
    0.5,
    1e-7,
    0.0,
    -0.0,
    -1e-7,
    -0.5,
    -90.0,
    -200.0,
    -3e38,
)


@pytest.fixture(autouse=True)
def selected() -> Iterator[None]:
    with variants.use("triton"):
        yield


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def norms(width: int, dtype: torch.dtype) -> list[tuple[Callable[..., Tensor], Callable[..., Tensor]]]:
    """Returns the norms and their references, as functions of x."""
    weight, bias = torch.randn(2, width).to(dtype)
    return [
        (
            lambda x: norm.rms_norm(x, weight, 1e-6, 1.0),
            lambda x: norm.reference_rms_norm(x, weight, 1e-6, 1.0),
        ),
        *(
            (
                lambda x, w=w, b=b: norm.layer_norm(x, w, b, 1e-5),
                lambda x, w=w, b=b: norm.reference_layer_norm(x, w, b, 1e-5),
            )
            for w, b in ((weight, bias), (weight, None), (None, None))
        ),
    ]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", [1, 15, 33, 130])
def test_norms_match_references(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    for rows in (0, 1, 5):
        x, residual = ((torch.randn(rows, width) * 3 + 1).to(dtype) for _ in range(2))
        for weight_dtype in (dtype, torch.float32):
            for op, reference in norms(width, weight_dtype):
                assert_close(op(x), reference(x))
        weight = torch.randn(width)
        out, total = norm.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, x + residual)
        assert torch.equal(out, norm.rms_norm(total, weight, 1e-5))
        out, total = norm.add_layer_norm(x, residual, weight, None, 1e-5)
        assert torch.equal(total, x + residual)
        assert torch.equal(out, norm.layer_norm(total, weight, None, 1e-5))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_non_finite_values_affect_their_row_only(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 70).to(dtype)
    x[1, 69], x[2, 3] = math.nan, math.inf
    for op, reference in norms(70, torch.float32):
        assert_close(op(x), reference(x))
        assert op(x)[[0, 3]].isfinite().all()
    cos, sin = rope.reference_rope_table(torch.arange(4), torch.rand(35))
    heads = x.clone()[:, None]
    rope.rope_(heads, heads[:, :0], cos, sin)
    assert_close(heads, rope.reference_rope(x[:, None], cos, sin))
    assert_close(activation.gated_act(x, x, "silu"), activation.reference_gated_act(x, x, "silu"))


def test_strided_rows_equal_contiguous_rows() -> None:
    torch.manual_seed(0)
    merged = torch.randn(1, 6, 4 * 24 + 50).bfloat16()
    heads = merged[..., 10 : 10 + 4 * 24].unflatten(-1, (4, 24))
    for x in (heads, merged[..., 10 : 10 + 24], merged[0, :, :24].T.contiguous().T, heads[:, ::2]):
        for op, _ in norms(24, torch.float32):
            assert op(x).is_contiguous()
            assert torch.equal(op(x), op(x.contiguous()))
        halves = x.chunk(2, -1)
        whole = [half.contiguous() for half in halves]
        assert torch.equal(activation.gated_act(*halves, "gelu"), activation.gated_act(*whole, "gelu"))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", activation.ACTIVATIONS)
def test_gated_act_matches_reference(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for rows, width in ((0, 8), (2, 0), (1, 1), (3, 70), (2, 1025)):
        gate, up = ((torch.randn(rows, width) * 4).to(dtype) for _ in range(2))
        assert_close(activation.gated_act(gate, up, kind), activation.reference_gated_act(gate, up, kind))
    gate = torch.tensor(EXTREME_VALUES).to(dtype)
    half = torch.full_like(gate, 0.5)
    expected = activation.reference_gated_act(gate, half, kind)
    finite = gate > -1e38  # the product with a sigmoid of 0 depends on the order
    assert_close(activation.gated_act(gate, half, kind)[finite], expected[finite])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_results_are_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate = torch.cat((torch.rand(2000) * 2, torch.logspace(-30, 38, 999))).to(dtype)
    up = (1 + torch.randint(0, 256, gate.shape) / 128).to(dtype)
    expected = (gate.double() * up.double()).float().to(dtype)
    assert torch.equal(activation.gated_act(gate, up, "relu"), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("options", PAIRS)
def test_rope_matches_reference(options: tuple[bool, bool], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for tokens, q_heads, k_heads, half, rest in ((0, 2, 1, 4, 0), (1, 3, 0, 1, 0), (5, 3, 2, 13, 5)):
        cos, sin = rope.reference_rope_table(torch.arange(tokens) * 37, torch.rand(half))
        size = 2 * half + rest
        q, k = (torch.randn(tokens, heads, size).to(dtype) for heads in (q_heads, k_heads))
        rotated = q.clone(), k.clone()
        rope.rope_(*rotated, cos, sin, *options)
        for actual, x in zip(rotated, (q, k), strict=True):
            assert_close(actual, rope.reference_rope(x, cos, sin, *options))


def test_rope_writes_where_the_heads_are() -> None:
    torch.manual_seed(0)
    cos, sin = rope.reference_rope_table(torch.arange(6), torch.rand(4))
    merged = torch.randn(2, 3, 5 * 8)
    slices = merged[..., 8:24].unflatten(-1, (2, 8)), merged[..., 24:32].unflatten(-1, (1, 8))
    spread = torch.randn(3, 2, 2, 8).transpose(0, 1), torch.randn(2, 3, 1, 16)[..., ::2]
    for q, k in (slices, spread):
        expected = [rope.reference_rope(x.flatten(0, 1), cos, sin).view(x.shape) for x in (q, k)]
        rope.rope_(q, k, cos, sin)
        for actual, wanted in zip((q, k), expected, strict=True):
            assert_close(actual, wanted)


X, HEADS, ANGLES = torch.randn(2, 8), torch.randn(3, 2, 8), torch.randn(2, 3, 4)
INVALID: dict[str, tuple[str, tuple[object, ...]]] = {
    "weight's size": ("rms_norm", (X, torch.ones(7), 1e-5)),
    "residual's dtype": ("add_rms_norm", (X, X.bfloat16(), torch.ones(8), 1e-5)),
    "two dtypes": ("layer_norm", (X, torch.ones(8), torch.ones(8).half(), 1e-5)),
    "integers": ("rms_norm", (X.long(), torch.ones(8), 1e-5)),
    "a number": ("layer_norm", (torch.tensor(1.0), None, None, 1e-5)),
    "unknown activation": ("gated_act", (X, X, "swish")),
    "two shapes": ("gated_act", (X, X[:, :4], "silu")),
    "tokens": ("rope_", (HEADS, HEADS[:2], *ANGLES)),
    "rows of angles": ("rope_", (HEADS, HEADS, *ANGLES[:, :2])),
    "too many angles": ("rope_", (HEADS[..., :6], HEADS[..., :6], *ANGLES)),
    "unzip": ("rope_", (HEADS, HEADS, *ANGLES, False, True)),
    "dtype of angles": ("rope_", (HEADS, HEADS, *ANGLES.bfloat16())),
    "expanded": ("rope_", (HEADS[:, :1].expand(3, 2, 8), HEADS, *ANGLES)),
    "dimensions": ("rope_", (X, HEADS, *ANGLES)),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_arguments_raise_as_in_compiled_ops(case: str) -> None:
    name, arguments = INVALID[case]
    op = getattr(torch.ops.armllm, name)
    with pytest.raises(RuntimeError) as refused:
        op(*arguments)
    with variants.use("scalar"), pytest.raises(RuntimeError) as expected:
        op(*arguments)
    assert str(refused.value) in str(expected.value)


def test_opcheck() -> None:
    ops = torch.ops.armllm
    torch.library.opcheck(ops.add_rms_norm.default, (X, X.clone(), torch.ones(8), 1e-5, 1.0))
    torch.library.opcheck(ops.rope_.default, (HEADS.clone(), HEADS.clone(), *ANGLES, True, True))
    torch.library.opcheck(ops.gated_act.default, (X, X.clone(), "silu"))


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "divide": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "negate": torch.neg,
    "absolute": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "sigmoid": torch.sigmoid,
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "tanh": torch.tanh,
    "softplus": nn.functional.softplus,
    "greater": torch.gt,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "floor": torch.floor,
}
"""Operators of elementwise programs in torch, of one or two values."""


def test_every_operator_is_tested() -> None:
    assert {*FUNCTIONS, "number", "select"} == {*ENUMS["PointwiseOp"]}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_operators_match_torch_in_float64(op: str) -> None:
    values = torch.tensor(EXTREME_VALUES)
    a, b = (x.reshape(2, 7, 14) for x in torch.cartesian_prod(values, values).T.contiguous())
    actual = pointwise([a, b], [Step(op, 0, 1)], torch.float32)
    function, wide = FUNCTIONS[op], (a.double(), b.double())
    binary = op in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "greater")
    expected = (function(*wide) if binary else function(wide[0])).float()
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-7, equal_nan=True)


def test_programs_read_operands_of_every_shape_and_dtype() -> None:
    torch.manual_seed(0)
    x, row, positions = torch.randn(3, 2, 1030), torch.randn(1030).bfloat16(), torch.arange(3)[:, None, None]
    head = torch.randn(2, 1).half()
    steps = [
        Step("multiply", 0, 1),
        Step("number", number=0.25),
        Step("select", 2, 4, 5),
        Step("add", 6, 3),
    ]
    expected = torch.where(positions > 0, x * row.float(), 0.25) + head.float()
    for dtype in FLOATS:
        actual = pointwise([x, row, positions, head], steps, dtype)
        assert torch.equal(actual, expected.to(dtype))
    for tokens in (0, 1):
        actual = pointwise([x[:tokens], row, positions[:tokens], head], steps, torch.float32)
        assert torch.equal(actual, expected[:tokens])


def test_invalid_programs_raise() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match="unknown operator 'cube'; choose from: number, add"):
        pointwise([x], [Step("cube")], torch.float32)
    with pytest.raises(ValueError, match="only values 0 to 1 precede it"):
        pointwise([x], [Step("exp"), Step("exp", 2)], torch.float32)
    with pytest.raises(ValueError, match="at most three dimensions"):
        pointwise([torch.ones(2, 2, 2, 2)], [Step("exp")], torch.float32)
    with pytest.raises(ValueError, match="needs an operand"):
        pointwise([], [Step("number")], torch.float32)


def test_machine_says_what_triton_runs() -> None:
    machine = variants.machine()
    assert machine.selected == "triton"
    assert machine.compiled in machine.runnable
    assert machine.families["norm"].variant == "triton"
    assert machine.families["norm"].why.startswith(triton.BACKEND)
    assert machine.families["linear"].variant in machine.variants


def test_another_variant_brings_the_compiled_ops_back(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(8)
    with variants.use("scalar"):
        assert variants.machine().selected == "scalar"
        expected = norm.rms_norm(X, weight, 1e-5)
        monkeypatch.setitem(triton.OPS, "rms_norm", lambda x, *_: torch.full_like(x, 7.0))
        with variants.use("triton"):
            assert norm.rms_norm(X, weight, 1e-5).eq(7).all()
        assert torch.equal(norm.rms_norm(X, weight, 1e-5), expected)
    assert norm.rms_norm(X, weight, 1e-5).eq(7).all()


class Block(nn.Module):
    """The row operators of a transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(24, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.norm(x).chunk(2, -1)
        return nn.functional.silu(gate) * up


def test_compiled_graphs_call_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def counted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            called.append(name)
            return function(*arguments)

        return call

    for name, function in triton.OPS.items():
        monkeypatch.setitem(triton.OPS, name, counted(name, function))
    variants.select("scalar")
    variants.select("triton")
    model, x = Block().eval(), torch.randn(3, 24)
    with torch.no_grad():
        actual = torch.compile(model, backend="armllm")(x)
        assert_close(actual, model(x))
    assert called == ["rms_norm", "gated_act"]


def test_environment_variable_selects_triton() -> None:
    code = (
        "import torch\nfrom torch_armllm.ops import norm, variants\n"
        "print(variants.machine().selected, variants.select('scalar'), variants.select(''))\n"
        "print(norm.rms_norm(torch.ones(1, 3), torch.ones(3), 0.0))"
    )
    environment = {**os.environ, "ARMLLM_ISA": "triton"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout == "triton scalar triton\ntensor([[1., 1., 1.]])\n"
    assert "runs the ops rms_norm, add_rms_norm" in found.stderr


def test_example_of_the_documentation_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(triton.OPS, "rms_norm", triton.OPS["rms_norm"])
    (code,) = re.findall("```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path / "example.py"
    file.write_text(code)
    with variants.use("scalar"):
        names = runpy.run_path(str(file))
    assert triton.OPS["rms_norm"] is names["rms_norm"]


def test_kernels_compile() -> None:
    """The interpreter accepts Python that Triton's compiler refuses."""
    if "interpreter" not in triton.BACKEND:
        return  # the other tests have compiled them
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    code = [sys.executable, "-m", "tests.support.compile_triton"]
    found = subprocess.run(code, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
