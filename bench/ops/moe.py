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
from bench.records import Record, record
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
    """Measures few tokens beside a plain read, and a prompt beside a dense layer."""
    records: list[Record] = []
    gate_up, down = experts(2 * INNER, HIDDEN), experts(HIDDEN, INNER)
    expert_bytes = gate_up[0].nbytes + down[0].nbytes
    dense = torch.randn(512, 2048, dtype=torch.bfloat16)
    dense_weight = packed(2048, 2048, SCHEME)
    for tokens in (1, 16, 512):
        x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)
        weights = torch.full((tokens, TOP_K), 1 / TOP_K)
        for kind, choices in routings(tokens).items():
            used = sum(int(ids.unique().numel()) for ids in choices) / len(choices)
            for count in sorted({1, torch.get_num_threads()}):
                with threads(count):
                    reader = Reader()
                    other = partial(linear.int4_linear, dense, dense_weight, 2048)
                    sides: dict[str, Callable[[], Any]] = {
                        "ours": partial(call, x, cycle(choices), weights, gate_up, down),
                        "other": other if tokens == 512 else reader,
                    }
                    seconds = in_turn(sides)
                if tokens == 512:
                    rate = 2e-9 * 3 * tokens * TOP_K * HIDDEN * INNER / seconds["ours"]
                    peer_value = 2e-9 * 512 * 2048 * 2048 / seconds["other"]
                    figures: dict[str, Any] = {"gops": rate, "peer": "int4_linear M=512 N=K=2048"}
                else:
                    figures = {"gb_s": used * expert_bytes / seconds["ours"] / 1e9, "peer": "plain read"}
                    peer_value = reader.bytes / seconds["other"] / 1e9
                keys = ("int4_moe", f"{tokens} tokens, {kind}, {count} threads", SCHEME, variant, cpu, 32)
                records.append(record(*keys, **figures, peer_value=peer_value))
    return records
