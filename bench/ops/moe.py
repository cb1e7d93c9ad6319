"""int4_moe on the layer shape of Qwen3-30B-A3B: hidden 2048, 128 experts of 768, top-8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from bench.ops.limits import Reader
from bench.ops.linear import packed
from bench.ops.timing import in_turn, on_huge_pages, threads
from bench.records import Record, record, table
from torch_armllm.ops import linear, moe

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
SCHEME = "g32i"
CHOICES = 16  # sets of expert ids that calls go through, so that no expert stays in a cache


def experts(rows: int, columns: int) -> Tensor:
    """Returns experts that all have the same random weights."""
    return on_huge_pages(packed(rows, columns, SCHEME).expand(EXPERTS, -1, -1))


def routings(tokens: int) -> dict[str, list[Tensor]]:
    """Returns expert ids ``(tokens, top_k)``, several sets of each kind."""

    def spread(among: int) -> list[Tensor]:
        return [torch.rand(tokens, among).argsort(-1)[:, :TOP_K] for _ in range(CHOICES)]

    if tokens == 1:
        return {"8 of 128 experts": spread(EXPERTS)}
    if tokens * TOP_K == EXPERTS:
        return {"one token an expert": [torch.randperm(EXPERTS).view(tokens, TOP_K) for _ in range(CHOICES)]}
    one = [torch.arange(TOP_K).expand(tokens, TOP_K) + TOP_K * i for i in range(CHOICES)]
    return {"spread": spread(EXPERTS), "all on the same 8": one, "96 experts empty": spread(EXPERTS // 4)}


def call(x: Tensor, ids: Iterator[Tensor], weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Calls the op with the next set of expert ids."""
    return moe.int4_moe(x, next(ids), weights, gate_up, down, INNER)


def run(variant: str, cpu: str) -> list[Record]:
    """Measures and prints the tables."""
    records: list[Record] = []
    rows: list[list[Any]] = []
    gate_up, down = experts(2 * INNER, HIDDEN), experts(HIDDEN, INNER)
    expert_bytes = gate_up[0].nbytes + down[0].nbytes
    dense_weight = packed(2048, 2048, SCHEME)
    counts = sorted({1, torch.get_num_threads()})
    for tokens in (1, 16, 512):
        x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)
        weights = torch.full((tokens, TOP_K), 1 / TOP_K)
        for kind, choices in routings(tokens).items():
            used = sum(int(ids.unique().numel()) for ids in choices) / len(choices)
            single = 0.0
            for count in counts:
                with threads(count):
                    sides: dict[str, Callable[[], Any]] = {
                        "ours": partial(call, x, cycle(choices), weights, gate_up, down)
                    }
                    reader = Reader()
                    dense = torch.randn(512, 2048, dtype=torch.bfloat16)
                    if tokens == 512:
                        sides["dense"] = partial(linear.int4_linear, dense, dense_weight, 2048)
                    else:
                        sides["read"] = reader
                    seconds = in_turn(sides)
                ours = seconds["ours"]
                single = single or ours
                shape = f"{tokens} tokens, {kind}, {count} threads"
                if tokens == 512:
                    rate = 2e-9 * 3 * tokens * TOP_K * HIDDEN * INNER / ours
                    peer_rate = 2e-9 * 512 * 2048 * 2048 / seconds["dense"]
                    figures: dict[str, Any] = {"gops": rate, "peer": "int4_linear M=512 N=K=2048"}
                    unit = "GOP/s; dense int4_linear"
                else:
                    rate = used * expert_bytes / ours / 1e9
                    peer_rate = reader.bytes / seconds["read"] / 1e9
                    figures = {"gb_s": rate, "peer": "plain read"}
                    unit = "GB/s; plain read"
                records.append(
                    record("int4_moe", shape, SCHEME, variant, cpu, 32, **figures, peer_value=peer_rate)
                )
                rows.append(
                    [tokens, kind, count, ours * 1e3, rate, peer_rate, unit, rate / peer_rate, single / ours]
                )
    print(f"\nint4_moe, {EXPERTS} experts, top-{TOP_K}, H = {HIDDEN}, I = {INNER}, {SCHEME}\n")
    header = ["tokens", "routing", "threads", "ms", "int4_moe", "versus", "unit", "share", "speed-up"]
    print(table(header, rows))
    return records
