"""Random calls of ops on compressed entries."""

from __future__ import annotations

from random import Random

import torch

from tests.fuzz.ops.arguments import Call, Spec
from tests.fuzz.ops.calls.attention import selected_of, sequences_of
from tests.fuzz.ops.calls.draws import Makers, any_float, maybe
from tests.fuzz.ops.calls.recurrent import states_of
from torch_armllm.ops.compress import most_per_block

RATES = (1, 2, 4, 5, 17, 33, 70)


def _compress_windows(draw: Random) -> Call:
    call, tokens, slots = states_of(draw)
    size, parts, rate = draw.choice((1, 6, 16, 33, 64)), draw.choice((1, 2)), draw.choice(RATES)
    block_size, dtype = draw.choice((16, 32, 5)), any_float(draw)
    count, columns = call["seq_lens"].shape[0], 4 + 48 // block_size * 2  # type: ignore[union-attr]
    blocks = count * columns + draw.choice((1, 2))
    width, pairs = parts * size, draw.choice((0, size // 2, size // 4))
    return call | {
        "kv": Spec((tokens, width), dtype),
        "gate": Spec((tokens, width), dtype),
        "bias": Spec((rate, width), torch.float32),
        "weight": Spec((size,), torch.float32),
        "cos": Spec((tokens, pairs), any_float(draw)),
        "sin": Spec((tokens, pairs), any_float(draw)),
        "state": Spec((slots, rate * parts - 1, 2 * width), dtype),
        "entries": Spec((blocks, most_per_block(block_size, rate), size), any_float(draw)),
        # sequences that write share no block
        "block_table": Spec((count, columns), torch.int32, draw.sample(range(blocks), count * columns)),
        "block_size": block_size,
        "eps": 1e-6,
    }


def _select_entries(draw: Random) -> Call:
    blocks, block_size, rate = draw.choice((1, 2, 3)), draw.choice((16, 16, 32)), draw.choice(RATES)
    sequences, tokens = sequences_of(draw, blocks, block_size)
    heads, size = draw.choice((1, 2, 3, 5, 8)), draw.choice((1, 8, 20, 64))
    return sequences | {
        "q": Spec((tokens, heads, size), any_float(draw)),
        "weights": Spec((tokens, heads), any_float(draw)),
        "keys": Spec((blocks, most_per_block(block_size, rate), size), any_float(draw)),
        "block_size": block_size,
        "rate": rate,
        "scale": draw.choice((0.125, 1.0)),
        "top_k": draw.choice((1, 2, 5, 16, 40)),
    }


def _entry_attention(draw: Random) -> Call:
    blocks, block_size, rate = draw.choice((1, 2, 3)), draw.choice((16, 16, 32)), draw.choice(RATES)
    sequences, tokens = sequences_of(draw, blocks, block_size)
    heads, size, dtype = draw.choice((1, 2, 3, 8)), draw.choice((1, 8, 20, 64)), any_float(draw)
    rows = most_per_block(block_size, rate)
    entries = maybe(draw, Spec((blocks, rows, size), dtype))
    return sequences | {
        "q": Spec((tokens, heads, size), any_float(draw)),
        "cache": Spec((blocks, block_size, size), dtype),
        "entries": entries,
        "scale": draw.choice((0.125, 1.0)),
        "window": draw.choice((1, 5, 17, 300)),
        "rate": rate,
        "sinks": maybe(draw, Spec((heads,), torch.float32)),
        "selected": None if entries is None else maybe(draw, selected_of(draw, sequences, tokens, rate)),
    }


ENTRIES: Makers = {
    "compress_windows": _compress_windows,
    "select_entries": _select_entries,
    "entry_attention": _entry_attention,
}
