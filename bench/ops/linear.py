"""INT4 and INT8 linear layers compared with PyTorch's, one thread, N = K = 2048."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.ops.limits import Reader
from bench.ops.timing import cold, in_turn, on_huge_pages, threads
from bench.records import Record, record
from torch_armllm.ops import linear

SIZE = 2048
TOKENS = (1, 4, 8, 16, 64, 128, 512)
GEMV = 8  # tokens up to which the weights come from memory
SCHEMES = {
    "g32i": 32,
    "g32iz": 32,
    "g32": 32,
    "g128": 128,
    "g128z": 128,
    "g32m": 32,
    "i8": 0,
    "int6": 32,
    "int5": 32,
    "int3": 32,
    "int8g32": 32,
}
PEERS = ("oneDNN u8s8", "_int_mm", "_weight_int4pack_mm", "linear bf16")


def packed(rows: int, columns: int, scheme: str) -> Tensor:
    """Returns a random packed weight."""
    if scheme == "i8":
        q = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
        return linear.pack_int8(q, torch.rand(rows))
    q = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
    groups, traits = -(-columns // SCHEMES[scheme]), linear.traits_of(scheme)
    if traits.multipliers:
        low, high = traits.values
        q = torch.randint(low, high + 1, (rows, columns), dtype=torch.int8)
        multipliers = torch.randint(1, traits.multipliers[1] + 1, (rows, groups), dtype=torch.uint8)
        if traits.signed_multipliers:
            multipliers = multipliers.char() * torch.tensor([-1, 1]).char()[torch.randint(2, (rows, groups))]
        zeros = torch.randint(6, 10, (rows, groups), dtype=torch.uint8) if traits.zero_points else None
        return linear.pack_int4(q, multipliers, torch.rand(rows), scheme, zeros)
    scales = torch.rand(rows, groups)
    if linear.traits_of(scheme).offsets:
        return linear.pack_int4(q, None, scales, scheme, None, torch.rand(rows, groups))
    if scheme.endswith("z"):
        zeros = torch.randint(0, 16, (rows, groups), dtype=torch.uint8)
        return linear.pack_int4(q + 8, None, scales, scheme, zeros)
    return linear.pack_int4(q, None, scales, scheme)


def weights(first: Tensor, tokens: int) -> Callable[[], Tensor]:
    """Returns a source of weights: for few tokens another copy at each call, as in a model; else the same."""
    return cold(lambda: on_huge_pages(first), first.nbytes) if tokens <= GEMV else lambda: first


def ours(scheme: str, x: Tensor, tokens: int) -> tuple[Callable[[], Tensor], int]:
    """Returns our call, and the bytes of weight that it reads."""
    first = packed(SIZE, SIZE, scheme)
    weight = weights(first, tokens)
    if scheme == "i8":
        return lambda: linear.int8_linear(x, weight(), SIZE), first.nbytes
    return lambda: linear.int4_linear(x, weight(), SIZE, scheme), first.nbytes


def _onednn(x: Tensor, source: Callable[[Tensor], Callable[[], Tensor]]) -> Callable[[], Tensor]:
    quantized = torch.randint(0, 255, x.shape, dtype=torch.uint8)
    q = torch.randint(-127, 128, (SIZE, SIZE), dtype=torch.int8)
    prepacked = torch.ops.onednn.qlinear_prepack(q, list(x.shape))
    weight = source(prepacked)
    scales, zeros = torch.rand(SIZE), torch.zeros(SIZE, dtype=torch.int32)
    call = torch.ops.onednn.qlinear_pointwise
    return lambda: call(
        quantized, 0.1, 128, weight(), scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
    )


def peer(name: str, x: Tensor, tokens: int) -> Callable[[], Tensor] | None:
    """Returns PyTorch's call; None if this build of torch or this CPU lacks it."""

    def source(weight: Tensor) -> Callable[[], Tensor]:
        if weight.is_mkldnn:
            return cold(weight.clone, weight.numel()) if tokens <= GEMV else lambda: weight
        return weights(weight, tokens)

    def build() -> Callable[[], Tensor]:
        if name == "oneDNN u8s8":
            return _onednn(x, source)
        if name == "_int_mm":
            q = torch.randint(-127, 128, x.shape, dtype=torch.int8)
            weight = source(torch.randint(-127, 128, (SIZE, SIZE), dtype=torch.int8))
            return lambda: torch._int_mm(q, weight().t())
        if name == "_weight_int4pack_mm":
            q = torch.randint(0, 16, (SIZE, SIZE), dtype=torch.int32)
            weight = source(torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 2))
            scales = torch.rand(SIZE // 32, SIZE, 2).bfloat16()
            return lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight(), 32, scales)
        weight = source(torch.randn(SIZE, SIZE).bfloat16())
        return lambda: F.linear(x, weight())

    try:
        call = build()
        call()
    except (RuntimeError, AttributeError, NotImplementedError):
        return None
    return call


def run(variant: str, cpu: str) -> list[Record]:
    """Measures all schemes beside the peers and, where weights come from memory, a plain read."""
    records: list[Record] = []
    with threads(1):
        for tokens in TOKENS:
            x = torch.randn(tokens, SIZE, dtype=torch.bfloat16)
            sides: dict[str, Callable[[], Any]] = {}
            sizes: dict[str, int] = {}
            for scheme in SCHEMES:
                sides[scheme], sizes[scheme] = ours(scheme, x, tokens)
            for name in PEERS:
                call = peer(name, x, tokens)
                if call is not None:
                    sides[name] = call
            reader = Reader()
            if tokens <= GEMV:
                sides["read"] = reader
            seconds = in_turn(sides)
            gops = {name: 2e-9 * tokens * SIZE * SIZE / s for name, s in seconds.items() if name != "read"}
            for scheme, group in SCHEMES.items():
                op = "int8_linear" if scheme == "i8" else "int4_linear"
                keys = (op, f"M={tokens} N=K={SIZE}", scheme, variant, cpu, group)
                for name in (name for name in PEERS if name in gops):
                    records.append(record(*keys, gops=gops[scheme], peer=name, peer_value=gops[name]))
                if "read" in seconds:
                    read, plain = sizes[scheme] / seconds[scheme] / 1e9, reader.bytes / seconds["read"] / 1e9
                    records.append(record(*keys, gb_s=read, peer="plain read", peer_value=plain))
    return records
