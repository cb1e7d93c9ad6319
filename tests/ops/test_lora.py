"""Low-rank additions against their reference, on every variant, and as an instruction of a plan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_armllm.ops import lora, variants

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
RUNNABLE = variants.machine().distinct("lora")


def factors(slots: int, rank: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    a = torch.randn(slots, rank, inputs) / inputs**0.5
    b = lora.lora_blocks(torch.randn(slots, rank, outputs) / rank**0.5)
    if dtype == torch.int8:
        return lora.lora_integers(a), lora.lora_integers(b)
    return a.to(dtype), b.to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.sampled_from((0, 1, 2, 7, 35)),
    slots=st.sampled_from((1, 3)),
    rank=st.sampled_from((1, 4, 5, 16)),
    inputs=st.sampled_from((1, 15, 16, 70, 530)),
    outputs=st.sampled_from((1, 17, 256, 300)),
    dtype=st.sampled_from(FLOATS),
    factor_dtype=st.sampled_from((*FLOATS, torch.int8)),
)
def test_matches_reference_and_rows_have_the_bits_of_rows_alone(
    tokens: int,
    slots: int,
    rank: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    factor_dtype: torch.dtype,
) -> None:
    torch.manual_seed(tokens + inputs)
    base, x = torch.randn(tokens, outputs).to(dtype), torch.randn(tokens, inputs).to(dtype)
    a, b = factors(slots, rank, inputs, outputs, factor_dtype)
    ranks = torch.randint(0, rank + 1, (slots,), dtype=torch.int32)
    adapters = torch.randint(-1, slots, (tokens,), dtype=torch.int32)
    expected = lora.reference_lora_linear(base, x, a, b, ranks, adapters)
    results = []
    for name in RUNNABLE:
        with variants.use(name):
            results.append(lora.lora_linear(base, x, a, b, ranks, adapters))
            alone = [lora.lora_linear(base[t], x[t], a, b, ranks, adapters[t : t + 1]) for t in range(tokens)]
        torch.testing.assert_close(results[-1], expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert torch.equal(results[-1], torch.stack(alone) if alone else base)
        assert torch.equal(results[-1], results[0])
        untouched = adapters < 0
        assert torch.equal(results[-1][untouched], base[untouched])


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


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.sampled_from((0, 1, 2, 7, 35)),
    slots=st.sampled_from((1, 3)),
    rank=st.sampled_from((1, 4, 16, 19)),
    vocabulary=st.sampled_from((1, 5, 97)),
    outputs=st.sampled_from((1, 17, 256, 300)),
    dtype=st.sampled_from(FLOATS),
    table_dtype=st.sampled_from(FLOATS),
    factor_dtype=st.sampled_from((*FLOATS, torch.int8)),
)
def test_embeddings_match_reference_and_rows_have_the_bits_of_rows_alone(
    tokens: int,
    slots: int,
    rank: int,
    vocabulary: int,
    outputs: int,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    factor_dtype: torch.dtype,
) -> None:
    torch.manual_seed(tokens + outputs)
    base, ids = torch.randn(tokens, outputs).to(dtype), torch.randint(0, vocabulary, (tokens,))
    table = torch.randn(slots, vocabulary, rank).to(table_dtype)
    _, b = factors(slots, rank, 1, outputs, factor_dtype)
    ranks = torch.randint(0, rank + 1, (slots,), dtype=torch.int32)
    adapters = torch.randint(-1, slots, (tokens,), dtype=torch.int32)
    expected = lora.reference_lora_embedding(base, ids, table, b, ranks, adapters)
    results = []
    for name in RUNNABLE:
        with variants.use(name):
            results.append(lora.lora_embedding(base, ids, table, b, ranks, adapters))
            alone = [
                lora.lora_embedding(base[t], ids[t], table, b, ranks, adapters[t : t + 1])
                for t in range(tokens)
            ]
        torch.testing.assert_close(results[-1], expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert torch.equal(results[-1], torch.stack(alone) if alone else base)
        assert torch.equal(results[-1], results[0])
        untouched = adapters < 0
        assert torch.equal(results[-1][untouched], base[untouched])


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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ids": torch.zeros(4, dtype=torch.int64)}, "must agree"),
        ({"ids": torch.zeros(5, 1, dtype=torch.int64)}, "one more dimension"),
        ({"ids": torch.zeros(5, dtype=torch.int32)}, "int64"),
        ({"a": torch.randn(2, 7)}, r"\(slots, vocabulary, rank\)"),
        ({"a": torch.zeros(2, 7, 3, dtype=torch.int8)}, "a must be float32"),
        ({"b": torch.randn(2, 1, 4, 64)}, r"\(2, 1, 3, 64\)"),
        ({"ranks": torch.full((2,), 4, dtype=torch.int32)}, "has the rank 4"),
        ({"adapters": torch.full((5,), 2, dtype=torch.int32)}, "row 0 has the adapter 2"),
    ],
    ids=["rows", "dimensions", "int32", "table", "integers", "b", "rank", "slot"],
)
def test_wrong_arguments_of_embeddings(changed: dict[str, Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        lora.lora_embedding(**{**embeddings(), **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.randn(4, 20)}, "must agree"),
        ({"x": torch.tensor(1.0)}, "dimensions"),
        ({"a": torch.randn(2, 3, 21)}, r"\(slots, rank, 20\)"),
        ({"b": torch.randn(2, 1, 4, 64)}, r"\(2, 1, 3, 64\)"),
        ({"b": torch.randn(2, 1, 3, 64).bfloat16()}, "same dtype"),
        ({"a": torch.zeros(2, 3, 20, dtype=torch.int8)}, r"\(slots, rank, 68\)"),
        ({"a": torch.zeros(2, 3, 68, dtype=torch.int8)}, r"\(2, 1, 3, 68\)"),
        (
            {"a": torch.zeros(2, 3, 20, dtype=torch.int64), "b": torch.zeros(2, 1, 3, 64, dtype=torch.int64)},
            "a must be",
        ),
        ({"ranks": torch.zeros(3, dtype=torch.int32)}, "each of the 2 slots"),
        ({"ranks": torch.zeros(2)}, "int32 vector"),
        ({"ranks": torch.full((2,), 4, dtype=torch.int32)}, "has the rank 4"),
        ({"ranks": torch.full((2,), -1, dtype=torch.int32)}, "has the rank -1"),
        ({"adapters": torch.full((5,), 2, dtype=torch.int32)}, "row 0 has the adapter 2"),
        ({"adapters": torch.zeros(5, dtype=torch.int64)}, "int32 vector"),
    ],
    ids=[
        "rows",
        "scalar",
        "a",
        "b",
        "dtype",
        "integers",
        "integer-b",
        "long",
        "ranks",
        "float-ranks",
        "rank",
        "below",
        "slot",
        "int64",
    ],
)
def test_wrong_arguments(changed: dict[str, Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        lora.lora_linear(**{**arguments(), **changed})
