"""`paged_attention` returns the same bits in any batch, in chunks and on any number of threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.attention_batch import CACHES, RUNNABLE, make_batch
from torch_armllm.ops import variants


@settings(max_examples=20, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 40)), max_size=3),
    copies=st.sampled_from([1, 1, 8]),
    groups=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    bounds=st.tuples(st.integers(0, 19), st.integers(1, 20)),
    window=st.sampled_from([0, 30, 300]),
    bias=st.sampled_from(["sinks", "slopes", "extent", "reach"]),
    cache_dtype=st.sampled_from(CACHES),
    variant=st.sampled_from(RUNNABLE),
)
def test_some_heads_of_groups_have_the_bits_of_all(
    sequences: list[tuple[int, int]],
    copies: int,
    groups: tuple[int, int],
    bounds: tuple[int, int],
    window: int,
    bias: str,
    cache_dtype: torch.dtype,
    variant: str,
) -> None:
    size, kv_heads = groups
    begin = bounds[0] % (size * kv_heads)
    end = begin + 1 + bounds[1] % (size * kv_heads - begin)
    biases: Any = {bias: 9 if bias in ("extent", "reach") else True}
    query_lens = tuple(new for _, new in sequences) * copies
    seq_lens = tuple(old + new for old, new in sequences) * copies
    whole = make_batch(
        seq_lens,
        query_lens,
        heads=(size * kv_heads, kv_heads),
        cache_dtype=cache_dtype,
        window=window,
        **biases,
    )
    part = whole.heads(begin, end)
    with variants.use(variant):
        assert torch.equal(part.run(), whole.run()[:, begin:end])
    torch.testing.assert_close(part.reference(), whole.reference()[:, begin:end], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "skipped"), [(3, -1), (3, 3), (6, 0), (2, 0), (-3, 0), (1 << 40, 5), (0, 1)]
)
def test_groups_that_do_not_fit_the_heads_are_refused(size: int, skipped: int) -> None:
    batch = replace(make_batch((9,), (9,), heads=(6, 2)), group_size=size, skipped_heads=skipped)
    assert torch.equal(replace(batch, group_size=3, skipped_heads=0).run(), batch.heads(0, 6).run())
    with pytest.raises(
        RuntimeError, match=f"6 q heads in groups of {size} without the first {skipped} do not"
    ):
        batch.run()


def test_thread_count_does_not_change_bits() -> None:
    batch = make_batch((900, 300) + (17,) * 20, (1, 100) + (1,) * 20, heads=(4, 2))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = batch.run()
        torch.set_num_threads(3)
        assert torch.equal(batch.run(), single)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_decode_batch_equals_single_sequences_bitwise(
    variant: str, window: int, cache_dtype: torch.dtype
) -> None:
    for seq_lens in ((1, 129, 300, 32, 31, 700, 2), (129,) * 3 + tuple(range(15, 60, 3))):
        batch = make_batch(
            seq_lens,
            (1,) * len(seq_lens),
            heads=(6, 2),
            head_sizes=(64, 64),
            cache_dtype=cache_dtype,
            window=window,
        )
        threads = torch.get_num_threads()
        with variants.use(variant):
            try:
                for count in (1, 2, 5):
                    torch.set_num_threads(count)
                    together = batch.run()
                    torch.set_num_threads(1)
                    for sequence in range(len(seq_lens)):
                        assert torch.equal(batch.select(sequence).run()[0], together[sequence])
            finally:
                torch.set_num_threads(threads)
