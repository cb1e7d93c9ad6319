"""Packing and unpacking of weights, with the kernels' reader and in PyTorch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.packed_weights import random_integers, random_multipliers
from torch_armllm.ops import linear
from torch_armllm.ops.linear import packed_layout

SHAPES = [(1, 1), (16, 32), (17, 31), (40, 100), (33, 320)]

Parts = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]
"""Integers, multipliers, scales, zero points and offsets of a weight."""


def random_parts(rows: int, columns: int, scheme: str, *leading: int) -> Parts:
    """Returns random parts for a scheme; ``leading`` are dimensions before the rows, e.g. experts."""
    traits = linear.traits_of(scheme)
    span = traits.span
    q = random_integers(traits.values, (*leading, rows, columns))
    multipliers = random_multipliers(scheme, *leading, rows, -(-columns // 32))
    shape = (*leading, rows, -(-columns // span)) if span else (*leading, rows)
    zeros = None
    if traits.zero_points:
        wide = (*leading, rows, -(-columns // 32))
        zeros = random_integers(
            traits.zero_points, wide if traits.has_narrow_zero_points else shape, torch.uint8
        )
    scales = torch.rand(shape) + 0.1
    offsets = torch.randn(shape) if traits.offsets else None
    return q, multipliers, scales.bfloat16() if traits.bf16_scales else scales, zeros, offsets


def pack(parts: Parts, scheme: str) -> Tensor:
    """Packs the parts by the op of the scheme."""
    q, multipliers, scales, zeros, offsets = parts
    if scheme == "i8":
        return linear.pack_int8(q, scales)
    return linear.pack_int4(q, multipliers, scales, scheme, zeros, offsets)


def dequantized(parts: Parts, scheme: str) -> Tensor:
    """Returns the float weight that the parts define."""
    q, multipliers, scales, zeros, offsets = parts
    columns = q.shape[-1]

    def spread(t: Tensor, span: int) -> Tensor:
        return t.float().repeat_interleave(span, -1)[..., :columns] if span else t.float()[..., None]

    span = linear.traits_of(scheme).span
    values = q.float() if zeros is None else q.float() - spread(zeros, 32 if scheme == "g32iz" else span)
    if multipliers is not None:
        values = values * spread(multipliers, 32)
    values = values * spread(scales, span)
    return values if offsets is None else values + spread(offsets, span)


@pytest.mark.parametrize("scheme", linear.SCHEMES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_unpack_inverts_pack(scheme: str, rows: int, columns: int) -> None:
    torch.manual_seed(rows + columns)
    parts = random_parts(rows, columns, scheme)
    q, multipliers, scales, zeros, offsets = parts
    weight = pack(parts, scheme)
    expected = dequantized(parts, scheme)
    assert weight.shape == (linear.panel_count(rows), linear.panel_layout(scheme, columns).bytes)
    assert torch.equal(linear.unpack_weight(weight, rows, columns, scheme), expected)
    assert torch.equal(packed_layout.unpack_values(weight, rows, columns, scheme), q)
    assert torch.equal(packed_layout.unpack_scales(weight, rows, columns, scheme), scales.float())
    if multipliers is not None:
        assert torch.equal(packed_layout.unpack_multipliers(weight, rows, columns, scheme), multipliers)
    if zeros is not None:
        unpacked_zeros = packed_layout.unpack_zero_points(weight, rows, columns, scheme)
        assert torch.equal(unpacked_zeros.view(zeros.shape), zeros)
    if offsets is not None:
        assert torch.equal(packed_layout.unpack_offsets(weight, rows, columns, scheme), offsets)
        expected = dequantized((q, multipliers, scales, zeros, None), scheme)
    if scheme in linear.EXACT:
        w, row_scale = linear.unpack_int(weight, rows, columns, scheme)
        assert w.dtype == torch.int8
        assert torch.equal(w.float() * row_scale[:, None], expected)
    else:
        w, group_scale = packed_layout.unpack_groups(weight, rows, columns, scheme)
        assert torch.equal((w * group_scale[..., None]).flatten(1)[:, :columns], expected)
        if linear.traits_of(scheme).is_int8:
            return
        row_scale = packed_layout.fold_scales(w, group_scale)[1]
        assert torch.equal(weight[:, :64].contiguous().view(torch.float32).flatten()[:rows], row_scale)


def test_traits_are_those_of_the_names() -> None:
    """Schemes with float scales tell their traits by their names."""
    assert not any(linear.traits_of(name).span for name in linear.EXACT)
    for name in set(linear.SCHEMES) - set(linear.EXACT):
        traits = linear.traits_of(name)
        letters = name.removeprefix("int8").lstrip("g0123456789")
        assert traits.is_int8 == name.startswith("int8")
        assert str(traits.span) in name
        assert (traits.zero_points is not None) == ("z" in letters)
        assert traits.bf16_scales == ("b" in letters)
        assert traits.offsets == ("m" in letters)
        assert traits.computed_as == name


@pytest.mark.parametrize("scheme", linear.SCHEMES)
def test_multiplied_values_fit_int8(scheme: str) -> None:
    traits = linear.traits_of(scheme)
    least, most = traits.zero_points or (0, 0)
    low, high = traits.values[0] - most, traits.values[1] - least
    for multiplier in traits.multipliers or ():
        assert min(low * multiplier, high * multiplier) >= -128
        assert max(low * multiplier, high * multiplier) <= 127


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 50),
    st.integers(1, 300),
    st.sampled_from(tuple(linear.SCHEMES)),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_random_shapes_round_trip(rows: int, columns: int, scheme: str, seed: int, experts: bool) -> None:
    torch.manual_seed(seed)
    parts = random_parts(rows, columns, scheme, *((3,) if experts else ()))
    weight = pack(parts, scheme)
    assert torch.equal(linear.unpack_weight(weight, rows, columns, scheme), dequantized(parts, scheme))


@pytest.mark.parametrize("scheme", ["g32", "g64", "g128", "g32z", "g64z", "g128z"])
def test_folding_error_is_bounded(scheme: str) -> None:
    """Folding rounds a weight to INT8, and rounds the factor of its group: half a step and 15/512 at most."""
    torch.manual_seed(0)
    parts = random_parts(40, 320, scheme)
    weight = pack(parts, scheme)
    w, scales = packed_layout.unpack_groups(weight, 40, 320, scheme)
    folded, row_scale = packed_layout.fold_scales(w, scales)
    exact = (w * scales[..., None]).flatten(1) / row_scale[:, None]
    assert float((folded - exact).abs().max()) < 0.5 + 15 / 512 + 1e-3
    assert int(folded.abs().max()) == 127


def test_zero_groups_do_not_affect_folding() -> None:
    """The scale of a group of zeros is arbitrary: it must not affect the row scale or overflow."""
    q = torch.zeros(2, 64, dtype=torch.int8)
    q[0, :32] = 7
    weight = linear.pack_int4(q, None, torch.tensor([[1e-3, 1e9], [1.0, 0.0]]), "g32")
    folded, row_scale = packed_layout.fold_scales(*packed_layout.unpack_groups(weight, 2, 64, "g32"))
    assert folded[0].tolist() == [127] * 32 + [0] * 32
    assert not folded[1].any()
    assert row_scale[1] == 0


def test_experts_are_packed_independently() -> None:
    for scheme in ("g32i", "g32iz", "int3", "g64zb", "g64m", "int8g128m"):
        parts = random_parts(20, 170, scheme, 3)
        stacked = pack(parts, scheme)
        for e in range(3):
            q, multipliers, scales, zeros, offsets = (None if part is None else part[e] for part in parts)
            assert q is not None
            assert scales is not None
            assert torch.equal(stacked[e], pack((q, multipliers, scales, zeros, offsets), scheme))


@pytest.mark.parametrize("scheme", linear.SCHEMES)
def test_padding_unpacks_to_zero(scheme: str) -> None:
    weight = pack(random_parts(5, 7, scheme), scheme)
    whole = linear.unpack_weight(weight, 16, 32, scheme)
    assert not whole[5:].any()
    if not linear.traits_of(scheme).offsets:  # offsets may be added to padding: its activations are zero
        assert not whole[:, 7:].any()


def test_panel_layout_matches_the_specification() -> None:
    """The byte layout specified in packed_panel.h."""
    q = torch.zeros(16, 32, dtype=torch.int8)
    q[3, 13] = 5  # line 1 (k = 8..15), byte 8·3 + 5, low nibble, biased
    q[11, 14] = -3  # line 1, byte 8·3 + 6, high nibble, two's complement
    multipliers = torch.ones(16, 1, dtype=torch.uint8)
    multipliers[3], multipliers[9] = 12, 4
    panel = linear.pack_int4(q, multipliers, torch.arange(16.0))[0]
    assert panel[:64].view(torch.float32).tolist() == list(range(16))
    assert panel[64:128].tolist() == [0, 3 << 4, 0, 11] + [0] * 60
    expected = torch.full((256,), 0x08, dtype=torch.uint8)
    expected[64 + 29] = 5 + 8
    expected[64 + 30] = (16 - 3) << 4 | 8
    assert torch.equal(panel[128:], expected)


def test_panel_layout_of_narrow_zero_points_matches_the_specification() -> None:
    q = torch.full((16, 64), 8, dtype=torch.int8)
    q[3, 13] = 15  # line 1 (k = 8..15), byte 8·3 + 5, low nibble
    q[11, 46] = 2  # group 1, line 1, byte 8·3 + 6, high nibble: q − 8
    multipliers, zeros = torch.ones(16, 2, dtype=torch.uint8), torch.full((16, 2), 8, dtype=torch.uint8)
    multipliers[3, 0], multipliers[9, 1] = 12, 14
    zeros[3, 0], zeros[11, 1], zeros[15, 1] = 6, 9, 7
    panel = linear.pack_int4(q, multipliers, torch.arange(16.0), "g32iz", zeros)[0]
    assert panel.shape == (64 + 64 + 2 * 256,)
    assert panel[:64].view(torch.float32).tolist() == list(range(16))
    assert panel[64:80].tolist() == [0, 0, 0, 11, 0, 0, 0, 0, 0, 13 << 4, 0, 0, 0, 0, 0, 0]
    words = [0xAAAAAAAA & ~(3 << 6), 0xAAAAAAAA | 3 << 22]  # little-endian, bits 2r and 2r + 1 of row r
    words[1] = words[1] & ~(3 << 30) | 1 << 30
    stored = b"".join(word.to_bytes(4, "little") for word in words)
    assert panel[80:128].tolist() == [*stored, *([0] * 40)]
    expected = torch.full((512,), 0x08, dtype=torch.uint8)
    expected[64 + 29] = 15
    expected[256 + 64 + 30] = ((2 - 8) & 15) << 4 | 8
    assert torch.equal(panel[128:], expected)


def test_panel_layout_of_three_bits_matches_the_specification() -> None:
    q = torch.zeros(16, 64, dtype=torch.int8)
    q[3, 13] = 3  # line 1 (k = 8..15) in bits 2 and 3 of line 0, byte 8·3 + 5, low nibble: u = 7
    q[11, 30] = -3  # line 3 in bits 2 and 3 of line 1, byte 8·3 + 6, high nibble: u = 1
    q[9, 32] = -4  # a negative multiplier: u = 3 − q = 7
    multipliers = torch.ones(16, 2, dtype=torch.int8)
    multipliers[3, 0], multipliers[9, 1] = 12, -16
    panel = linear.pack_int4(q, multipliers, torch.arange(16.0), "int3")[0]
    assert panel.shape == (64 + 64 + 64 + 2 * 192,)
    assert panel[:64].view(torch.float32).tolist() == list(range(16))
    assert panel[64:128].tolist() == [0, 0, 0, 11, 0, 0, 0, 0, 0, 15 << 4] + [0] * 54
    assert panel[128:192].tolist() == [0, 0, 0, 1 << 1] + [0] * 60
    zero, minus_zero = [0] * 128 + [0xFF] * 64, [0] * 128 + [0xFF] * 64
    zero[29] = 3 << 2
    zero[64 + 30] = 1 << 6
    zero[128 + 30] = 0x7F
    minus_zero[8:16] = [0xF0] * 8  # 3 − 0: the low bits of all columns of row 9
    minus_zero[64 + 8 : 64 + 16] = [0xF0] * 8
    minus_zero[128 + 8 : 128 + 16] = [0x0F] * 8
    minus_zero[128 + 8] = 0x1F
    assert panel[192:].tolist() == zero + minus_zero


def test_panel_layout_of_five_bits_matches_the_specification() -> None:
    q = torch.zeros(16, 64, dtype=torch.int8)
    q[3, 13] = 15  # INT8 line 3, byte 4·3 + 1: high nibble of line 1, bit 3 of the last line
    q[11, 32] = -16  # group 1, INT8 line 0, byte 4·11: u = 0
    multipliers = torch.ones(16, 2, dtype=torch.uint8)
    multipliers[3, 0], multipliers[9, 1] = 8, 6
    panel = linear.pack_int4(q, multipliers, torch.arange(16.0), "int5")[0]
    assert panel.shape == (64 + 64 + 2 * 320,)
    assert panel[:64].view(torch.float32).tolist() == list(range(16))
    assert panel[64:128].tolist() == [8, 0, 8, 0, 8, 0, 0, 2, 0, 0, 0, 2] + [0] * 52
    expected = ([0] * 256 + [0xFF] * 64) * 2
    expected[64 + 13] = 15 << 4
    expected[320 + 256 + 44] = 0xFE
    assert panel[128:].tolist() == expected


def test_panel_layout_with_float_groups_matches_the_specification() -> None:
    q = torch.zeros(16, 200, dtype=torch.int8)
    q[0, 199] = 9  # line 24 of the values, byte 7, low nibble: q itself
    q[8, 0] = 15  # line 0, byte 0, high nibble: q − 8
    zeros = torch.zeros(16, 2, dtype=torch.uint8)
    zeros[2, 1], zeros[12, 0] = 6, 7
    scales = torch.arange(32.0).view(16, 2).bfloat16()
    panel = linear.pack_int4(q, None, scales, "g128zb", zeros)[0]
    assert panel.shape == (64 + 64 + 64 + 7 * 256,)
    row_scale = panel[:64].view(torch.float32)
    assert row_scale[0] == torch.tensor(9.0) / 127
    assert row_scale[8] == torch.tensor(15.0 * 16.0) / 127
    assert panel[64:128].view(torch.bfloat16).tolist() == [*range(0, 32, 2), *range(1, 32, 2)]
    assert panel[128:144].tolist() == [0, 0, 0, 0, 7 << 4, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0]
    values = panel[192:]
    assert values[0] == 0x70
    assert values[24 * 64 + 7] == 0x89
    assert values[1] == 0x80


def test_interleaved_panels_alternate() -> None:
    gate, up = pack(random_parts(40, 32, "row"), "row"), pack(random_parts(40, 32, "row"), "row")
    interleaved = linear.interleave_panels(gate, up)
    assert torch.equal(interleaved[0::2], gate)
    assert torch.equal(interleaved[1::2], up)
    with pytest.raises(ValueError, match="must be equal"):
        linear.interleave_panels(gate, up[:1])


def test_schemes_of_another_kind_are_refused() -> None:
    q, multipliers, scales, *_ = random_parts(20, 40, "g32i")
    packed = linear.pack_int4(q, multipliers, scales)
    with pytest.raises(ValueError, match="no integer form"):
        linear.unpack_int(packed, 20, 40, "g32")
    with pytest.raises(ValueError, match="one scale per row"):
        packed_layout.unpack_groups(packed, 20, 40, "g32i")
    with pytest.raises(ValueError, match="unknown scheme"):
        linear.panel_layout("q4_0", 32)


def test_invalid_narrow_zero_points_raise() -> None:
    q, multipliers, scales, zeros, _ = random_parts(20, 40, "g32iz")
    assert multipliers is not None and zeros is not None
    message = r"q must be in 0\.\.15, multipliers in 1\.\.14, and zeros in 6\.\.9"
    for bad in (q + 16, q - 16):
        with pytest.raises(RuntimeError, match=message):
            linear.pack_int4(bad, multipliers, scales, "g32iz", zeros)
    for values, outside in ((multipliers, (0, 15, 16)), (zeros, (0, 5, 10, 255))):
        valid = int(values[19, 1])
        for value in outside:
            values[19, 1] = value
            with pytest.raises(RuntimeError, match=message):
                linear.pack_int4(q, multipliers, scales, "g32iz", zeros)
        values[19, 1] = valid
    with pytest.raises(RuntimeError, match="zeros must have the leading sizes of q and one column per group"):
        linear.pack_int4(q, multipliers, scales, "g32iz", zeros[:, 0])
    with pytest.raises(RuntimeError, match="zeros are required"):
        linear.pack_int4(q, multipliers, scales, "g32iz")


def test_invalid_three_bits_raise() -> None:
    q, multipliers, scales, *_ = random_parts(20, 40, "int3")
    assert multipliers is not None
    for bad in (q + 8, q - 8):
        with pytest.raises(RuntimeError, match=r"q must be in -4\.\.3"):
            linear.pack_int4(bad, multipliers, scales, "int3")
    for outside in (0, 17, -17, -128):
        multipliers[19, 1] = outside
        with pytest.raises(RuntimeError, match=r"multipliers in -16\.\.-1 or 1\.\.16"):
            linear.pack_int4(q, multipliers, scales, "int3")
    with pytest.raises(RuntimeError, match="multipliers must be int8 for scheme int3"):
        linear.pack_int4(q, multipliers.byte(), scales, "int3")
    with pytest.raises(RuntimeError, match="multipliers must be uint8"):
        linear.pack_int4(q, multipliers, scales)
