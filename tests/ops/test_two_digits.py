"""Linear layers with two INT8 digits per activation against the reference, on every kernel variant."""

from __future__ import annotations

import pytest
import torch

from tests.support.packed_weights import error, packed, same_bits
from torch_armllm.ops import linear, variants

VARIANTS = variants.machine().distinct("linear", "activation")
TOKENS = (0, 1, 2, 3, 4, 5, 8, 9, 17, 70)


def two_digits(x, weight, rows, scheme, bias=None, residual=None, digits=2):  # type: ignore[no-untyped-def]
    """Calls the op of a scheme."""
    if scheme == "i8":
        return linear.int8_linear(x, weight, rows, bias, residual, digits)
    return linear.int4_linear(x, weight, rows, scheme, bias, residual, digits)


@pytest.mark.parametrize("scheme", linear.EXACT)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (50, 100), (113, 224)])
def test_exact_schemes_match_reference_bitwise(scheme: str, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    weight = packed(rows, columns, scheme)
    for tokens in TOKENS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(tokens, columns).to(dtype)
            options = (x, weight, rows, scheme, torch.randn(rows), torch.randn(tokens, rows).to(dtype))
            expected = linear.reference_int4_linear(*options, 2)
            for variant in VARIANTS:
                with variants.use(variant):
                    assert same_bits(two_digits(*options), expected), (variant, tokens)


@pytest.mark.parametrize("scheme", ["g32", "g64z", "g128m", "int8g32m"])
def test_float_groups_match_reference(scheme: str) -> None:
    torch.manual_seed(0)
    weight = packed(50, 300, scheme)
    for tokens in TOKENS[1:]:
        x = torch.randn(tokens, 300)
        expected = linear.reference_int4_linear(x, weight, 50, scheme, None, None, 2)
        for variant in VARIANTS:
            with variants.use(variant):
                may_fold = tokens > 4 and not linear.is_int8(scheme)
                actual = two_digits(x, weight, 50, scheme)
                assert error(actual, expected) < (2e-2 if may_fold else 2e-6), (variant, tokens)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scheme", [*linear.EXACT, "int8g32", "int8g128m"])
def test_result_is_independent_of_batch(variant: str, scheme: str) -> None:
    torch.manual_seed(0)
    weight, x = packed(200, 96, scheme), torch.randn(75, 96)
    with variants.use(variant):
        whole = two_digits(x, weight, 200, scheme)
        for part in (slice(0, 1), slice(7, 9), slice(3, 20), slice(74, 75)):
            assert same_bits(two_digits(x[part], weight, 200, scheme), whole[part])


@pytest.mark.parametrize("scheme", linear.EXACT)
def test_error_is_much_smaller_than_with_one_digit(scheme: str) -> None:
    torch.manual_seed(0)
    weight, x = packed(200, 96, scheme), torch.randn(75, 96)
    w, scales = linear.unpack_int(weight, 200, 96, scheme)
    exact = x.double() @ (w.double() * scales.double()[:, None]).t()
    one, two = (two_digits(x, weight, 200, scheme, digits=digits) for digits in (1, 2))
    assert float((one.double() - exact).norm()) > 200 * float((two.double() - exact).norm())


def test_bits_do_not_depend_on_threads() -> None:
    """More threads get smaller tiles, which begin and end with whole tokens."""
    torch.manual_seed(0)
    weight, bias = packed(200, 96, "g32i"), torch.randn(200)
    threads = torch.get_num_threads()
    for tokens in (1, 3, 9, 33, 150):
        x, residual = torch.randn(tokens, 96), torch.randn(tokens, 200)
        expected = linear.reference_int4_linear(x, weight, 200, "g32i", bias, residual, 2)
        try:
            for number in (1, 2, 5):
                torch.set_num_threads(number)
                for variant in VARIANTS:
                    with variants.use(variant):
                        actual = linear.int4_linear(x, weight, 200, "g32i", bias, residual, 2)
                    assert same_bits(actual, expected), (variant, tokens, number)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [8, 20])
def test_special_rows(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias, x = packed(20, 40, "g32i"), torch.randn(20), torch.randn(tokens, 40).to(dtype)
    x[0, 39], x[1, 0], x[2, 17] = float("nan"), float("inf"), -float("inf")
    x[3], x[4] = 0.0, 1e-38
    x[5] = 0.0
    x[5, 3] = torch.finfo(dtype).max
    expected = linear.reference_int4_linear(x, weight, 20, "g32i", bias, None, 2)
    for variant in VARIANTS:
        with variants.use(variant):
            y = linear.int4_linear(x, weight, 20, bias=bias, digits=2)
            assert y[:3].isnan().all() and not y[3:].isnan().any()
            assert torch.equal(y[3], bias.to(dtype)) and torch.equal(y[4], bias.to(dtype))
            assert same_bits(y, expected)


def test_gated_linear_matches_reference() -> None:
    torch.manual_seed(0)
    interleaved = linear.interleave_panels(packed(70, 100, "g32i"), packed(70, 100, "g32i"))
    biases = torch.randn(70), torch.randn(70)
    for tokens in TOKENS:
        options = (torch.randn(tokens, 100), interleaved, 70, "g32i", "silu", *biases, 2)
        expected = linear.reference_int4_gated_linear(*options)
        results = []
        for variant in VARIANTS:
            with variants.use(variant):
                results.append(linear.int4_gated_linear(*options))
        assert all(same_bits(r, results[0]) for r in results)
        assert error(results[0], expected) < 2e-6


@pytest.mark.parametrize("digits", [0, 3])
def test_other_numbers_of_digits_are_refused(digits: int) -> None:
    with pytest.raises(RuntimeError, match="digits must be 1 or 2"):
        linear.int4_linear(torch.randn(0, 40), packed(20, 40, "g32i"), 20, digits=digits)
