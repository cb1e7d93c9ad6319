"""Linear layers with rotated inputs against the reference, on every kernel variant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.packed_weights import error, packed, same_bits
from torch_armllm.ops import linear, variants

VARIANTS = variants.machine().distinct("linear", "activation")
TOKENS = (0, 1, 2, 5, 9, 17, 40)


def rotated(
    x: Tensor, weight: Tensor, rows: int, scheme: str, *rest: Tensor | None, digits: int = 1
) -> Tensor:
    """Calls the op of a scheme."""
    bias, residual = rest or (None, None)
    if scheme == "i8":
        return linear.int8_linear(x, weight, rows, bias, residual, digits, True)
    return linear.int4_linear(x, weight, rows, scheme, bias, residual, digits, True)


def test_rotation_is_that_of_a_hadamard_matrix() -> None:
    matrix = linear.rotate_groups(torch.eye(32))
    assert torch.equal(matrix.abs(), torch.ones(32, 32)) and torch.equal(matrix, matrix.t())
    assert torch.equal(matrix @ matrix, 32 * torch.eye(32))
    x = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(0))
    groups = [part @ matrix for part in x.split(32, -1)]
    assert error(linear.rotate_groups(x), torch.cat(groups, -1)) < 1e-6


@pytest.mark.parametrize("scheme", linear.EXACT)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (113, 224)])
def test_exact_schemes_match_reference_bitwise(scheme: str, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    weight = packed(rows, columns, scheme)
    for tokens in TOKENS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            digits = 1 + tokens % 2
            x = torch.randn(tokens, columns).to(dtype)
            options = (x, weight, rows, scheme, torch.randn(rows), torch.randn(tokens, rows).to(dtype))
            expected = linear.reference_int4_linear(*options, digits, True)
            for variant in VARIANTS:
                with variants.use(variant):
                    assert same_bits(rotated(*options, digits=digits), expected), (variant, tokens)


@pytest.mark.parametrize("scheme", ["g32", "int8g128m"])
def test_float_groups_match_reference(scheme: str) -> None:
    torch.manual_seed(0)
    weight, x = packed(50, 320, scheme), torch.randn(9, 320)
    expected = linear.reference_int4_linear(x, weight, 50, scheme, None, None, 1, True)
    for variant in VARIANTS:
        with variants.use(variant):
            assert error(rotated(x, weight, 50, scheme), expected) < 2e-2, variant


def test_loud_channels_cost_the_others_less() -> None:
    torch.manual_seed(0)
    x, float_weight = torch.randn(20, 256), torch.randn(64, 256)
    x[:, 7] *= 100
    float_weight[:, 7] /= 100
    exact = x @ float_weight.t()
    results = []
    for weight, turns in ((float_weight, False), (linear.rotate_groups(float_weight), True)):
        scales = weight.abs().amax(1) / 127
        panels = linear.pack_int8((weight / scales[:, None]).round().to(torch.int8), scales)
        results.append(error(linear.int8_linear(x, panels, 64, rotated=turns), exact))
    assert results[1] < results[0] / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [8, 20])
def test_special_rows(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias, x = packed(20, 64, "g32i"), torch.randn(20), torch.randn(tokens, 64).to(dtype)
    x[0, 63], x[1, 0], x[2, 17] = float("nan"), float("inf"), -float("inf")
    x[3], x[4] = 0.0, 1e-38
    x[5] = 0.0
    x[5, 3] = torch.finfo(dtype).max
    expected = linear.reference_int4_linear(x, weight, 20, "g32i", bias, None, 1, True)
    for variant in VARIANTS:
        with variants.use(variant):
            y = rotated(x, weight, 20, "g32i", bias, None)
            assert y[:3].isnan().all() and not y[3:].isnan().any()
            assert torch.equal(y[3], bias.to(dtype)) and torch.equal(y[4], bias.to(dtype))
            assert same_bits(y, expected)


def test_gated_linear_matches_reference() -> None:
    torch.manual_seed(0)
    interleaved = linear.interleave_panels(packed(70, 96, "g32i"), packed(70, 96, "g32i"))
    biases = torch.randn(70), torch.randn(70)
    for tokens in TOKENS:
        options = (torch.randn(tokens, 96), interleaved, 70, "g32i", "silu", *biases, 1, True)
        expected = linear.reference_int4_gated_linear(*options)
        for variant in VARIANTS:
            with variants.use(variant):
                assert error(linear.int4_gated_linear(*options), expected) < 2e-6 or tokens == 0


def test_rows_without_whole_groups_are_refused() -> None:
    with pytest.raises(RuntimeError, match="rotated layers need whole groups of 32 features; x has 40"):
        rotated(torch.randn(2, 40), packed(20, 40, "g32i"), 20, "g32i")
