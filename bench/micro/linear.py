"""Quantized linear layers, adapters, and mixtures of experts.

Shapes are 2048 x 2048, the layers of SmolLM2-135M, and the experts of Qwen3-30B-A3B: hidden 2048, 128 experts
of 768, top-8.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from bench.micro.call import BF16, Call, in_turn, over
from bench.ops.linear import packed
from bench.ops.moe import CHOICES, EXPERTS, HIDDEN, INNER, TOP_K
from torch_armllm.ops import linear, lora, moe, norm

COLD_BYTES = 96 << 20
"""Bytes of copies of a weight that together exceed the last-level cache."""
SIZES = ((2048, 2048), (2048, 8192), (8192, 2048))
"""Columns and rows."""
TOKENS = (1, 16, 512)
RANK = 16


def _product(x: Tensor, weight: Tensor, rows: int, scheme: str) -> Tensor:
    if scheme == "i8":
        return linear.int8_linear(x, weight, rows)
    return linear.int4_linear(x, weight, rows, scheme)


@over(scheme=("g32i", "g32", "i8"), tokens=(1, 8, 64, 512))
def square(scheme: str, tokens: int) -> Call:
    size, few = 2048, tokens <= 8
    x, first = torch.randn(tokens, size).bfloat16(), packed(size, size, scheme)
    # few tokens take the time of reading the weight, so every call reads another copy
    copies = in_turn([first] + [first.clone() for _ in range(COLD_BYTES // first.numel() if few else 0)])
    return Call(
        lambda: _product(x, next(copies), size, scheme),
        read=first.numel() if few else 0,
        operations=2 * tokens * size * size,
        threads=1,
    )


@over(size=((576, 960), (576, 576), (1536, 576), (576, 49152)), tokens=(1, 512))
def smollm2(size: tuple[int, int], tokens: int) -> Call:
    columns, rows = size
    scheme = "i8" if rows == 49152 else "g32i"
    x, weight = torch.randn(tokens, columns).bfloat16(), packed(rows, columns, scheme)
    return Call(
        lambda: _product(x, weight, rows, scheme),
        read=weight.numel() if tokens == 1 else 0,
        operations=2 * tokens * rows * columns,
        threads=1,
    )


@over(tokens=(1, 512))
def smollm2_gate_and_up(tokens: int) -> Call:
    rows, columns = 1536, 576
    x = torch.randn(tokens, columns).bfloat16()
    weight = linear.interleave_panels(packed(rows, columns, "g32i"), packed(rows, columns, "g32i"))
    return Call(
        lambda: linear.int4_gated_linear(x, weight, rows),
        read=weight.numel() if tokens == 1 else 0,
        operations=4 * tokens * rows * columns,
        threads=1,
    )


@over(size=((2048, 2048), (2048, 16384), (8192, 2048)), rotated=(False, True), tokens=TOKENS)
def rotated_linear(size: tuple[int, int], rotated: bool, tokens: int) -> Call:
    """A linear layer whose inputs are rotated, or not."""
    columns, rows = size
    weight, x = packed(rows, columns, "g32i"), torch.randn(tokens, columns).bfloat16()
    operations = 2 * tokens * rows * columns
    return Call(lambda: linear.int4_linear(x, weight, rows, rotated=rotated), operations=operations)


@over(quantized=(False, True), tokens=TOKENS)
def norm_and_linear(quantized: bool, tokens: int) -> Call:
    """A norm and the linear layer after it, with rows of the model's dtype or of INT8 in between."""
    size = 2048
    x, norm_weight = torch.randn(tokens, size).bfloat16(), torch.rand(size).bfloat16()
    weight = packed(size, size, "g32i")

    def through_bfloat16() -> Tensor:
        return linear.int4_linear(norm.rms_norm(x, norm_weight, 1e-6), weight, size)

    def through_int8() -> Tensor:
        values, scales, _ = linear.rms_norm_int8(x, norm_weight, 1e-6)
        return linear.int4_linear_q(values, scales, weight, size)

    return Call(through_int8 if quantized else through_bfloat16, operations=2 * tokens * size * size)


@over(tokens=TOKENS)
def dense_linear(tokens: int) -> Call:
    x, weight = torch.randn(tokens, 2048).bfloat16(), torch.randn(128, 2048).bfloat16()
    count = weight.numel()
    return Call(lambda: linear.dense_linear(x, weight), read=count * BF16, operations=2 * tokens * count)


@over(size=SIZES, adapters=(1, 8), integers=(False, True))
def lora_linear(size: tuple[int, int], adapters: int, integers: bool) -> Call:
    """Adapters of eight tokens: the same one, or one for each."""
    columns, rows = size
    base, x = torch.randn(8, rows).bfloat16(), torch.randn(8, columns).bfloat16()
    a = torch.randn(adapters, RANK, columns).bfloat16()
    b = lora.lora_blocks(torch.randn(adapters, RANK, rows).bfloat16())
    if integers:
        a, b = lora.lora_integers(a), lora.lora_integers(b)
    ranks, slots = torch.full((adapters,), RANK).int(), torch.arange(8).int() % adapters
    return Call(lambda: lora.lora_linear(base, x, a, b, ranks, slots), read=a.nbytes + b.nbytes)


@over(adapters=(1, 8))
def lora_embedding(adapters: int) -> Call:
    """Adapters of the embeddings of eight tokens."""
    base, ids = torch.randn(8, 2048).bfloat16(), torch.randint(0, 32000, (8,))
    table = torch.randn(adapters, 32000, RANK).bfloat16()
    b = lora.lora_integers(lora.lora_blocks(torch.randn(adapters, RANK, 2048)))
    ranks, slots = torch.full((adapters,), RANK).int(), torch.arange(8).int() % adapters
    return Call(lambda: lora.lora_embedding(base, ids, table, b, ranks, slots), read=b.nbytes)


@cache
def _experts() -> tuple[Tensor, Tensor]:
    """Returns random panels: any nibbles and multipliers are valid, only the scales must be finite."""
    found = []
    for rows, columns in ((2 * INNER, HIDDEN), (HIDDEN, INNER)):
        shape = (EXPERTS, linear.panel_count(rows), linear.panel_layout("g32i", columns).bytes)
        panels = torch.randint(0, 256, shape, dtype=torch.uint8)
        panels[..., :64] = torch.full((*shape[:2], 16), 1 / 40 / columns**0.5).view(torch.uint8)
        found.append(panels)
    return found[0], found[1]


def _spread(tokens: int) -> list[Tensor]:
    """Returns sets of expert ids: every call chooses others, which come from memory and not from a cache."""
    return [torch.rand(tokens, EXPERTS).argsort(-1)[:, :TOP_K] for _ in range(CHOICES)]


def _read(choices: list[Tensor]) -> float:
    used = sum(int(chosen.unique().numel()) for chosen in choices) / len(choices)
    return used * sum(panels[0].numel() for panels in _experts())


@over(routing=("spread", "one"), tokens=(1, 4, 16, 64, 512))
def int4_moe(routing: str, tokens: int) -> Call:
    gate_up, down = _experts()
    x, weights = torch.randn(tokens, HIDDEN).bfloat16(), torch.full((tokens, TOP_K), 1 / TOP_K)
    choices = _spread(tokens)
    if routing == "one":
        choices = [torch.arange(TOP_K).expand(tokens, TOP_K) + TOP_K * i for i in range(CHOICES)]
    ids = in_turn(choices)
    return Call(
        lambda: moe.int4_moe(x, next(ids), weights, gate_up, down, INNER),
        read=_read(choices),
        operations=tokens * TOP_K * 3 * 2 * HIDDEN * INNER,
    )


@over(integers=(True, False), adapters=(0, 1, 4), tokens=(1, 4, 64, 512))
def int4_moe_lora(integers: bool, adapters: int, tokens: int) -> Call:
    gate_up, down = _experts()
    slots, choices = max(adapters, 1), _spread(tokens)
    x, weights = torch.randn(tokens, HIDDEN).bfloat16(), torch.full((tokens, TOP_K), 1 / TOP_K)

    def pair(inputs: int, outputs: int, parts: int) -> list[Tensor]:
        a = torch.randn(1, 1, RANK, inputs) * 0.01
        b = lora.lora_blocks(torch.randn(1, 1, parts, RANK, outputs) * 0.01)
        factors = [lora.lora_integers(f) if integers else f.bfloat16() for f in (a, b)]
        return [f.expand(slots, EXPERTS, *f.shape[2:]).contiguous() for f in factors]

    ranks = torch.full((slots,), RANK).int()
    rows = torch.arange(tokens).int() % slots if adapters else torch.full((tokens,), -1).int()
    inner, outer = pair(HIDDEN, INNER, 2), pair(INNER, HIDDEN, 1)
    factors, ids = moe.ExpertAdapters(*inner, ranks, *outer, ranks, rows), in_turn(choices)
    return Call(
        lambda: moe.int4_moe_lora(x, next(ids), weights, gate_up, down, INNER, factors), read=_read(choices)
    )
