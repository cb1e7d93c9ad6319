"""Packing: what goes in comes out, through the kernels' own reader and through plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_armllm.ops import linear
from torch_armllm.ops.linear import layout

SHAPES = [(1, 1), (16, 32), (17, 31), (40, 100), (33, 320)]


def plain(rows: int, columns: int, scheme: str, *leading: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Random q, multipliers and scales of a scheme."""
    groups = -(-columns // 32)
    low, high = (-128, 128) if scheme == "i8" else (-8, 8)
    q = torch.randint(low, high, (*leading, rows, columns), dtype=torch.int8)
    multipliers = None
    if scheme == "g32i":
        multipliers = torch.randint(1, 17, (*leading, rows, groups), dtype=torch.uint8)
    shape = (*leading, rows, groups) if scheme == "g32" else (*leading, rows)
    return q, multipliers, torch.rand(shape) + 0.1


def pack(q: Tensor, multipliers: Tensor | None, scales: Tensor, scheme: str) -> Tensor:
    return linear.pack_int8(q, scales) if scheme == "i8" else linear.pack_int4(q, multipliers, scales, scheme)


def dequantized(q: Tensor, multipliers: Tensor | None, scales: Tensor) -> Tensor:
    """The weight by its definition."""
    values = q.float()
    if multipliers is not None:
        values = values * multipliers.float().repeat_interleave(32, -1)[..., : q.shape[-1]]
    if scales.dim() == q.dim():
        return values * scales.repeat_interleave(32, -1)[..., : q.shape[-1]]
    return values * scales[..., None]


@pytest.mark.parametrize("scheme", linear.SCHEMES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_unpack_returns_what_was_packed(scheme: str, rows: int, columns: int) -> None:
    torch.manual_seed(rows + columns)
    q, multipliers, scales = plain(rows, columns, scheme)
    weight = pack(q, multipliers, scales, scheme)
    assert weight.shape == (linear.panel_count(rows), linear.panel_layout(scheme, columns).bytes)
    assert torch.equal(
        linear.unpack_weight(weight, rows, columns, scheme), dequantized(q, multipliers, scales)
    )
    assert torch.equal(layout.unpack_values(weight, rows, columns, scheme), q)
    assert torch.equal(layout.unpack_scales(weight, rows, columns, scheme), scales)
    if multipliers is not None:
        assert torch.equal(layout.unpack_multipliers(weight, rows, columns), multipliers)
    if scheme != "g32":
        w, row_scale = linear.unpack_int(weight, rows, columns, scheme)
        assert w.dtype == torch.int8
        assert torch.equal(w.float() * row_scale[:, None], dequantized(q, multipliers, scales))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 50),
    st.integers(1, 130),
    st.sampled_from(linear.SCHEMES),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_any_shape(rows: int, columns: int, scheme: str, seed: int, experts: bool) -> None:
    torch.manual_seed(seed)
    q, multipliers, scales = plain(rows, columns, scheme, *((3,) if experts else ()))
    weight = pack(q, multipliers, scales, scheme)
    assert torch.equal(
        linear.unpack_weight(weight, rows, columns, scheme), dequantized(q, multipliers, scales)
    )


def test_experts_are_packed_one_by_one() -> None:
    q, multipliers, scales = plain(20, 70, "g32i", 3)
    assert multipliers is not None
    together = linear.pack_int4(q, multipliers, scales)
    for e in range(3):
        assert torch.equal(together[e], linear.pack_int4(q[e], multipliers[e], scales[e]))


def test_padding_is_zero() -> None:
    weight = pack(*plain(5, 7, "g32i"), "g32i")
    assert torch.equal(
        layout.unpack_values(weight, 16, 32, "g32i")[5:], torch.zeros(11, 32, dtype=torch.int8)
    )
    assert torch.equal(
        layout.unpack_values(weight, 16, 32, "g32i")[:, 7:], torch.zeros(16, 25, dtype=torch.int8)
    )


def test_layout_of_one_panel() -> None:
    """The bytes that linear.h promises, written out once."""
    q = torch.zeros(16, 32, dtype=torch.int8)
    q[3, 13] = 5  # line 1 (k = 8..15), byte 4·3 + 1, high nibble
    multipliers = torch.ones(16, 1, dtype=torch.uint8)
    multipliers[3] = 12
    panel = linear.pack_int4(q, multipliers, torch.arange(16.0))[0]
    assert panel[:64].view(torch.float32).tolist() == list(range(16))
    assert panel[64:128].tolist() == [0, 11 << 4] + [0] * 62
    expected = torch.full((256,), 0x88, dtype=torch.uint8)
    expected[64 + 13] = (5 + 8) << 4 | 8
    assert torch.equal(panel[128:], expected)


def test_interleaved_panels_alternate() -> None:
    gate, up = pack(*plain(40, 32, "row"), "row"), pack(*plain(40, 32, "row"), "row")
    both = linear.interleave_panels(gate, up)
    assert torch.equal(both[0::2], gate)
    assert torch.equal(both[1::2], up)
    with pytest.raises(ValueError, match="must agree"):
        linear.interleave_panels(gate, up[:1])


def test_strided_inputs() -> None:
    q, multipliers, scales = plain(32, 64, "g32i")
    assert multipliers is not None
    expected = linear.pack_int4(q, multipliers, scales)
    turned = linear.pack_int4(
        q.t().contiguous().t(), multipliers.t().contiguous().t(), scales[:, None].expand(32, 2)[:, 0]
    )
    assert torch.equal(turned, expected)
    spread = torch.empty(2, 1000, dtype=torch.uint8)[:, : expected.shape[1]].copy_(expected)
    assert torch.equal(
        linear.unpack_weight(spread, 32, 64, "g32i"), linear.unpack_weight(expected, 32, 64, "g32i")
    )


def test_ops_are_well_formed() -> None:
    tests = ("test_schema", "test_faketensor")
    q, multipliers, scales = plain(20, 40, "g32i")
    torch.library.opcheck(torch.ops.armllm.pack_int4, (q, multipliers, scales, "g32i"), test_utils=tests)
    torch.library.opcheck(torch.ops.armllm.pack_int8, (q, scales), test_utils=tests)
    weight = linear.pack_int4(q, multipliers, scales)
    torch.library.opcheck(torch.ops.armllm.unpack_weight, (weight, 20, 40, "g32i"), test_utils=tests)


def test_what_does_not_fit_is_refused() -> None:
    q, multipliers, scales = plain(20, 40, "g32i")
    assert multipliers is not None
    with pytest.raises(RuntimeError, match="-8..7"):
        linear.pack_int4(q + 8, multipliers, scales)
    with pytest.raises(RuntimeError, match=r"1\.\.16"):
        linear.pack_int4(q, multipliers * 0, scales)
    with pytest.raises(RuntimeError, match="multipliers"):
        linear.pack_int4(q, None, scales)
    with pytest.raises(RuntimeError, match="multipliers"):
        linear.pack_int4(q, multipliers, scales, "row")
    with pytest.raises(RuntimeError, match="one column a group"):
        linear.pack_int4(q, multipliers[:, :1], scales)
    with pytest.raises(RuntimeError, match="scales"):
        linear.pack_int4(q, multipliers, scales[:-1])
    with pytest.raises(RuntimeError, match="float32"):
        linear.pack_int4(q, multipliers, scales.double())
    with pytest.raises(RuntimeError, match="int8"):
        linear.pack_int4(q.int(), multipliers, scales)
    with pytest.raises(RuntimeError, match="unknown scheme 'g64'"):
        linear.pack_int4(q, multipliers, scales, "g64")
    with pytest.raises(RuntimeError, match="pack_int8"):
        linear.pack_int4(q, None, scales, "i8")
    with pytest.raises(RuntimeError, match=r"needs 2 of 576"):
        linear.unpack_weight(linear.pack_int4(q, multipliers, scales), 20, 50, "row")
    with pytest.raises(ValueError, match="no integer form"):
        linear.unpack_int(linear.pack_int4(q, multipliers, scales), 20, 40, "g32")
    with pytest.raises(ValueError, match="unknown scheme"):
        linear.panel_layout("q4_0", 32)
