"""`compress_windows`, `select_entries` and `entry_attention` against their references, on every variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_armllm.ops import compress, variants

RUNNABLE = variants.machine().distinct("compress", "select", "attention")
BLOCK = 32
SETTINGS: dict[str, dict[str, Any]] = {
    "one part": {"rate": 5, "parts": 1, "size": 24, "pairs": 4},
    "two parts": {"rate": 4, "parts": 2, "size": 20, "pairs": 3},
    "windows longer than blocks": {"rate": 40, "parts": 1, "size": 17, "pairs": 8},
    "two parts of long windows": {"rate": 33, "parts": 2, "size": 48, "pairs": 0},
    "single tokens": {"rate": 1, "parts": 1, "size": 6, "pairs": 3},
}
LENGTHS = (150, 3, 40, 64, 131)
NEW = (150, 3, 7, 1, 60)


class Steps:
    """Sequences in shuffled blocks, and the metadata of a step of their last tokens."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, new: tuple[int, ...] = NEW) -> None:
        random = torch.Generator().manual_seed(3)
        self.lengths, self.new = lengths, new
        width = max(-(-n // BLOCK) for n in lengths)
        self.blocks = width * len(lengths) + 1
        order = torch.randperm(self.blocks, generator=random)[: width * len(lengths)]
        self.table = order.view(len(lengths), width).to(torch.int32)
        self.starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.tokens = sum(new)
        self.most = max(lengths)


class Inputs:
    """Random operands of whole sequences."""

    def __init__(
        self, steps: Steps, rate: int, parts: int, size: int, pairs: int, dtype: torch.dtype
    ) -> None:
        random = torch.Generator().manual_seed(5)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=random)

        width = parts * size
        self.rows = [[(2 * draw(n, width)).to(dtype) for _ in range(2)] for n in steps.lengths]
        self.turns = [
            [x.to(dtype) for x in (draw(n, pairs).cos(), draw(n, pairs).sin())] for n in steps.lengths
        ]
        self.bias, self.weight = draw(rate, width), draw(size)
        self.rate, self.parts, self.size, self.dtype = rate, parts, size, dtype
        rows = compress.most_per_block(BLOCK, rate)
        self.state = torch.full(
            (len(steps.lengths) + 3, rate * parts - 1, 2 * width), float("nan"), dtype=dtype
        )
        self.entries = torch.full((steps.blocks, rows, size), float("nan"), dtype=dtype)

    def run(
        self, function: Any, steps: Steps, begins: list[int], ends: list[int], saves: Tensor | None = None
    ) -> None:
        """Compresses the tokens from `begins` to `ends` of all sequences in one call."""
        spans = [slice(a, b) for a, b in zip(begins, ends, strict=True)]
        kv, gate = (torch.cat([x[i][s] for x, s in zip(self.rows, spans, strict=True)]) for i in range(2))
        cos, sin = (torch.cat([x[i][s] for x, s in zip(self.turns, spans, strict=True)]) for i in range(2))
        starts = torch.tensor([0, *(b - a for a, b in zip(begins, ends, strict=True))]).cumsum(0)
        function(
            *(kv, gate, self.bias, self.weight, cos, sin, self.state, self.entries, steps.table),
            *(torch.arange(len(begins)), starts.to(torch.int32), torch.tensor(ends, dtype=torch.int32)),
            *(BLOCK, 1e-6, saves),
        )


def compress_all(name: str, dtype: torch.dtype, function: Any, cuts: tuple[float, ...] = ()) -> Inputs:
    steps = Steps()
    inputs = Inputs(steps, **SETTINGS[name], dtype=dtype)
    bounds = [[0] * len(LENGTHS), *([int(n * cut) for n in LENGTHS] for cut in cuts), list(LENGTHS)]
    for begins, ends in zip(bounds, bounds[1:], strict=False):
        inputs.run(function, steps, begins, ends)
    return inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SETTINGS)
def test_entries_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    expected = compress_all(name, dtype, compress.reference_compress_windows, (0.3, 0.31, 0.8))
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    first = None
    for variant in RUNNABLE:
        with variants.use(variant):
            whole = compress_all(name, dtype, compress.compress_windows)
            parts = compress_all(name, dtype, compress.compress_windows, (0.1, 0.3, 0.31, 0.8))
        torch.testing.assert_close(whole.entries, expected.entries, equal_nan=True, **close)
        for found in (whole, parts):
            first = first or found
            assert torch.equal(found.entries.nan_to_num(9), first.entries.nan_to_num(9))
            assert torch.equal(found.state.nan_to_num(9), expected.state.nan_to_num(9))


@pytest.mark.parametrize("name", SETTINGS)
def test_saved_states_are_those_of_shorter_calls(name: str) -> None:
    lengths = (70, 41)
    steps = Steps(lengths, lengths)
    whole, short = (Inputs(steps, **SETTINGS[name], dtype=torch.float32) for _ in range(2))
    saves = torch.full((sum(lengths),), -1)
    saves[50 - 1], saves[70 + 9 - 1] = 3, 2
    for inputs in (whole, short):
        inputs.run(compress.compress_windows, steps, [0, 0], [30, 5])
    whole.run(compress.compress_windows, steps, [30, 5], [70, 41], torch.cat([saves[30:70], saves[75:]]))
    short.run(compress.compress_windows, steps, [30, 5], [50, 9])
    kept = SETTINGS[name]["rate"] * SETTINGS[name]["parts"] - 1
    for slot, own, length in ((3, 0, 50), (2, 1, 9)):
        rows = [position % kept for position in range(max(length - kept, 0), length)]
        assert torch.equal(whole.state[slot, rows], short.state[own, rows])


def attention_inputs(dtype: torch.dtype, rate: int, size: int = 40, heads: int = 3) -> tuple[Any, ...]:
    steps, random = Steps(), torch.Generator().manual_seed(7)
    rows = compress.most_per_block(BLOCK, rate)
    q = torch.randn(steps.tokens, heads, size, generator=random).to(dtype)
    cache = torch.randn(steps.blocks, BLOCK, size, generator=random).to(dtype)
    entries = torch.randn(steps.blocks, rows, size, generator=random).to(dtype)
    return q, cache, entries, steps.table, steps.starts, steps.seq_lens, steps.most, 0.3


@pytest.mark.parametrize(
    ("rate", "window", "dtype"),
    [
        (4, 9, torch.float32),
        (5, 300, torch.bfloat16),
        (5, 300, torch.float32),
        (40, 20, torch.float16),
        (1, 1, torch.bfloat16),
        (33, 64, torch.float32),
        (33, 64, torch.float16),
    ],
)
def test_attention_equals_the_reference(rate: int, window: int, dtype: torch.dtype) -> None:
    q, cache, entries, *others = attention_inputs(dtype, rate)
    keys = entries[..., :12].contiguous()
    queries, weights = q[:, :2, :12], q[:, :2, 30].abs()
    options = (*others[:-1], BLOCK, rate, 0.5, 6)
    chosen = compress.reference_select_entries(queries, weights, keys, *options)
    sinks = torch.tensor([0.5, -1.0, 2.0])
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    calls = [
        (q, cache, entries, *others, window, rate, sinks, None),
        (q, cache, entries, *others, window, rate, sinks, chosen),
        (q, cache, None, *others, window),
    ]
    expected = [compress.reference_entry_attention(*call) for call in calls]
    for variant in RUNNABLE:
        with variants.use(variant):
            if dtype == torch.float32:
                assert torch.equal(compress.select_entries(queries, weights, keys, *options), chosen)
            for call, right in zip(calls, expected, strict=True):
                torch.testing.assert_close(compress.entry_attention(*call), right, **close)


def test_no_tokens() -> None:
    steps = Steps((0,), (0,))
    inputs = Inputs(steps, **SETTINGS["two parts"], dtype=torch.float32)
    inputs.run(compress.compress_windows, steps, [0], [0])
    assert inputs.entries.isnan().all()
