"""`split_embedding` against its reference."""

from __future__ import annotations

import pytest
import torch

from torch_armllm.ops import embedding, variants
from torch_armllm.ops.linear import rotate_groups
from torch_armllm.quant.packing import pack
from torch_armllm.quant.schemes.registry import scheme_named

VARIANTS = variants.machine().distinct("linear")


def table(
    vocabulary: int, width: int, scheme: str = "i8", rotated: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a random weight, its packed form, and the rest that rounding to integers loses."""
    weight = torch.randn(vocabulary, width).bfloat16()
    weight[vocabulary // 2] = 0
    stored = rotate_groups(weight) if rotated else weight
    quantized, _ = scheme_named("int8" if scheme == "i8" else scheme).quantize(stored)
    packed = pack(quantized)
    return weight, packed, embedding.split_rest(stored, packed, scheme)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scheme", ["i8", "int6"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocabulary", "width"), [(16, 32), (37, 70), (5, 3), (20, 64)])
def test_embedding_matches_reference_and_weight(
    variant: str, scheme: str, dtype: torch.dtype, vocabulary: int, width: int
) -> None:
    torch.manual_seed(0)
    rotated = width == 64
    weight, packed, rest = table(vocabulary, width, scheme, rotated)
    ids = torch.randint(0, vocabulary, (2, 19))
    with variants.use(variant):
        actual = embedding.split_embedding(ids, packed, rest, dtype, scheme, rotated)
    expected = embedding.reference_split_embedding(ids, packed, rest, dtype, scheme, rotated)
    assert torch.equal(actual, expected)
    steps = 2**-15 if scheme == "i8" else 2**-13
    bound = weight.float().abs().amax(1, keepdim=True) * steps + weight.float().abs() * 2**-8
    assert bool(((actual.float() - weight[ids].float()).abs() <= bound[ids]).all())


def test_large_values_are_exact() -> None:
    torch.manual_seed(0)
    weight, packed, rest = table(64, 96)
    actual = embedding.split_embedding(torch.arange(64), packed, rest, torch.bfloat16)
    large = weight.float().abs() > weight.float().abs().amax(1, keepdim=True) / 64
    assert torch.equal(actual[large], weight[large])
