"""`paged_attention`: what of its cache it reads, heads that ranks share out, threads, and rounded caches."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.paged_calls import latent_call, paged_call
from tests.ops.properties import OpCall
from tests.ops.references import reference
from torch_armllm.ops import attention, variants

CACHES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8)
RUNNABLE = variants.machine().distinct("attention")


def result_of(call: OpCall) -> Tensor:
    return call.run()[0]


def shared_out(call: OpCall, begin: int, end: int) -> OpCall:
    """Returns a call of some query heads, and of the KV heads that they read."""
    given = call.arguments
    group = given["q"].shape[1] // given["k_cache"].shape[1]
    read = slice(begin // group, -(-end // group))
    axes = {"q": 1, "sinks": -1, "alibi_slopes": 0, "relative": 1, "biases": 0}
    own: dict[str, Any] = {
        name: given[name].narrow(axis, begin, end - begin) for name, axis in axes.items() if name in given
    }
    for name in ("k_cache", "v_cache", "k_scales", "v_scales"):
        own[name] = None if given[name] is None else given[name][:, read].contiguous()
    return call.replaced(**own, group_size=group, skipped_heads=begin % group)


def biases(kind: str, tokens: int, heads: int) -> dict[str, Tensor]:
    """Returns arguments that each query head has its own of."""
    return {
        "sinks": {"sinks": torch.randn(heads)},
        "slopes": {"alibi_slopes": 2.0 ** -torch.linspace(0.5, 8, heads)},
        "profiles": {"relative": torch.randn(tokens, heads, 5), "profiles": torch.randn(5, 9)},
        "biases": {"biases": torch.randn(heads, 19)},
    }[kind]


@settings(max_examples=20, deadline=None)
@given(
    texts=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 40)), max_size=3),
    copies=st.sampled_from([1, 1, 8]),
    groups=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    bounds=st.tuples(st.integers(0, 19), st.integers(1, 20)),
    bias=st.sampled_from(["sinks", "slopes", "profiles", "biases"]),
    cache_dtype=st.sampled_from(CACHES),
    variant=st.sampled_from(RUNNABLE),
)
def test_some_heads_of_groups_have_the_bits_of_all(
    texts: list[tuple[int, int]],
    copies: int,
    groups: tuple[int, int],
    bounds: tuple[int, int],
    bias: str,
    cache_dtype: torch.dtype,
    variant: str,
) -> None:
    size, kv_heads = groups
    heads = size * kv_heads
    begin = bounds[0] % heads
    end = begin + 1 + bounds[1] % (heads - begin)
    new = tuple(new for _, new in texts) * copies
    lengths = tuple(old + new for old, new in texts) * copies
    more = biases(bias, sum(new), heads)
    whole = paged_call(lengths, new, (heads, kv_heads), cache_dtype=cache_dtype, window=30, **more)
    part = shared_out(whole, begin, end)
    with variants.use(variant):
        assert torch.equal(result_of(part), result_of(whole)[:, begin:end])
    expected = reference(whole)[0][:, begin:end]
    torch.testing.assert_close(reference(part)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "skipped"), [(3, -1), (3, 3), (6, 0), (2, 0), (-3, 0), (1 << 40, 5), (0, 1)]
)
def test_groups_that_do_not_fit_the_heads_are_refused(size: int, skipped: int) -> None:
    call = paged_call((9,), (9,), (6, 2))
    assert torch.equal(result_of(call.replaced(group_size=3)), result_of(shared_out(call, 0, 6)))
    message = f"6 q heads in groups of {size} without the first {skipped} do not"
    with pytest.raises(RuntimeError, match=message):
        call.replaced(group_size=size, skipped_heads=skipped).run()


@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize(
    ("lengths", "new", "kind"),
    [
        ((900, 300) + (17,) * 6, (1, 100) + (1,) * 6, "paged"),
        ((1, 129, 300, 32, 31, 700, 2), (1,) * 7, "paged"),
        ((900, 300) + (17,) * 6, (1, 50) + (1,) * 6, "latent"),
        ((129,), (1,), "latent, many heads"),
    ],
)
def test_threads_and_other_texts_do_not_change_bits(
    lengths: tuple[int, ...], new: tuple[int, ...], kind: str, cache_dtype: torch.dtype
) -> None:
    if kind == "paged":
        call = paged_call(lengths, new, (6, 2), 64, cache_dtype)
    elif cache_dtype == torch.uint8:
        return
    else:
        call = latent_call(lengths, new, 21 if "many" in kind else 4, cache_dtype)
    threads, ends = torch.get_num_threads(), torch.tensor(new).cumsum(0).tolist()
    texts = [
        (number, slice(end - n, end), end) for number, (n, end) in enumerate(zip(new, ends, strict=True))
    ]
    try:
        for variant, count in zip(RUNNABLE, itertools.cycle((2, 5, 3)), strict=False):
            with variants.use(variant):
                torch.set_num_threads(1)
                alone = [result_of(call.sequence(*text)) for text in texts]
                torch.set_num_threads(count)
                assert torch.equal(result_of(call), torch.cat(alone))
    finally:
        torch.set_num_threads(threads)


def test_int8_cache_error_is_bounded() -> None:
    """The error is relative to the output with unrounded keys and values."""
    calls = [
        paged_call((300,), (40,), (4, 1), 128, dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8)
    ]
    expected, *found = (result_of(call) for call in calls)
    bfloat16, int8 = (float((each - expected).norm() / expected.norm()) for each in found)
    assert int8 < 0.015 and bfloat16 < 0.006, (int8, bfloat16)


@pytest.mark.parametrize(
    "call",
    [paged_call((600,), (3,), window=40), latent_call((600,), (3,), window=40)],
    ids=["paged", "latent"],
)
def test_blocks_before_the_window_are_not_read(call: OpCall) -> None:
    table = call.arguments["block_table"].clone()
    table[0, : (600 - 3 - 40) // 16] = -1
    for variant in RUNNABLE:
        with variants.use(variant):
            assert torch.equal(result_of(call.replaced(block_table=table)), result_of(call))


def test_nan_key_affects_later_tokens_only() -> None:
    call = paged_call((300,), (300,))
    expected = result_of(call)
    call.arguments["k_cache"][call.arguments["block_table"][0, 100 // 16], 0, 0, 100 % 16] = math.nan
    found = result_of(call)
    assert found[100:].isnan().all() and torch.equal(found[:100], expected[:100])


def test_no_row_reads_another_text() -> None:
    lengths = (40, 17, 64)
    call = paged_call(lengths, lengths, ahead=1 << 30)
    expected = result_of(call).split(lengths)
    slots = call.arguments["block_table"][1, :2].long()
    call.arguments["k_cache"][slots] = math.nan
    call.arguments["v_cache"][slots] = math.inf
    found = result_of(call).split(lengths)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])
    assert not bool(found[1].isfinite().any())


@pytest.mark.parametrize(
    "call", [paged_call((300,), (2,)), latent_call((300,), (2,))], ids=["paged", "latent"]
)
def test_large_scores_match_reference(call: OpCall) -> None:
    name = "q" if "q" in call.arguments else "q_latent"
    large = call.replaced(**{name: call.arguments[name] * 1e4})
    for variant in RUNNABLE:
        with variants.use(variant):
            torch.testing.assert_close(result_of(large), reference(large)[0], rtol=1e-5, atol=1e-5)


def test_large_sink_zeroes_the_output() -> None:
    assert not result_of(paged_call((20,), (1,), sinks=torch.full((2,), 1e30))).any()


def test_other_block_sizes_and_dtypes_of_caches_are_refused() -> None:
    with pytest.raises(ValueError, match="block size 24"):
        attention.new_kv_cache(1, 1, 8, 8, 24, torch.float32)
    with pytest.raises(ValueError, match="int32"):
        attention.new_kv_cache(1, 1, 8, 8, 16, torch.int32)
