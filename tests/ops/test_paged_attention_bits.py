"""`paged_attention` returns the same bits in any batch, in chunks and on any number of threads."""

from __future__ import annotations

import pytest
import torch

from tests.support.attention_batch import CACHES, RUNNABLE, make_batch
from torch_armllm.ops import variants


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize(("slopes", "extent"), [(False, 0), (True, 0), (False, 30)])
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_batch_and_chunking_do_not_change_bits(
    variant: str, window: int, slopes: bool, extent: int, cache_dtype: torch.dtype
) -> None:
    seq_lens, query_lens = (290, 40, 540, 5), (60, 40, 1, 2)
    batch = make_batch(
        seq_lens,
        query_lens,
        heads=(6, 2),
        head_sizes=(40, 36),
        cache_dtype=cache_dtype,
        dtype=torch.bfloat16,
        window=window,
        sinks="by token" if extent else True,
        slopes=slopes,
        extent=extent,
    )
    with variants.use(variant):
        together = batch.run().split(query_lens)
        for sequence, count in enumerate(query_lens):
            assert torch.equal(batch.select(sequence).run(), together[sequence])
            for token in {0, count // 2, count - 1}:
                assert torch.equal(batch.select(sequence, token).run()[0], together[sequence][token])


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize(("window", "ahead", "reach"), [(0, 1 << 30, 0), (21, 20, 0), (0, 1 << 30, 12)])
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_texts_that_look_ahead_have_the_same_bits_alone(
    variant: str, window: int, ahead: int, reach: int, cache_dtype: torch.dtype
) -> None:
    lengths = (290, 40, 1, 5) + (33,) * 14
    batch = make_batch(
        *(lengths, lengths), heads=(2, 2), cache_dtype=cache_dtype, window=window, ahead=ahead, reach=reach
    )
    with variants.use(variant):
        together = batch.run().split(lengths)
        for text in range(5):
            assert torch.equal(batch.select(text).run(), together[text])


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
