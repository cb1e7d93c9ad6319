"""Random calls of ops that pack weights, and of those that read them without multiplying."""

from __future__ import annotations

from random import Random

import torch

from tests.fuzz.ops.arguments import Call, Spec
from tests.fuzz.ops.calls.draws import DTYPES, WIDTHS, Makers, leading, maybe, packed
from torch_armllm.ops.linear.packed_layout import panel_layout
from torch_armllm.ops.linear.schemes import SCHEMES, traits_of

_INT4 = [name for name in SCHEMES if name != "i8"]


def _zeros(scheme: str, rows: tuple[int, ...], columns: tuple[int, ...], groups: int) -> Spec | None:
    if scheme == "g32iz":
        return Spec((*rows, groups), torch.uint8, (6, 9))
    return Spec((*rows, *columns), torch.uint8, (0, 15)) if traits_of(scheme).zero_points else None


def _pack_int4(draw: Random) -> Call:
    scheme, k = draw.choice(_INT4), draw.choice(WIDTHS)
    rows = (draw.choice(WIDTHS),) if draw.random() < 0.6 else (draw.choice((1, 2, 3)), draw.choice(WIDTHS))
    layout = panel_layout(scheme, k)
    columns = (layout.scale_groups,) if traits_of(scheme).span else ()
    traits = traits_of(scheme)
    factors = traits.multipliers
    if traits.signed_multipliers:
        factors = draw.choice(((1, 16), (-16, -1)))
    kind = torch.int8 if traits.signed_multipliers else torch.uint8
    return {
        "q": Spec((*rows, k), torch.int8, traits.values),
        "multipliers": Spec((*rows, layout.groups), kind, factors) if factors else None,
        "scales": Spec((*rows, *columns), torch.bfloat16 if traits_of(scheme).bf16_scales else torch.float32),
        "scheme": scheme,
        "zeros": _zeros(scheme, rows, columns, layout.groups),
        "offsets": Spec((*rows, *columns), torch.float32) if traits_of(scheme).offsets else None,
    }


def _pack_int8(draw: Random) -> Call:
    rows = (draw.choice(WIDTHS),) if draw.random() < 0.6 else (draw.choice((1, 2, 3)), draw.choice(WIDTHS))
    return {
        "q": Spec((*rows, draw.choice(WIDTHS)), torch.int8, "bytes"),
        "scales": Spec(rows, torch.float32),
    }


def _panel_sections(draw: Random) -> Call:
    return {"scheme": draw.choice(list(SCHEMES)), "in_features": draw.choice(WIDTHS)}


def _unpack_weight(draw: Random) -> Call:
    scheme, k, n = draw.choice(list(SCHEMES)), draw.choice(WIDTHS), draw.choice(WIDTHS)
    lead = () if draw.random() < 0.6 else (draw.choice((1, 2, 3)),)
    return {"weight": packed(scheme, n, k, lead), "out_features": n, "in_features": k, "scheme": scheme}


def _split_embedding(draw: Random) -> Call:
    vocabulary, width = draw.choice((1, 5, 16, 17, 40)), draw.choice(WIDTHS)
    scheme = draw.choice(("i8", "int6"))
    return {
        "ids": Spec(leading(draw), torch.int64, (0, vocabulary - 1)),
        "weight": packed(scheme, vocabulary, width),
        "rest": Spec((vocabulary, width), torch.int8, "bytes"),
        "dtype": draw.choice(list(DTYPES.values())),
        "scheme": scheme,
        "rotated": width % 32 == 0 and draw.choice((False, True)),
    }


def _search_steps(draw: Random) -> Call:
    rows, groups, size = draw.choice((0, 1, 3)), draw.choice((1, 2, 5)), draw.choice(WIDTHS)
    candidates = (draw.choice((0, 1, 4)), rows, groups)
    return {
        "values": Spec((rows, groups, size), torch.float32),
        "steps": Spec(candidates, torch.float32),
        "zeros": Spec(candidates, torch.float32),
        "factors": maybe(draw, Spec((groups, size), torch.float32)),
        "lowest": draw.choice((-8, 0)),
        "highest": draw.choice((7, 15)),
    }


PACKING: Makers = {
    "pack_int4": _pack_int4,
    "pack_int8": _pack_int8,
    "panel_sections": _panel_sections,
    "unpack_weight": _unpack_weight,
    "search_steps": _search_steps,
    "split_embedding": _split_embedding,
}
