"""Random calls of ops that compute each token's row alone: norms, rotations, activations."""

from __future__ import annotations

from random import Random

import torch

from tests.fuzz.ops.arguments import Call, Spec
from tests.fuzz.ops.calls.draws import ACTIVATIONS, WIDTHS, Makers, any_float, leading, maybe


def _norm(draw: Random, weight: bool, bias: bool, residual: bool) -> Call:
    width, dtype, of_weight = draw.choice((*WIDTHS, 576)), any_float(draw), any_float(draw)
    shape = (*leading(draw), width)
    call: Call = {"x": Spec(shape, dtype), "eps": draw.choice((1e-5, 0.0))}
    call["weight"] = Spec((width,), of_weight) if weight else maybe(draw, Spec((width,), of_weight))
    if bias:
        call["bias"] = maybe(draw, Spec((width,), of_weight))
    if residual:
        call["residual"] = Spec(shape, dtype)
    return call


def _rms_norm(draw: Random) -> Call:
    return _norm(draw, weight=True, bias=False, residual=False) | {"weight_offset": draw.choice((0.0, 1.0))}


def _add_rms_norm(draw: Random) -> Call:
    return _norm(draw, weight=True, bias=False, residual=True) | {"weight_offset": draw.choice((0.0, 1.0))}


def _rms_norm_int8(draw: Random) -> Call:
    return _norm(draw, weight=True, bias=False, residual=draw.random() < 0.5)


def _layer_norm(draw: Random) -> Call:
    return _norm(draw, weight=False, bias=True, residual=False)


def _add_layer_norm(draw: Random) -> Call:
    return _norm(draw, weight=False, bias=True, residual=True)


def _rope_table(draw: Random) -> Call:
    half, axes = draw.choice((1, 4, 16, 33)), draw.choice((None, 1, 3))
    numbers = () if axes is None else (axes,)
    return {
        "positions": Spec(leading(draw) + numbers, torch.int64, (0, 5000)),
        "inv_freq": Spec((half,), torch.float32, "unit"),
        "scaling": draw.choice((1.0, 0.5)),
        "axes": None if axes is None else Spec((half,), torch.int64, (0, axes - 1)),
    }


def _rope(draw: Random) -> Call:
    size, dtype, lead = draw.choice((2, 8, 16, 24, 40, 64, 128)), any_float(draw), leading(draw) or (1,)
    half = draw.choice((size // 2, draw.randint(1, size // 2)))
    interleaved = draw.random() < 0.5
    return {
        "q": Spec((*lead, draw.choice((1, 2, 4)), size), dtype),
        "k": Spec((*lead, draw.choice((1, 2)), size), dtype),
        "cos": Spec((*lead, half), torch.float32),
        "sin": Spec((*lead, half), torch.float32),
        "interleaved": interleaved,
        "unzip": interleaved and draw.random() < 0.5,
    }


def _gated_act(draw: Random) -> Call:
    shape, dtype = (*leading(draw), draw.choice((*WIDTHS, 4100))), any_float(draw)
    return {"gate": Spec(shape, dtype), "up": Spec(shape, dtype), "activation": draw.choice(ACTIVATIONS)}


ROWS: Makers = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rms_norm_int8": _rms_norm_int8,
    "layer_norm": _layer_norm,
    "add_layer_norm": _add_layer_norm,
    "rope_table": _rope_table,
    "rope_": _rope,
    "gated_act": _gated_act,
}
