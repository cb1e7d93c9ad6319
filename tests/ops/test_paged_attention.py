"""`paged_attention` against its reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.attention_batch import RUNNABLE, Batch, make_batch
from torch_armllm.ops import attention, variants
from torch_armllm.ops.attention.cache_layout import rotated, rotation_of

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Kernels that multiply in the cache's dtype round queries and attention weights to that dtype or to 16 bits.
CACHE_TOLERANCE = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 1e-2, torch.int8: 2e-4}
CACHE_TOLERANCE[torch.uint8] = 2e-4
if "dotprod" in variants.machine().runnable:
    CACHE_TOLERANCE[torch.float16] = 5e-3  # Arm kernels accumulate 32 products in float16
    CACHE_TOLERANCE[torch.int8] = CACHE_TOLERANCE[torch.uint8] = 4e-3  # and have a shorter polynomial for exp
MACHINE = variants.machine()
INT8_QUERIES = {name for name in RUNNABLE if MACHINE.tables[name]["attention"] in ("dotprod", "i8mm")}
"""Variants whose attention kernels multiply INT8 caches by queries rounded to INT8."""


def with_int8_queries(batch: Batch) -> Batch:
    """Rounds queries to INT8 with one scale per row, rotated like keys, as Arm's INT8 dot products do."""
    size = batch.q.shape[-1]
    padded = torch.nn.functional.pad(batch.q.float(), (0, -size % 8))
    rotation = rotation_of(padded.shape[-1]) if batch.cache.k.dtype == torch.int8 else 1
    q = rotated(padded, rotation)
    largest = q.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    q = (q * (127.0 / largest)).round() * (largest / 127.0)
    return replace(batch, q=rotated(q, rotation)[..., :size] / rotation)


def check(batch: Batch) -> None:
    """Asserts that every variant matches the reference, bit-identically if all compute in float32."""
    exact = batch.reference()
    may_round_queries = (
        batch.cache.k.dtype in attention.SCALED
        and attention.value_size_of(batch.cache.v) % 8 == 0
        and batch.slopes is None
        and batch.relative is None
        and batch.biases is None
    )
    if may_round_queries and INT8_QUERIES:
        rounded = with_int8_queries(batch).reference().to(exact.dtype)
    results = []
    for name in RUNNABLE:
        with variants.use(name):
            results.append(batch.run())
    for name, result in zip(RUNNABLE, results, strict=True):
        assert result.dtype == batch.q.dtype
        assert result.is_contiguous()
        tolerance = max(TOLERANCE[result.dtype], CACHE_TOLERANCE[batch.cache.k.dtype])
        expected = rounded if may_round_queries and name in INT8_QUERIES else exact
        torch.testing.assert_close(
            result, expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
        if CACHE_TOLERANCE[batch.cache.k.dtype] == 0.0:
            assert torch.equal(result, results[-1]), f"{name} and {RUNNABLE[-1]} differ in bits"


CASES = {
    "one token": make_batch((1,), (1,)),
    "prompt": make_batch((37,), (37,), heads=(3, 1)),
    "long decode": make_batch((600,), (1,), heads=(4, 2), cache_dtype=torch.bfloat16, dtype=torch.bfloat16),
    "mixed": make_batch(
        (300, 40, 0, 7), (1, 40, 0, 3), heads=(9, 3), cache_dtype=torch.bfloat16, dtype=torch.bfloat16
    ),
    "chunk": make_batch((330,), (60,), heads=(6, 2), block_size=64),
    "window": make_batch((300, 280), (290, 1), window=33),
    "window over splits": make_batch((700,), (5,), window=300, cache_dtype=torch.float16),
    "softcap": make_batch((50,), (20,), softcap=2.0),
    "sinks": make_batch((280, 3), (2, 3), heads=(4, 2), sinks=True),
    "slopes": make_batch((280, 3), (20, 3), heads=(4, 2), slopes=True),
    "slopes, everything": make_batch(
        *((700, 290), (5, 1)), window=300, softcap=3.0, cache_dtype=torch.float16, sinks=True, slopes=True
    ),
    "slopes, int8": make_batch((300, 40), (1, 40), heads=(9, 3), cache_dtype=torch.int8, slopes=True),
    "slopes, bf16": make_batch(
        *((600, 40), (3, 40)), heads=(6, 1), cache_dtype=torch.bfloat16, dtype=torch.bfloat16, slopes=True
    ),
    "sinks of each token": make_batch((280, 3), (2, 3), heads=(4, 2), sinks="by token"),
    "profiles": make_batch((280, 3), (20, 3), heads=(4, 2), extent=70),
    "profiles longer than texts": make_batch((80, 3), (80, 3), heads=(4, 2), extent=1000),
    "profiles of one distance": make_batch((300,), (40,), extent=1),
    "profiles, everything": make_batch(
        *((700, 290), (5, 1)),
        window=300,
        softcap=3.0,
        cache_dtype=torch.float16,
        sinks="by token",
        slopes=True,
        extent=311,
    ),
    "profiles, int8": make_batch((300, 40), (1, 40), heads=(9, 3), cache_dtype=torch.int8, extent=33),
    "profiles, bf16": make_batch(
        *((600, 40), (3, 40)), heads=(6, 1), cache_dtype=torch.bfloat16, dtype=torch.bfloat16, extent=300
    ),
    "head size 80": make_batch(
        (70,), (30,), head_sizes=(80, 80), cache_dtype=torch.float16, dtype=torch.float16
    ),
    "odd sizes": make_batch((70,), (30,), head_sizes=(33, 20), cache_dtype=torch.bfloat16),
    "int8": make_batch((300, 40, 0, 7), (1, 40, 0, 3), heads=(9, 3), cache_dtype=torch.int8),
    "int8 decode": make_batch(
        (600, 513), (1, 2), heads=(4, 1), head_sizes=(128, 128), cache_dtype=torch.int8, block_size=32
    ),
    "int8 window": make_batch((700,), (5,), window=300, softcap=3.0, cache_dtype=torch.int8, sinks=True),
    "int4": make_batch((300, 40, 0, 7), (1, 40, 0, 3), heads=(9, 3), cache_dtype=torch.uint8),
    "int4 decode": make_batch(
        (600, 513), (1, 2), heads=(4, 1), head_sizes=(128, 64), cache_dtype=torch.uint8, block_size=32
    ),
    "int4 window": make_batch((700,), (5,), window=300, softcap=3.0, cache_dtype=torch.uint8, sinks=True),
    "int4, profiles": make_batch((300, 40), (1, 40), heads=(9, 3), cache_dtype=torch.uint8, extent=33),
    "int4, large blocks": make_batch(
        (1200, 30), (70, 30), heads=(4, 2), head_sizes=(96, 192), cache_dtype=torch.uint8, block_size=256
    ),
    "bf16 window": make_batch(
        (700,), (50,), window=301, softcap=3.0, cache_dtype=torch.bfloat16, block_size=64
    ),
    "window smaller than a key group": make_batch((9, 301), (1, 1), window=2, cache_dtype=torch.int8),
    "int8, heads of 80": make_batch((70, 300), (30, 1), head_sizes=(80, 80), cache_dtype=torch.int8),
    "int8, not rotated": make_batch((40,), (9,), head_sizes=(1032, 16), cache_dtype=torch.int8),
    "int8, odd sizes": make_batch((70,), (30,), head_sizes=(33, 20), cache_dtype=torch.int8),
    "odd sizes, few rows": make_batch((300,), (2,), head_sizes=(33, 71), cache_dtype=torch.float16),
    "latent sizes": make_batch(
        (40,), (1,), heads=(20, 1), head_sizes=(576, 512), cache_dtype=torch.bfloat16, dtype=torch.bfloat16
    ),
    "one block per split": make_batch((270,), (12,), block_size=256),
    "many query heads per KV head": make_batch((40,), (2,), heads=(16, 1), head_sizes=(64, 64)),
    "ahead": make_batch((37, 1, 300), (37, 1, 300), heads=(3, 3), ahead=1 << 30),
    "ahead, chunk": make_batch((330, 20), (60, 4), heads=(6, 2), block_size=64, ahead=7),
    "ahead, symmetric window": make_batch(
        (700, 5, 40), (700, 5, 40), window=9, ahead=8, cache_dtype=torch.float16
    ),
    "ahead, window over splits": make_batch((700,), (700,), window=300, ahead=299, softcap=3.0, sinks=True),
    "later, chunk": make_batch((330, 20), (60, 20), heads=(6, 2), spans=((5, 40), (60, 61), (63, 80))),
    "later, window over splits": make_batch((700,), (690,), window=300, spans=((3, 400),), softcap=3.0),
    "later, short window": make_batch(
        (300, 1), (300, 1), window=9, spans=((250, 290),), cache_dtype=torch.int8
    ),
    "later, bf16": make_batch(
        *((600, 129), (600, 129)),
        heads=(4, 2),
        head_sizes=(64, 64),
        cache_dtype=torch.bfloat16,
        dtype=torch.bfloat16,
        spans=((100, 356), (610, 700)),
    ),
    "ahead, bf16": make_batch(
        *((300, 129, 7), (300, 129, 7)),
        heads=(2, 2),
        head_sizes=(64, 64),
        cache_dtype=torch.bfloat16,
        dtype=torch.bfloat16,
        ahead=1 << 30,
    ),
    "ahead, int8": make_batch(
        (300, 40), (300, 40), heads=(2, 2), head_sizes=(64, 64), cache_dtype=torch.int8, ahead=1 << 30
    ),
    "biases": make_batch((300, 5), (40, 5), heads=(4, 2), reach=9, softcap=3.0, sinks=True),
    "biases, ahead": make_batch((300, 5, 40), (300, 5, 40), heads=(3, 3), reach=7, ahead=1 << 30),
    "biases, window": make_batch(
        (300,), (300,), window=33, ahead=32, reach=64, head_sizes=(64, 64), cache_dtype=torch.bfloat16
    ),
    "biases, int8": make_batch(
        (300, 40), (300, 40), reach=40, head_sizes=(64, 64), cache_dtype=torch.int8, ahead=1 << 30
    ),
    "biases, int4": make_batch((600, 40), (70, 40), heads=(4, 2), reach=40, cache_dtype=torch.uint8, ahead=9),
    "many sequences": make_batch((20, 300, 1) * 7, (1, 2, 0) * 7, heads=(2, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name: str) -> None:
    check(CASES[name])


def test_int8_cache_error_is_bounded() -> None:
    """The error is relative to the output with unrounded keys and values."""
    errors = {}
    for cache_dtype in (torch.bfloat16, torch.int8):
        exact, rounded = (
            make_batch(
                (300,), (40,), heads=(4, 1), head_sizes=(128, 128), cache_dtype=dtype, dtype=torch.bfloat16
            )
            for dtype in (torch.float32, cache_dtype)
        )
        expected = replace(exact, q=exact.q.float()).run()
        errors[cache_dtype] = float(
            (replace(rounded, q=rounded.q.float()).run() - expected).norm() / expected.norm()
        )
    assert errors[torch.int8] < 0.015, errors
    assert errors[torch.bfloat16] < 0.006, errors


def test_no_row_reads_another_text() -> None:
    lengths = (40, 17, 64)
    batch = make_batch(lengths, lengths, ahead=1 << 30)
    expected = batch.run().split(lengths)
    slots = batch.block_table[1, :2].long()
    batch.cache.k[slots] = float("nan")
    batch.cache.v[slots] = float("inf")
    found = batch.run().split(lengths)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])
    assert not bool(found[1].isfinite().any())


def test_large_scores_match_reference() -> None:
    batch = make_batch((300,), (2,))
    check(replace(batch, q=batch.q * 1e4))


def test_large_sink_zeroes_the_output() -> None:
    batch = make_batch((20,), (1,), sinks=True)
    result = replace(batch, sinks=torch.full((2,), 1e30)).run()
    assert torch.equal(result, torch.zeros_like(result))
