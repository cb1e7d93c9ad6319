"""Inputs of linear layers: two INT8 digits, rotated groups, rows that are not finite, on every variant."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.support.packed_weights import error, packed, same_bits
from torch_armllm.ops import linear, variants

VARIANTS = variants.machine().distinct("linear", "activation")


@pytest.mark.parametrize("scheme", linear.EXACT)
def test_error_of_two_digits_is_much_smaller(scheme: str) -> None:
    torch.manual_seed(0)
    weight, x = packed(200, 96, scheme), torch.randn(75, 96)
    w, scales = linear.unpack_int(weight, 200, 96, scheme)
    exact = x.double() @ (w.double() * scales.double()[:, None]).t()
    call = (x, weight, 200) if scheme == "i8" else (x, weight, 200, scheme)
    layer = linear.int8_linear if scheme == "i8" else linear.int4_linear
    one, two = (layer(*call, digits=digits) for digits in (1, 2))  # type: ignore[operator]
    assert float((one.double() - exact).norm()) > 200 * float((two.double() - exact).norm())


@pytest.mark.parametrize(
    ("scheme", "digits", "rotated"),
    [
        *product(("g32", "g64z", "g128m", "int8g32m"), (2,), (False,)),
        ("g32", 1, True),
        ("int8g128m", 1, True),
    ],
)
def test_float_groups_match_reference(scheme: str, digits: int, rotated: bool) -> None:
    torch.manual_seed(0)
    weight = packed(50, 320, scheme)
    for tokens in (1, 4, 5, 17, 70):
        call = (torch.randn(tokens, 320), weight, 50, scheme, None, None, digits, rotated)
        expected = linear.reference_int4_linear(*call)
        bound = 2e-2 if rotated or (tokens > 4 and not linear.traits_of(scheme).is_int8) else 2e-6
        for variant in VARIANTS:
            with variants.use(variant):
                assert error(linear.int4_linear(*call), expected) < bound, (variant, tokens)


def test_bits_of_two_digits_do_not_depend_on_threads() -> None:
    """More threads get smaller tiles, which begin and end with whole tokens."""
    torch.manual_seed(0)
    weight, bias = packed(200, 96, "g32i"), torch.randn(200)
    threads = torch.get_num_threads()
    for tokens, number in zip((1, 3, 9, 33, 150), (2, 5, 1, 5, 2), strict=True):
        call = (torch.randn(tokens, 96), weight, 200, "g32i", bias, torch.randn(tokens, 200), 2)
        expected = linear.reference_int4_linear(*call)
        try:
            torch.set_num_threads(number)
            for variant in VARIANTS:
                with variants.use(variant):
                    assert same_bits(linear.int4_linear(*call), expected), (variant, tokens, number)
        finally:
            torch.set_num_threads(threads)


def test_rotation_is_that_of_a_hadamard_matrix() -> None:
    matrix = linear.rotate_groups(torch.eye(32))
    assert torch.equal(matrix.abs(), torch.ones(32, 32)) and torch.equal(matrix, matrix.t())
    assert torch.equal(matrix @ matrix, 32 * torch.eye(32))
    x = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(0))
    groups = [part @ matrix for part in x.split(32, -1)]
    assert error(linear.rotate_groups(x), torch.cat(groups, -1)) < 1e-6


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
@pytest.mark.parametrize(
    ("tokens", "digits", "rotated"), [(8, 1, False), (20, 1, True), (8, 2, False), (20, 2, False)]
)
def test_special_rows(tokens: int, digits: int, rotated: bool, dtype: torch.dtype) -> None:
    """NaN and infinity affect their own row only; rows of zeros or denormals return the bias."""
    torch.manual_seed(0)
    weight, bias, x = packed(20, 64, "g32i"), torch.randn(20), torch.randn(tokens, 64).to(dtype)
    x[0, 63], x[1, 0], x[2, 17] = float("nan"), float("inf"), -float("inf")
    x[3], x[4] = 0.0, 1e-38
    x[5] = 0.0
    x[5, 3] = torch.finfo(dtype).max
    call = (x, weight, 20, "g32i", bias, None, digits, rotated)
    expected = linear.reference_int4_linear(*call)
    for variant in VARIANTS:
        with variants.use(variant):
            y = linear.int4_linear(*call)
            assert y[:3].isnan().all() and not y[3:].isnan().any()
            assert torch.equal(y[3], bias.to(dtype)) and torch.equal(y[4], bias.to(dtype))
            assert same_bits(y, expected)
