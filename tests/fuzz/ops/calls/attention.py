"""Random calls of ops that write and read caches of keys and values."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch

from tests.fuzz.ops.arguments import FLOATS, Argument, Call, Spec
from tests.fuzz.ops.calls.draws import TOKENS, Makers, any_float, maybe
from torch_armllm.ops.attention import BLOCK_SIZES, SCALED, kv_cache_shapes, paged_attention
from torch_armllm.ops.declare import per_head
from torch_armllm.ops.mla import latent_width

_PER_HEAD = per_head(paged_attention)
"""The first, sinks, may have a row for each token."""


def _cache(draw: Random, heads: int, size: int, value_size: int) -> tuple[Call, int, int]:
    """Returns the caches of one layer, and their blocks and block size."""
    blocks, block_size = draw.choice((1, 2, 3, 5)), draw.choice((16, 16, 16, 32, 64))
    if draw.random() < 0.02:
        blocks, block_size = 1, draw.choice(BLOCK_SIZES)
    int4 = (torch.uint8,) if size % 32 == 0 == value_size % 32 else ()
    dtype = draw.choice((*FLOATS, torch.int8, *int4))
    keys, values, scales = kv_cache_shapes(blocks, heads, size, value_size, block_size, dtype)
    kind = "bytes" if dtype in SCALED else "normal"
    call: Call = {"k_cache": Spec(keys, dtype, kind), "v_cache": Spec(values, dtype, kind)}
    if scales is not None:
        call |= {name: Spec(scales, torch.float32) for name in ("k_scales", "v_scales")}
    return call, blocks, block_size


def _slots(draw: Random, tokens: int, room: int) -> Spec:
    """Slots of their own for all tokens, or −1."""
    slots = draw.sample(range(room), min(tokens, room))
    slots += [-1] * (tokens - len(slots))
    return Spec((tokens,), torch.int64, slots)


def _kv_write(draw: Random) -> Call:
    heads, size, value_size = (
        draw.choice((1, 2, 3)),
        draw.choice((1, 8, 20, 32, 64)),
        draw.choice((1, 8, 20, 32, 64)),
    )
    cache, blocks, block_size = _cache(draw, heads, size, value_size)
    tokens = draw.choice(TOKENS)
    return cache | {
        "k": Spec((tokens, heads, size), any_float(draw)),
        "v": Spec((tokens, heads, value_size), any_float(draw)),
        "slots": _slots(draw, tokens, blocks * block_size),
    }


def sequences_of(draw: Random, blocks: int, block_size: int) -> tuple[Call, int]:
    """Returns block table, starts and lengths of a few sequences, and their tokens."""
    table, starts, lengths = [], [0], []
    columns = draw.randint(1, 4) if draw.random() < 0.9 else draw.randint(12, 30)  # several splits
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3)) if draw.random() < 0.97 else 21):
        length = draw.randint(1, columns * block_size)
        new = draw.choice((0, 1, 1, 1, min(length, 5), min(length, 40)))
        table += [draw.randrange(blocks) for _ in range(columns)]
        starts.append(starts[-1] + new)
        lengths.append(length)
    count = len(lengths)
    call: Call = {
        "block_table": Spec((count, columns), torch.int32, table),
        "query_start": Spec((count + 1,), torch.int32, starts),
        "seq_lens": Spec((count,), torch.int32, lengths),
        "max_seq_len": max(lengths, default=0) + draw.choice((0, 0, 1, 300)),
    }
    return call, starts[-1]


def _paged_attention(draw: Random) -> Call:
    heads, group = draw.choice((1, 2, 3)), draw.choice((1, 1, 2, 3, 5, 8, 16))
    size = draw.choice((1, 8, 20, 32, 64, 80, 96, 112, 128, 256))
    value_size = draw.choice((1, 8, 20, 64, 80, 128, 256))
    if draw.random() < 0.04:
        size, value_size = draw.choice(((576, 512), (1032, 16)))  # latents; keys too long to be rotated
    cache, blocks, block_size = _cache(draw, heads, size, value_size)
    sequences, tokens = sequences_of(draw, blocks, block_size)
    call = (
        cache
        | sequences
        | {
            "q": Spec((tokens, heads * group, size), any_float(draw)),
            "scale": draw.choice((0.125, 1.0)),
            "window": draw.choice((0, 0, 1, 5, 64)),
            "softcap": draw.choice((0.0, 0.0, 10.0)),
            "sinks": maybe(draw, Spec(draw.choice(((), (tokens,))) + (heads * group,), torch.float32)),
            **{name: maybe(draw, Spec((heads * group,), torch.float32)) for name in _PER_HEAD[1:]},
            **_profiles(draw, tokens, heads * group),
            "ahead": draw.choice((0, 0, 0, 1, 5, 1 << 30)),
            "biases": maybe(draw, Spec((heads * group, 2 * draw.choice((0, 1, 9, 100)) + 1), torch.float32)),
        }
    )
    if call["alibi_slopes"] is not None or call["relative"] is not None:
        call["ahead"] = 0
    elif draw.random() < 0.3:
        call["later"] = Spec((tokens,), torch.int64, _later(draw, sequences["query_start"]))
    if draw.random() < 0.3:
        first = draw.randrange(group)
        last = draw.randrange(group) if heads > 1 else draw.randint(0, group - 1 - first)
        _share_out(call, heads * group, first, last)
        call |= {"group_size": group, "skipped_heads": first}
    return call


def _later(draw: Random, query_start: Argument) -> list[int]:
    """Returns the later positions that tokens see: those of a picture see its end, others none."""
    assert isinstance(query_start, Spec)
    later: list[int] = []
    for end in query_start.values:
        while len(later) < end:
            span = draw.randint(1, end - len(later)) if draw.random() < 0.5 else 1
            later += reversed(range(span))
    return later


def _share_out(call: Call, heads: int, first: int, last: int) -> None:
    """Leaves query heads out at both ends."""
    for name, axis in {"q": 1, "relative": 1, "biases": 0, **dict.fromkeys(_PER_HEAD, -1)}.items():
        spec = call[name]
        if spec is not None:
            shape = list(spec.shape)
            assert shape[axis] == heads
            shape[axis] -= first + last
            call[name] = replace(spec, shape=tuple(shape))


def _profiles(draw: Random, tokens: int, heads: int) -> Call:
    """Returns the factors and profiles of a learned bias of distance, often none."""
    if draw.random() < 0.6:
        return {"relative": None, "profiles": None}
    rank, extent = draw.choice((1, 3, 16)), draw.choice((1, 5, 16, 40, 300))
    return {
        "relative": Spec((tokens, heads, rank), torch.float32),
        "profiles": Spec((rank, extent), torch.float32),
    }


def _mla(draw: Random) -> tuple[Spec, int, int]:
    blocks, block_size = draw.choice((1, 2, 3)), draw.choice((16, 16, 32))
    rank, rope = draw.choice((1, 8, 20, 64)), draw.choice((0, 1, 4, 16, 32))
    if draw.random() < 0.05:
        rank, rope = 512, 64
    if draw.random() < 0.3:
        return (
            Spec((blocks, block_size, latent_width(rank + rope, torch.int8)), torch.int8, "bytes"),
            rank,
            rope,
        )
    return Spec((blocks, block_size, rank + rope), any_float(draw)), rank, rope


def _mla_write(draw: Random) -> Call:
    cache, rank, rope = _mla(draw)
    tokens = draw.choice(TOKENS)
    return {
        "latent": Spec((tokens, rank), any_float(draw)),
        "k_rope": Spec((tokens, rope), any_float(draw)),
        "cache": cache,
        "slots": _slots(draw, tokens, cache.shape[0] * cache.shape[1]),
    }


def _mla_attention(draw: Random) -> Call:
    cache, rank, rope = _mla(draw)
    sequences, tokens = sequences_of(draw, cache.shape[0], cache.shape[1])
    heads, dtype = draw.choice((1, 2, 3, 8, 20)), any_float(draw)
    return sequences | {
        "q_latent": Spec((tokens, heads, rank), dtype),
        "q_rope": Spec((tokens, heads, rope), dtype),
        "cache": cache,
        "scale": draw.choice((0.125, 1.0)),
        "sinks": maybe(draw, Spec((heads,), torch.float32)),
        "selected": (selected := maybe(draw, selected_of(draw, sequences, tokens))),
        "window": 0 if selected is not None else draw.choice((0, 0, 1, 5, 17, 300)),
    }


def selected_of(draw: Random, sequences: Call, tokens: int, rate: int = 1) -> Spec:
    """Returns entries of so many positions that the tokens of a few sequences see, in ascending order."""
    most = draw.choice((1, 2, 5, 16, 40))
    starts, lengths = (sequences[name].values for name in ("query_start", "seq_lens"))  # type: ignore[union-attr]
    positions: list[int] = []
    for begin, end, length in zip(starts, starts[1:], lengths, strict=False):
        for token in range(begin, end):
            seen = (length - end + token + 1) // rate
            chosen = sorted(draw.sample(range(seen), min(seen, most)))
            positions += chosen + [-1] * (most - len(chosen))
    return Spec((tokens, most), torch.int32, positions)


def _select_tokens(draw: Random) -> Call:
    blocks, block_size, size = draw.choice((1, 2, 3)), draw.choice((16, 16, 32)), draw.choice((1, 8, 20, 64))
    sequences, tokens = sequences_of(draw, blocks, block_size)
    heads = draw.choice((1, 2, 3, 5, 8))
    return sequences | {
        "q": Spec((tokens, heads, size), any_float(draw)),
        "weights": Spec((tokens, heads), any_float(draw)),
        "keys": Spec((blocks, block_size, size), any_float(draw)),
        "scale": draw.choice((0.125, 1.0)),
        "top_k": draw.choice((1, 2, 5, 16, 40, 600)),
    }


def _select_blocks(draw: Random) -> Call:
    blocks, block_size, size = draw.choice((1, 2, 3)), draw.choice((16, 16, 32)), draw.choice((1, 8, 20, 64))
    sequences, tokens = sequences_of(draw, blocks, block_size)
    return sequences | {
        "q": Spec((tokens, draw.choice((1, 2, 3, 5)), size), any_float(draw)),
        "keys": Spec((blocks, block_size, size), any_float(draw)),
        "span": draw.choice((16, 16, 32, 48, 640)),
        "top_k": draw.choice((1, 2, 3, 20)),
        "nearest": draw.choice((0, 1, 2)),
    }


def _block_attention(draw: Random) -> Call:
    heads, group = draw.choice((1, 2, 4)), draw.choice((1, 1, 2, 3, 8))
    size, value_size = draw.choice((1, 8, 20, 32, 64, 128)), draw.choice((1, 8, 20, 64, 128))
    cache, blocks, block_size = _cache(draw, heads, size, value_size)
    sequences, tokens = sequences_of(draw, blocks, block_size)
    span, choosers = block_size * draw.choice((1, 1, 2)), draw.choice((1, heads))
    return (
        cache
        | sequences
        | {
            "q": Spec((tokens, heads * group, size), any_float(draw)),
            "chosen": _chosen(draw, sequences, (tokens, choosers, draw.choice((1, 2, 3))), span),
            "span": span,
            "scale": draw.choice((0.125, 1.0)),
        }
    )


def _chosen(draw: Random, sequences: Call, shape: tuple[int, int, int], span: int) -> Spec:
    """Returns blocks that the tokens of a few sequences see, in ascending order, for each head."""
    starts, lengths = (sequences[name].values for name in ("query_start", "seq_lens"))  # type: ignore[union-attr]
    numbers: list[int] = []
    for begin, end, length in zip(starts, starts[1:], lengths, strict=False):
        for row in range(begin * shape[1], end * shape[1]):
            seen = -(-(length - end + row // shape[1] + 1) // span)
            chosen = sorted(draw.sample(range(seen), min(seen, shape[2])))
            numbers += chosen + [-1] * (shape[2] - len(chosen))
    return Spec(shape, torch.int32, numbers)


ATTENTION: Makers = {
    "kv_write": _kv_write,
    "paged_attention": _paged_attention,
    "mla_write": _mla_write,
    "mla_attention": _mla_attention,
    "select_tokens": _select_tokens,
    "select_blocks": _select_blocks,
    "block_attention": _block_attention,
}
