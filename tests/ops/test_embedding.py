"""`split_embedding` against its reference."""

from __future__ import annotations

import pytest
import torch

from torch_armllm.ops import embedding, linear, variants

VARIANTS = variants.machine().distinct("linear")


def table(vocabulary: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a random weight, its packed INT8 form, and the rest that rounding to INT8 loses."""
    weight = torch.randn(vocabulary, width).bfloat16()
    weight[vocabulary // 2] = 0
    scale = weight.float().abs().amax(1) / 127
    q = torch.round(weight.float() / scale.clamp(min=1e-30)[:, None]).to(torch.int8)
    packed = linear.pack_int8(q, scale)
    return weight, packed, embedding.split_rest(weight, packed)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocabulary", "width"), [(16, 32), (37, 70), (5, 3)])
def test_embedding_matches_reference_and_weight(
    variant: str, dtype: torch.dtype, vocabulary: int, width: int
) -> None:
    torch.manual_seed(0)
    weight, packed, rest = table(vocabulary, width)
    ids = torch.randint(0, vocabulary, (2, 19))
    with variants.use(variant):
        actual = embedding.split_embedding(ids, packed, rest, dtype)
    assert torch.equal(actual, embedding.reference_split_embedding(ids, packed, rest, dtype))
    bound = weight.float().abs().amax(1, keepdim=True) * 2**-15 + weight.float().abs() * 2**-8
    assert bool(((actual.float() - weight[ids].float()).abs() <= bound[ids]).all())


def test_large_values_are_exact() -> None:
    torch.manual_seed(0)
    weight, packed, rest = table(64, 96)
    actual = embedding.split_embedding(torch.arange(64), packed, rest, torch.bfloat16)
    large = weight.float().abs() > weight.float().abs().amax(1, keepdim=True) / 64
    assert torch.equal(actual[large], weight[large])


def test_empty_ids_return_empty_and_invalid_arguments_raise() -> None:
    _, packed, rest = table(20, 32)
    no_ids = torch.empty(1, 0, dtype=torch.int64)
    assert embedding.split_embedding(no_ids, packed, rest, torch.bfloat16).shape == (1, 0, 32)
    with pytest.raises(RuntimeError, match="id 20 is not in"):
        embedding.split_embedding(torch.tensor([20]), packed, rest, torch.float32)
    with pytest.raises(RuntimeError, match="weight must be uint8"):
        embedding.split_embedding(torch.tensor([0]), packed[:1], rest, torch.float32)
    with pytest.raises(RuntimeError, match="int32"):
        torch.ops.armllm.split_embedding(torch.tensor([0]), packed, rest, "int32")


def test_opcheck() -> None:
    _, packed, rest = table(20, 32)
    torch.library.opcheck(
        torch.ops.armllm.split_embedding.default, (torch.tensor([[1, 19]]), packed, rest, "bfloat16")
    )
