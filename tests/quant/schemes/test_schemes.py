"""Rounding to integers: ranges, errors, odd shapes, and accuracy on real weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from torch_armllm.quant.packing import dequantize_matrix, quantize_matrices
from torch_armllm.quant.schemes.base import Quantized
from torch_armllm.quant.schemes.group_multipliers import Multiplied
from torch_armllm.quant.schemes.registry import SCHEMES, scheme_named

ALL = list(SCHEMES)
NAMES = [
    *("g32i", "g32iz", "row", "rowz", "int8", "int6", "int5", "int3"),
    *("g32", "g64", "g128", "g32z", "g128zb", "g32m", "int8g64"),
]
"""One scheme of each kind, for tests in which group size and zero points do not interact."""


def random_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    gains = 0.2 + torch.rand(rows, 1, generator=generator)
    return torch.randn(rows, columns, generator=generator) * gains * 0.05


def error_of(weight: torch.Tensor, name: str) -> float:
    return SCHEMES[name].quantize(weight)[1]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 280), seed=st.integers(0, 99))
def test_ranges_and_error(name: str, rows: int, columns: int, seed: int) -> None:
    weight = random_weight(rows, columns, seed)
    found, error = SCHEMES[name].quantize(weight)
    groups = -(-columns // 32)
    assert found.q.shape == weight.shape
    assert found.q.dtype == torch.int8
    traits = SCHEMES[name].traits
    low, high = traits.values
    assert int(found.q.min()) >= low
    assert int(found.q.max()) <= high
    span = SCHEMES[name].span
    assert found.scales.shape == ((rows, -(-columns // span)) if span else (rows,))
    assert found.scales.dtype == (torch.bfloat16 if name.endswith("b") else torch.float32)
    if "z" in name:
        assert found.zeros is not None
        assert found.zeros.shape == ((rows, groups) if name == "g32iz" else found.scales.shape)
        least, most = (6, 9) if name == "g32iz" else (0, 15)
        assert least <= int(found.zeros.min()) <= int(found.zeros.max()) <= most
    else:
        assert found.zeros is None
    assert (found.offsets is not None) == name.endswith("m")
    if traits.multipliers:
        assert found.multipliers is not None
        assert found.multipliers.shape == (rows, groups)
        assert found.multipliers.dtype == (torch.int8 if name == "int3" else torch.uint8)
        assert int(found.multipliers.abs().min()) >= 1
        assert int(found.multipliers.abs().max()) <= traits.multipliers[1]
        assert int(found.multipliers.min()) > 0 or name == "int3"
    else:
        assert found.multipliers is None
    back = SCHEMES[name].dequantize(found)
    expected = float((weight - back).norm() / weight.norm())
    assert error == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert error < (0.02 if name.startswith("int8") else 0.05 if name == "int6" else 0.3)


@pytest.mark.parametrize("name", NAMES)
def test_representable_weights_are_exact(name: str) -> None:
    top = 9 if "z" in name or "m" in name else 8  # zero points are for ranges that use all 16 values
    lowest, top = (-3, 4) if name == "int3" else (-7, top)
    q = torch.arange(lowest, top, dtype=torch.float32).repeat(4, 64 // (top - lowest) + 1)[:, :64]
    back = SCHEMES[name].dequantize(SCHEMES[name].quantize(q * 0.25)[0])
    near = {"int8": 1e-2, "int6": 4e-2, "int5": 8e-2, "int8g64": 1e-2, "g128zb": 2e-2}
    assert torch.allclose(back, q * 0.25, atol=near.get(name, 1e-5))


@pytest.mark.parametrize("name", NAMES)
def test_zero_rows_and_zero_groups(name: str) -> None:
    weight = random_weight(6, 96)
    weight[2] = 0
    weight[:, 32:64] = 0
    back = SCHEMES[name].dequantize(SCHEMES[name].quantize(weight)[0])
    assert bool(back.isfinite().all())
    assert not back[2].any()
    assert not back[:, 32:64].any()
    assert SCHEMES[name].quantize(torch.zeros(3, 32))[1] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_quantized_independently(name: str) -> None:
    weight = random_weight(700, 200)
    whole = SCHEMES[name].quantize(weight)[0]
    part = SCHEMES[name].quantize(weight[300:310])[0]
    assert torch.equal(whole.q[300:310], part.q)
    assert torch.equal(whole.scales[300:310], part.scales)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_and_strides_do_not_change_integers(name: str, dtype: torch.dtype) -> None:
    weight = random_weight(48, 80).to(dtype)
    expected = SCHEMES[name].quantize(weight.float())[0]
    got: Quantized = SCHEMES[name].quantize(weight.t().contiguous().t())[0]
    assert torch.equal(got.q, expected.q)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damaged_weights_raise(bad: float) -> None:
    weight = random_weight(4, 64)
    weight[1, 5] = bad
    with pytest.raises(ValueError, match="NaN or an infinity"):
        SCHEMES["g32i"].quantize(weight)


def test_unknown_names_and_types_raise() -> None:
    with pytest.raises(ValueError, match="'q5'.*g32i"):
        scheme_named("q5")
    with pytest.raises(ValueError, match="float matrices"):
        SCHEMES["g32i"].quantize(torch.zeros(4, 4, dtype=torch.int8))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("g32i", 4.14),
        ("g32", 5.0),
        ("g64b", 4.25),
        ("g128zb", 4.16),
        ("row", 4.02),
        ("int8", 8.02),
        ("int6", 6.08),
        ("int5", 5.11),
        ("int3", 3.17),
        ("g32iz", 4.20),
    ],
)
def test_bits_per_weight(name: str, bits: float) -> None:
    assert SCHEMES[name].bits(2048) == pytest.approx(bits, abs=0.01)


def test_signs_of_groups_lower_the_error_of_three_bits() -> None:
    class Unsigned(Multiplied):
        signed_multipliers = False

    weight = random_weight(128, 2048)
    error = error_of(weight, "int3")
    assert error < 0.17
    assert error < 0.93 * Unsigned("int3", 7).quantize(weight)[1]


def test_five_bits_lie_between_four_and_six() -> None:
    weight = random_weight(128, 2048)
    assert 1.6 * error_of(weight, "int6") < error_of(weight, "int5") < 0.6 * error_of(weight, "g32iz")


def test_zero_points_of_groups_lower_the_squared_error() -> None:
    weight = random_weight(128, 2048)
    assert error_of(weight, "g32iz") ** 2 < 0.85 * error_of(weight, "g32i") ** 2


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_tail_longer_than_the_range_is_not_clipped(sign: int) -> None:
    weight = random_weight(8, 96).abs() * sign
    weight[:, 5] = 3.0 * sign
    back = SCHEMES["g32iz"].dequantize(SCHEMES["g32iz"].quantize(weight)[0])
    assert torch.allclose(back[:, 5], weight[:, 5], rtol=0.06)
    assert error_of(weight, "g32iz") < 0.07


def test_integer_multipliers_add_no_error_on_random_weights() -> None:
    weight = random_weight(256, 512)
    assert error_of(weight, "g32i") <= 1.02 * error_of(weight, "g32")
    assert error_of(weight, "g32i") < 0.9 * error_of(weight, "row")


@pytest.mark.model
def test_integer_multipliers_add_no_error_on_real_weights(smollm2_dir: Path) -> None:
    parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.up_proj")
    names = [f"model.layers.{layer}.{part}.weight" for layer in (0, 14, 29) for part in parts]
    errors: dict[str, list[float]] = {"g32i": [], "g32": [], "row": []}
    nearest = []
    for name in names:
        with safe_open(smollm2_dir / "model.safetensors", "pt") as file:
            weight = file.get_slice(name)[:192].float()
        for scheme, found in errors.items():
            found.append(error_of(weight, scheme))
        groups = weight.view(weight.shape[0], -1, 32)
        scale = groups.abs().amax(-1, keepdim=True) / 7
        nearest.append(float((groups - torch.round(groups / scale) * scale).norm() / weight.norm()))
    mean = {scheme: sum(found) / len(found) for scheme, found in errors.items()}
    assert mean["g32i"] <= 1.02 * mean["g32"]
    assert mean["g32i"] < 0.9 * sum(nearest) / len(nearest)
    assert 0.08 < mean["g32i"] < 0.095
    assert all(a <= 1.06 * b for a, b in zip(errors["g32i"], errors["g32"], strict=True))


def test_packed_weights_dequantize_to_the_same_values() -> None:
    weight = random_weight(40, 200)
    for name in ALL:
        found, error = SCHEMES[name].quantize(weight)
        packed, packed_error = quantize_matrices([weight], SCHEMES[name])
        assert torch.equal(dequantize_matrix(packed[0], 40, 200, name), SCHEMES[name].dequantize(found))
        assert packed_error == pytest.approx(error, rel=1e-5)


def test_smaller_groups_and_zero_points_are_more_accurate() -> None:
    weight = random_weight(128, 512) + 0.02
    errors = {name: error_of(weight, name) for name in ALL}
    assert errors["g32"] < errors["g64"] < errors["g128"] < errors["row"]
    for name in ("g32", "g64", "g128", "row"):
        assert errors[name + "z"] < errors[name]
    for name in ("g32", "g64", "g128"):
        assert errors[name + "m"] < errors[name + "z"]
        assert errors["int8" + name] < errors["int8"]
    for span in (32, 64, 128):
        assert errors[f"g{span}b"] < 1.005 * errors[f"g{span}"]
