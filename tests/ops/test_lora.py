"""Low-rank additions against their reference, on every variant, and as an instruction of a plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_armllm.ops import lora


def factors(slots: int, rank: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    a = torch.randn(slots, rank, inputs) / inputs**0.5
    b = lora.lora_blocks(torch.randn(slots, rank, outputs) / rank**0.5)
    if dtype == torch.int8:
        return lora.lora_integers(a), lora.lora_integers(b)
    return a.to(dtype), b.to(dtype)


def test_integers_are_within_half_a_step() -> None:
    torch.manual_seed(0)
    values = torch.randn(5, 150)
    values[1, :64] = 0.0
    values[2] *= 1e-44  # scales that are not normal
    packed = lora.lora_integers(values)
    assert packed.shape == (5, 3 * 68) and packed.dtype == torch.int8
    groups = packed.unflatten(-1, (3, 68))
    scales = groups[..., 64:].contiguous().view(torch.float32)
    found = (groups[..., :64] * scales).flatten(-2)
    assert not found[:, 150:].any()
    steps = scales.expand(5, 3, 64).flatten(-2)[:, :150]
    others = [0, 1, 3, 4]
    assert bool(((found[:, :150] - values).abs() <= 0.501 * steps)[others].all())
    assert bool((found[2].abs() < 1e-43).all())


@pytest.mark.parametrize("offset", [0, 1])
def test_integers_may_begin_anywhere(offset: int) -> None:
    given = arguments(torch.int8)
    expected = lora.lora_linear(**given)
    for name in "ab":
        memory = torch.empty(given[name].numel() + 1, dtype=torch.int8)
        given[name] = memory[offset:][: given[name].numel()].view(given[name].shape).copy_(given[name])
    assert torch.equal(lora.lora_linear(**given), expected)


def arguments(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    a, b = factors(2, 3, 20, 9, dtype)
    ranks, adapters = torch.tensor([3, 2], dtype=torch.int32), torch.tensor([1, -1, 0], dtype=torch.int32)
    return {"base": torch.randn(5, 9), "x": torch.randn(5, 20), "a": a, "b": b, "ranks": ranks,
            "adapters": adapters}  # fmt: skip


def test_rows_past_the_list_have_no_adapter_and_inputs_stay() -> None:
    given = arguments()
    before = given["base"].clone()
    out = lora.lora_linear(**given)
    assert torch.equal(out[3:], before[3:]) and torch.equal(out[1], before[1])
    assert not torch.equal(out[0], before[0]) and torch.equal(given["base"], before)
    wide = {**given, "base": before.view(1, 5, 9), "x": given["x"].view(1, 5, 20)}
    assert torch.equal(lora.lora_linear(**wide)[0], out)
    turned = {**given, "x": given["x"].t().contiguous().t(), "base": before.t().contiguous().t()}
    assert torch.equal(lora.lora_linear(**turned), out)


def embeddings(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    given = arguments(dtype)
    ids, table = torch.tensor([2, 9, 0, 1, 6]), torch.randn(2, 7, 3)
    return {"base": given["base"], "ids": ids, "a": table, "b": given["b"], "ranks": given["ranks"],
            "adapters": given["adapters"]}  # fmt: skip


def test_ids_of_rows_without_an_adapter_are_not_read() -> None:
    given = embeddings()
    out = lora.lora_embedding(**given)
    assert torch.equal(out[[1, 3, 4]], given["base"][[1, 3, 4]]) and not torch.equal(out[0], given["base"][0])
    wide = {**given, "base": given["base"].view(1, 5, 9), "ids": given["ids"].view(1, 5)}
    assert torch.equal(lora.lora_embedding(**wide)[0], out)
    for wrong in (-1, 7):
        given["ids"][2] = wrong
        with pytest.raises(RuntimeError, match=f"token 2 has id {wrong}, but the vocabulary is 0 to 6"):
            lora.lora_embedding(**given)
