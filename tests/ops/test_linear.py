"""Quantized linear layers against the reference, on every kernel variant and batch size."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.packed_weights import error, packed, quant_linear, same_bits, signed_multipliers
from torch_armllm.ops import linear, variants

VARIANTS = variants.machine().distinct("linear", "activation")
EXACT = linear.EXACT
FLOAT_GROUPS = tuple(name for name in linear.SCHEMES if name not in linear.EXACT)
FOLD_LIMIT = 16  # every variant folds float group scales for more tokens than this
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Options = tuple[Tensor, Tensor, int, str, Tensor | None, Tensor | None]
"""Arguments of a linear layer and its reference."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Runs on one thread: a thread team is slow on a busy machine, and thread counts have their own test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 70), st.integers(1, 330), st.booleans(), st.integers(0, 2**31))
def test_three_bits_equal_four_bits_with_the_same_integers(
    tokens: int, rows: int, columns: int, gated: bool, seed: int
) -> None:
    """``int3`` gives the bits of ``g32i``: a negative multiplier negates its integers."""
    torch.manual_seed(seed)
    groups = -(-columns // 32)
    q = torch.randint(-4, 4, (rows, columns), dtype=torch.int8)
    multipliers, scales = signed_multipliers(rows, groups), torch.randn(rows)
    negated = q * multipliers.sign().repeat_interleave(32, 1)[:, :columns]
    three = linear.pack_int4(q, multipliers, scales, "int3")
    four = linear.pack_int4(negated, multipliers.abs().byte(), scales)
    x, bias = torch.randn(tokens, columns), torch.randn(rows)
    for variant in VARIANTS:
        with variants.use(variant):
            if gated:
                results = [
                    linear.int4_gated_linear(
                        x, linear.interleave_panels(w, w), rows, name, "silu", bias, bias
                    )
                    for w, name in ((three, "int3"), (four, "g32i"))
                ]
            else:
                results = [
                    linear.int4_linear(x, w, rows, name, bias)
                    for w, name in ((three, "int3"), (four, "g32i"))
                ]
            assert same_bits(*results), variant


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 70), st.integers(1, 330), st.integers(0, 2**31))
def test_zero_points_of_eight_equal_none(tokens: int, rows: int, columns: int, seed: int) -> None:
    """``g32iz`` with zero points of 8 gives the bits of ``g32i``."""
    torch.manual_seed(seed)
    shape = (rows, -(-columns // 32))
    q, scales = torch.randint(0, 16, (rows, columns), dtype=torch.int8), torch.randn(rows)
    multipliers, eights = torch.randint(1, 15, shape, dtype=torch.uint8), torch.full(shape, 8).byte()
    with_zeros = linear.pack_int4(q, multipliers, scales, "g32iz", eights)
    without = linear.pack_int4(q - 8, multipliers, scales)
    x, bias = torch.randn(tokens, columns), torch.randn(rows)
    for variant in VARIANTS:
        with variants.use(variant):
            actual = linear.int4_linear(x, with_zeros, rows, "g32iz", bias)
            assert same_bits(actual, linear.int4_linear(x, without, rows, "g32i", bias)), variant


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(1, 70),
    st.integers(1, 150),
    st.sampled_from(EXACT),
    st.sampled_from(DTYPES),
    st.integers(0, 2**31),
)
def test_random_shapes_match_reference_bitwise(
    tokens: int, rows: int, columns: int, scheme: str, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = packed(rows, columns, scheme)
    x = (torch.randn(tokens, columns) * 10 ** torch.empty(tokens, 1).uniform_(-4, 4)).to(dtype)
    bias = torch.randn(rows).to(dtype)
    expected = linear.reference_int4_linear(x, weight, rows, scheme, bias)
    for variant in VARIANTS:
        with variants.use(variant):
            assert same_bits(quant_linear(x, weight, rows, scheme, bias), expected), variant


@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_extreme_values_do_not_saturate(scheme: str, tokens: int) -> None:
    """The largest partial sums of either sign must not saturate."""
    columns = 320
    for low in (True, False):
        if scheme == "i8":
            w = torch.full((16, columns), -128 if low else 127, dtype=torch.int8)
            weight = linear.pack_int8(w, torch.ones(16))
        else:
            traits = linear.traits_of(scheme)
            most = traits.largest_multiplier
            kind = torch.int8 if traits.signed_multipliers else torch.uint8
            multipliers = torch.full((16, 10), most, dtype=kind) if most else None
            zeros = None
            if scheme == "rowz":
                zeros = torch.full((16,), 15 if low else 0, dtype=torch.uint8)
            elif scheme == "g32iz":
                zeros = torch.full((16, 10), 9 if low else 6, dtype=torch.uint8)
            q = torch.full((16, columns), traits.values[0 if low else 1], dtype=torch.int8)
            weight = linear.pack_int4(q, multipliers, torch.ones(16), scheme, zeros)
            w = q if zeros is None else q - zeros.view(16, -1)[:, :1].to(torch.int8)
            w = w * most if most else w
        for signs in (
            torch.ones(columns),
            -torch.ones(columns),
            torch.tensor([1.0, -1.0]).repeat(columns // 2),
        ):
            x = (signs * 127).expand(tokens, columns)
            expected = (w.double() @ signs.double() * 127).float().expand(tokens, 16)
            for variant in VARIANTS:
                with variants.use(variant):
                    assert torch.equal(quant_linear(x, weight, 16, scheme), expected), variant


@functools.cache
def float_cases(scheme: str, rows: int, columns: int) -> list[tuple[Options, Tensor, Tensor | None]]:
    """Returns inputs, exact results, and results of the folded weight if all variants fold; computed once."""
    torch.manual_seed(rows)
    weight = packed(rows, columns, scheme)
    cases = []
    for tokens in (0, 1, 3, 4, 8, 9, 40):
        for dtype in DTYPES if columns == 33 else (torch.float32,):
            x = torch.randn(tokens, columns).to(dtype)
            bias, residual = torch.randn(rows), torch.randn(tokens, rows).to(dtype)
            options: Options = (x, weight, rows, scheme, bias, residual)
            folds = tokens > FOLD_LIMIT and not linear.traits_of(scheme).is_int8
            folded = linear.reference_folded_linear(*options) if folds else None
            cases.append((options, linear.reference_int4_linear(*options), folded))
    return cases


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scheme", FLOAT_GROUPS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (17, 33), (50, 300)])
def test_float_groups_match_exact_and_folded_reference(
    variant: str, scheme: str, rows: int, columns: int
) -> None:
    """Few tokens match the exact sums; many tokens match the folded weight, bit for bit without offsets."""
    with variants.use(variant):
        for options, exact, folded in float_cases(scheme, rows, columns):
            x, actual = options[0], quant_linear(*options)
            rounding = 2e-6 if x.dtype == torch.float32 else 4e-3
            may_fold = len(x) > 8 and not linear.traits_of(scheme).is_int8
            assert error(actual, exact) < (2e-2 if may_fold else rounding)
            if folded is None:
                continue
            if linear.traits_of(scheme).offsets:
                assert error(actual, folded) < rounding
            else:
                assert same_bits(actual, folded)


def test_relative_error_of_folding_is_bounded() -> None:
    """Folding increases the output error by less than 1 %, as docs/reference/schemes.md states."""
    torch.manual_seed(0)
    w, x = torch.randn(256, 1024), torch.randn(64, 1024)
    float_output = x @ w.t()
    scales = w.view(256, 32, 32).abs().amax(-1) / 7
    q = (w.view(256, 32, 32) / scales[..., None]).round().clamp(-8, 7).to(torch.int8).flatten(1)
    weight = linear.pack_int4(q, None, scales, "g32")
    exact = error(linear.reference_int4_linear(x, weight, 256, "g32"), float_output)
    folded = error(linear.reference_folded_linear(x, weight, 256, "g32"), float_output)
    assert exact < folded < exact * 1.01


@pytest.mark.parametrize("scheme", linear.SCHEMES)
def test_variants_are_bit_identical(scheme: str) -> None:
    """Float group scales do not break bit equality: all variants add groups in the same order."""
    torch.manual_seed(0)
    weight = packed(50, 300, scheme)
    for tokens in (3, 7, 40):
        x = torch.randn(tokens, 300)
        results = []
        for variant in VARIANTS:
            with variants.use(variant):
                results.append(quant_linear(x, weight, 50, scheme))
        assert all(same_bits(r, results[0]) for r in results)


@pytest.mark.parametrize("scheme", ["int8g32", "int8g64m"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_extreme_int8_groups_are_exact(scheme: str, tokens: int) -> None:
    """The largest partial sums of either sign, in groups that cancel each other."""
    columns, span = 256, linear.traits_of(scheme).span
    q = torch.full((16, columns), -128, dtype=torch.int8)
    scales = torch.tensor([1.0, -1.0]).repeat(16, columns // span // 2)
    offsets = torch.full_like(scales, 3.0) if linear.traits_of(scheme).offsets else None
    weight = linear.pack_int4(q, None, scales, scheme, None, offsets)
    x = torch.full((tokens, columns), 127.0)
    expected = torch.full((tokens, 16), 3.0 * columns * 127 if offsets is not None else 0.0)
    for variant in VARIANTS:
        with variants.use(variant):
            assert torch.equal(quant_linear(x, weight, 16, scheme), expected), variant


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scheme", [*EXACT, "int8g32", "int8g128m"])
def test_result_is_independent_of_batch_and_threads(variant: str, scheme: str) -> None:
    torch.manual_seed(0)
    weight = packed(200, 96, scheme)
    x = torch.randn(75, 96)
    threads = torch.get_num_threads()
    with variants.use(variant):
        whole = quant_linear(x, weight, 200, scheme)
        assert all(
            same_bits(quant_linear(x[i : i + 1], weight, 200, scheme), whole[i : i + 1])
            for i in (0, 7, 8, 63, 74)
        )
        assert same_bits(quant_linear(x[3:20], weight, 200, scheme), whole[3:20])
        for count in (1, 2, 16):
            torch.set_num_threads(count)
            repeated, few = quant_linear(x, weight, 200, scheme), quant_linear(x[:4], weight, 200, scheme)
            torch.set_num_threads(threads)
            assert same_bits(repeated, whole)
            assert same_bits(few, whole[:4])


@pytest.mark.parametrize("scheme", linear.SCHEMES)
@pytest.mark.parametrize("tokens", [2, 20])
def test_strided_panels_equal_contiguous_panels(scheme: str, tokens: int) -> None:
    """Slices of a merged weight, alternate panels of an interleaved weight, and panels with gaps."""
    torch.manual_seed(0)
    weight, other = packed(70, 64, scheme), packed(70, 64, scheme)
    x = torch.randn(tokens, 64)
    expected = quant_linear(x, weight, 70, scheme)
    assert same_bits(quant_linear(x, linear.interleave_panels(other, weight)[1::2], 70, scheme), expected)
    merged = torch.cat((other, weight, other))
    assert same_bits(quant_linear(x, merged[5:10], 70, scheme), expected)
    wide = torch.zeros(5, weight.shape[1] + 192, dtype=torch.uint8)
    wide[:, : weight.shape[1]] = weight
    assert same_bits(quant_linear(x, wide[:, : weight.shape[1]], 70, scheme), expected)
