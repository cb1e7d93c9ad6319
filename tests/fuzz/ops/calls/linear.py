"""Random calls of ops that multiply by weights."""

from __future__ import annotations

from random import Random

import torch

from tests.fuzz.ops.arguments import Call, Spec
from tests.fuzz.ops.calls.draws import (
    ACTIVATIONS,
    DTYPES,
    TOKENS,
    WIDTHS,
    Makers,
    any_float,
    leading,
    maybe,
    packed,
)
from torch_armllm.ops.linear.schemes import SCHEMES

_INT4 = [name for name in SCHEMES if name != "i8"]


def _linear(draw: Random, scheme: str) -> Call:
    rows, k, n, dtype = leading(draw), draw.choice(WIDTHS), draw.choice(WIDTHS), any_float(draw)
    return {
        "x": Spec((*rows, k), dtype),
        "weight": packed(scheme, n, k),
        "out_features": n,
        "bias": maybe(draw, Spec((n,), any_float(draw))),
        "residual": maybe(draw, Spec((*rows, n), dtype)),
        "digits": draw.choice((1, 2)),
        "rotated": k % 32 == 0 and draw.choice((False, True)),
    }


def _int4_linear(draw: Random) -> Call:
    scheme = draw.choice(_INT4)
    return _linear(draw, scheme) | {"scheme": scheme}


def _int8_linear(draw: Random) -> Call:
    return _linear(draw, "i8")


def _gated(draw: Random, k: int) -> Call:
    n, scheme, dtype = draw.choice(WIDTHS), draw.choice(list(SCHEMES)), any_float(draw)
    return {
        "weight": packed(scheme, n, k, copies=2),
        "out_features": n,
        "scheme": scheme,
        "activation": draw.choice(ACTIVATIONS),
        "gate_bias": maybe(draw, Spec((n,), dtype)),
        "up_bias": maybe(draw, Spec((n,), dtype)),
    }


def _int4_gated_linear(draw: Random) -> Call:
    k = draw.choice(WIDTHS)
    x = Spec((*leading(draw), k), any_float(draw))
    rotated = k % 32 == 0 and draw.choice((False, True))
    return _gated(draw, k) | {"x": x, "digits": draw.choice((1, 2)), "rotated": rotated}


def _quantized(draw: Random) -> tuple[Call, tuple[int, ...], int, torch.dtype]:
    rows, k, dtype = leading(draw), draw.choice((32, 64, 96, 128, 160)), any_float(draw)
    call: Call = {
        "q": Spec((*rows, k), torch.int8, "bytes"),
        "scales": Spec(rows, torch.float32),
        "dtype": DTYPES[dtype],
    }
    return call, rows, k, dtype


def _int4_linear_q(draw: Random) -> Call:
    call, rows, k, dtype = _quantized(draw)
    n, scheme = draw.choice(WIDTHS), draw.choice(list(SCHEMES))
    return call | {
        "weight": packed(scheme, n, k),
        "out_features": n,
        "scheme": scheme,
        "bias": maybe(draw, Spec((n,), any_float(draw))),
        "residual": maybe(draw, Spec((*rows, n), dtype)),
    }


def _int4_gated_linear_q(draw: Random) -> Call:
    call, _, k, _ = _quantized(draw)
    return call | _gated(draw, k)


def _dense_linear(draw: Random) -> Call:
    k, n = draw.choice((*WIDTHS, 530)), draw.choice(WIDTHS)
    return {
        "x": Spec((*leading(draw), k), any_float(draw)),
        "weight": Spec((n, k), any_float(draw)),
        "bias": maybe(draw, Spec((n,), any_float(draw))),
        "wide": draw.random() < 0.5,
    }


def _lora_linear(draw: Random) -> Call:
    rows, k, n = leading(draw), draw.choice((*WIDTHS, 530)), draw.choice((*WIDTHS, 300))
    dtype = any_float(draw)
    slots, rank = draw.choice((1, 2, 3)), draw.choice((1, 3, 4, 5, 16))
    if draw.random() < 0.3:  # any bytes are integers and scales
        dtype, inputs, block = torch.int8, -(-k // 64) * 68, 68
    else:
        inputs, block = k, 64
    return {
        "base": Spec((*rows, n), any_float(draw)),
        "x": Spec((*rows, k), any_float(draw)),
        "a": Spec((slots, rank, inputs), dtype),
        "b": Spec((slots, -(-n // 64), rank, block), dtype),
        "ranks": Spec((slots,), torch.int32, (0, rank)),
        "adapters": Spec((draw.choice(TOKENS),), torch.int32, (-1, slots - 1)),
    }


def _lora_embedding(draw: Random) -> Call:
    call, tokens = _lora_linear(draw), draw.choice((1, 7))
    rows, (slots, rank) = call.pop("x").shape[:-1], call["a"].shape[:2]
    ids = Spec(rows, torch.int64, (0, tokens - 1))
    return {**call, "ids": ids, "a": Spec((slots, tokens, rank), any_float(draw))}


def _heads(draw: Random) -> tuple[Spec, int, int, int]:
    heads, k, n = draw.choice((1, 2, 3, 5)), draw.choice(WIDTHS), draw.choice(WIDTHS)
    return Spec((draw.choice(TOKENS), heads, k), any_float(draw)), heads, k, n


def _int8_heads_linear(draw: Random) -> Call:
    x, heads, k, n = _heads(draw)
    return {"x": x, "weight": packed("i8", n, k, (heads,)), "out_features": n}


def _dense_heads_linear(draw: Random) -> Call:
    x, heads, k, n = _heads(draw)
    return {"x": x, "weight": Spec((heads, n, k), any_float(draw))}


LINEAR: Makers = {
    "int4_linear": _int4_linear,
    "int8_linear": _int8_linear,
    "int4_gated_linear": _int4_gated_linear,
    "int4_linear_q": _int4_linear_q,
    "int4_gated_linear_q": _int4_gated_linear_q,
    "dense_linear": _dense_linear,
    "lora_linear": _lora_linear,
    "lora_embedding": _lora_embedding,
    "int8_heads_linear": _int8_heads_linear,
    "dense_heads_linear": _dense_heads_linear,
}
