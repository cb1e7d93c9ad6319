"""Random calls of ops of mixtures of experts."""

from __future__ import annotations

import math
from random import Random

import torch

from tests.fuzz.ops.arguments import Call, Spec
from tests.fuzz.ops.calls.draws import (
    ACTIVATIONS,
    TOKENS,
    WIDTHS,
    Makers,
    any_float,
    leading,
    maybe,
    packed,
)
from torch_armllm.ops.linear.schemes import SCHEMES
from torch_armllm.ops.tables import ENUMS


def _int4_moe(draw: Random) -> Call:
    scheme, hidden, inner = draw.choice(list(SCHEMES)), draw.choice(WIDTHS), draw.choice(WIDTHS)
    experts, rows, dtype = draw.choice((1, 2, 3, 5, 8)), leading(draw), any_float(draw)
    top_k, gated = draw.choice((1, 1, 2, 3)), draw.random() < 0.7
    identities = draw.choice((0, 0, 1, 4))
    parts = 2 if gated else 1
    flat = (math.prod(rows), top_k) if draw.random() < 0.5 else (*rows, top_k)
    return {
        "x": Spec((*rows, hidden), dtype),
        "expert_ids": Spec(flat, draw.choice((torch.int64, torch.int32)), (0, experts + identities - 1)),
        "expert_weights": Spec(flat, any_float(draw)),
        "gate_up": packed(scheme, inner, hidden, (experts,), parts),
        "down": packed(scheme, hidden, inner, (experts,)),
        "intermediate": inner,
        "scheme": scheme,
        "activation": draw.choice(ACTIVATIONS),
        "limit": draw.choice((7.0, 0.5)),
        "gate_up_bias": maybe(draw, Spec((experts, parts * inner), dtype)),
        "down_bias": maybe(draw, Spec((experts, hidden), dtype)),
        "gated": gated,
        "weigh_input": draw.random() < 0.3,
        "identity_experts": identities,
        "up_limit": draw.choice((7.0, 0.8)),
        "rotated": hidden % 32 == 0 and inner % 32 == 0 and draw.choice((False, True)),
    }


def _int4_moe_lora(draw: Random) -> Call:
    call = _int4_moe(draw)
    del call["weigh_input"]
    (experts, *_), inner, hidden = call["down"].shape, call["intermediate"], call["x"].shape[-1]
    slots, integers, dtype = draw.choice((1, 3)), draw.random() < 0.3, any_float(draw)

    def rows(*shape: int) -> Spec:  # any bytes are integers and scales
        columns = -(-shape[-1] // 64) * 68 if integers else shape[-1]
        return Spec((slots, experts, *shape[:-1], columns), torch.int8 if integers else dtype)

    for name, inputs, outputs, parts in (
        ("inner", hidden, inner, 2 if call["gated"] else 1), ("outer", inner, hidden, 1)
    ):  # fmt: skip
        rank = draw.choice((1, 4, 5, 16))
        call[f"{name}_a"] = rows(rank, inputs)
        call[f"{name}_b"] = rows(parts, -(-outputs // 64), rank, 64)
        call[f"{name}_ranks"] = Spec((slots,), torch.int32, (0, rank))
    call["adapters"] = Spec((draw.choice(TOKENS),), torch.int32, (-1, slots - 1))
    return call


def _moe_route(draw: Random) -> Call:
    groups, each = draw.choice((1, 1, 1, 2, 4)), draw.choice((1, 2, 3, 8, 17, 64))
    kept = draw.randint(1, groups)
    lead, top_k, vocabulary = leading(draw), draw.randint(1, kept * each), draw.choice((1, 5))
    ids = [draw.randrange(-1, vocabulary + 1) for _ in range(math.prod(lead))]
    experts = [draw.randrange(groups * each) for _ in range(vocabulary * top_k)]
    tabled = draw.random() < 0.3
    return {
        "token_ids": Spec(lead, torch.int64, ids) if tabled else None,
        "choices": Spec((vocabulary, top_k), torch.int32, experts) if tabled else None,
        "logits": Spec((*lead, groups * each), any_float(draw)),
        "top_k": top_k,
        "scoring": draw.choice(list(ENUMS["Scoring"])),
        "renormalize": draw.random() < 0.5,
        "scale": draw.choice((1.0, 2.5)),
        "correction_bias": maybe(draw, Spec((groups * each,), torch.float32)),
        "groups": groups,
        "top_k_groups": kept,
        "epsilon": draw.choice((1e-20, 1e-6)),
    }


EXPERTS: Makers = {
    "int4_moe": _int4_moe,
    "int4_moe_lora": _int4_moe_lora,
    "moe_route": _moe_route,
}
