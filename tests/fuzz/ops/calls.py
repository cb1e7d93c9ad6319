"""Valid random calls of every op, as descriptions of their arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from random import Random

import torch

from tests.fuzz.ops.arguments import FLOATS, Argument, Call, Spec
from torch_armllm.ops.attention import BLOCK_SIZES, kv_cache_shapes
from torch_armllm.ops.linear.packed_layout import (
    PANEL,
    SCHEMES,
    group_span,
    has_bf16_scales,
    has_offsets,
    has_zero_points,
    panel_layout,
)
from torch_armllm.ops.tables import ENUMS

_ACTIVATIONS = [name for name in ENUMS["Activation"] if name != "none"]
_WIDTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96, 128, 130, 160)
_TOKENS = (0, 1, 1, 1, 2, 3, 4, 5, 7, 8, 17, 33)
_INT4 = [name for name in SCHEMES if name != "i8"]
STATES = (torch.float32, torch.bfloat16)
"""Dtypes of the states that sum over all tokens."""
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def _float(draw: Random) -> torch.dtype:
    return draw.choice(FLOATS)


def _rows(draw: Random) -> tuple[int, ...]:
    """Leading sizes: none, one, or two."""
    kind = draw.random()
    if kind < 0.1:
        return ()
    if kind < 0.7:
        return (draw.choice(_TOKENS),)
    return (draw.choice((1, 1, 2, 3)), draw.choice(_TOKENS))


def _maybe(draw: Random, argument: Argument) -> Argument:
    return argument if draw.random() < 0.5 else None


def _packed(
    scheme: str, out_features: int, in_features: int, lead: tuple[int, ...] = (), copies: int = 1
) -> Spec:
    panels = copies * math.ceil(out_features / PANEL)
    return Spec((*lead, panels, panel_layout(scheme, in_features).bytes), torch.uint8, "bytes")


def _linear(draw: Random, scheme: str) -> Call:
    rows, k, n, dtype = _rows(draw), draw.choice(_WIDTHS), draw.choice(_WIDTHS), _float(draw)
    return {
        "x": Spec((*rows, k), dtype),
        "weight": _packed(scheme, n, k),
        "out_features": n,
        "bias": _maybe(draw, Spec((n,), _float(draw))),
        "residual": _maybe(draw, Spec((*rows, n), dtype)),
    }


def _int4_linear(draw: Random) -> Call:
    scheme = draw.choice(_INT4)
    return _linear(draw, scheme) | {"scheme": scheme}


def _int8_linear(draw: Random) -> Call:
    return _linear(draw, "i8")


def _gated(draw: Random, k: int) -> Call:
    n, scheme, dtype = draw.choice(_WIDTHS), draw.choice(list(SCHEMES)), _float(draw)
    return {
        "weight": _packed(scheme, n, k, copies=2),
        "out_features": n,
        "scheme": scheme,
        "activation": draw.choice(_ACTIVATIONS),
        "gate_bias": _maybe(draw, Spec((n,), dtype)),
        "up_bias": _maybe(draw, Spec((n,), dtype)),
    }


def _int4_gated_linear(draw: Random) -> Call:
    k = draw.choice(_WIDTHS)
    return _gated(draw, k) | {"x": Spec((*_rows(draw), k), _float(draw))}


def _quantized(draw: Random) -> tuple[Call, tuple[int, ...], int, torch.dtype]:
    rows, k, dtype = _rows(draw), draw.choice((32, 64, 96, 128, 160)), _float(draw)
    call: Call = {
        "q": Spec((*rows, k), torch.int8, "bytes"),
        "scales": Spec(rows, torch.float32),
        "dtype": _NAMES[dtype],
    }
    return call, rows, k, dtype


def _int4_linear_q(draw: Random) -> Call:
    call, rows, k, dtype = _quantized(draw)
    n, scheme = draw.choice(_WIDTHS), draw.choice(list(SCHEMES))
    return call | {
        "weight": _packed(scheme, n, k),
        "out_features": n,
        "scheme": scheme,
        "bias": _maybe(draw, Spec((n,), _float(draw))),
        "residual": _maybe(draw, Spec((*rows, n), dtype)),
    }


def _int4_gated_linear_q(draw: Random) -> Call:
    call, _, k, _ = _quantized(draw)
    return call | _gated(draw, k)


def _dense_linear(draw: Random) -> Call:
    k, n = draw.choice(_WIDTHS), draw.choice(_WIDTHS)
    return {
        "x": Spec((*_rows(draw), k), _float(draw)),
        "weight": Spec((n, k), _float(draw)),
        "bias": _maybe(draw, Spec((n,), _float(draw))),
        "wide": draw.random() < 0.5,
    }


def _heads(draw: Random) -> tuple[Spec, int, int, int]:
    heads, k, n = draw.choice((1, 2, 3, 5)), draw.choice(_WIDTHS), draw.choice(_WIDTHS)
    return Spec((draw.choice(_TOKENS), heads, k), _float(draw)), heads, k, n


def _int8_heads_linear(draw: Random) -> Call:
    x, heads, k, n = _heads(draw)
    return {"x": x, "weight": _packed("i8", n, k, (heads,)), "out_features": n}


def _dense_heads_linear(draw: Random) -> Call:
    x, heads, k, n = _heads(draw)
    return {"x": x, "weight": Spec((heads, n, k), _float(draw))}


def _pack_int4(draw: Random) -> Call:
    scheme, k = draw.choice(_INT4), draw.choice(_WIDTHS)
    rows = (draw.choice(_WIDTHS),) if draw.random() < 0.6 else (draw.choice((1, 2, 3)), draw.choice(_WIDTHS))
    layout = panel_layout(scheme, k)
    columns = (layout.scale_groups,) if group_span(scheme) else ()
    limits = (0, 15) if has_zero_points(scheme) else (-8, 7)
    return {
        "q": Spec((*rows, k), torch.int8, limits),
        "multipliers": Spec((*rows, layout.groups), torch.uint8, (1, 16)) if scheme == "g32i" else None,
        "scales": Spec((*rows, *columns), torch.bfloat16 if has_bf16_scales(scheme) else torch.float32),
        "scheme": scheme,
        "zeros": Spec((*rows, *columns), torch.uint8, (0, 15)) if has_zero_points(scheme) else None,
        "offsets": Spec((*rows, *columns), torch.float32) if has_offsets(scheme) else None,
    }


def _pack_int8(draw: Random) -> Call:
    rows = (draw.choice(_WIDTHS),) if draw.random() < 0.6 else (draw.choice((1, 2, 3)), draw.choice(_WIDTHS))
    return {
        "q": Spec((*rows, draw.choice(_WIDTHS)), torch.int8, "bytes"),
        "scales": Spec(rows, torch.float32),
    }


def _unpack_weight(draw: Random) -> Call:
    scheme, k, n = draw.choice(list(SCHEMES)), draw.choice(_WIDTHS), draw.choice(_WIDTHS)
    lead = () if draw.random() < 0.6 else (draw.choice((1, 2, 3)),)
    return {"weight": _packed(scheme, n, k, lead), "out_features": n, "in_features": k, "scheme": scheme}


def _int4_moe(draw: Random) -> Call:
    scheme, hidden, inner = draw.choice(list(SCHEMES)), draw.choice(_WIDTHS), draw.choice(_WIDTHS)
    experts, rows, dtype = draw.choice((1, 2, 3, 5, 8)), _rows(draw), _float(draw)
    top_k, gated = draw.choice((1, 1, 2, 3)), draw.random() < 0.7
    identities = draw.choice((0, 0, 1, 4))
    parts = 2 if gated else 1
    flat = (math.prod(rows), top_k) if draw.random() < 0.5 else (*rows, top_k)
    return {
        "x": Spec((*rows, hidden), dtype),
        "expert_ids": Spec(flat, draw.choice((torch.int64, torch.int32)), (0, experts + identities - 1)),
        "expert_weights": Spec(flat, _float(draw)),
        "gate_up": _packed(scheme, inner, hidden, (experts,), parts),
        "down": _packed(scheme, hidden, inner, (experts,)),
        "intermediate": inner,
        "scheme": scheme,
        "activation": draw.choice(_ACTIVATIONS),
        "limit": draw.choice((7.0, 0.5)),
        "gate_up_bias": _maybe(draw, Spec((experts, parts * inner), dtype)),
        "down_bias": _maybe(draw, Spec((experts, hidden), dtype)),
        "gated": gated,
        "weigh_input": draw.random() < 0.3,
        "identity_experts": identities,
    }


def _moe_route(draw: Random) -> Call:
    groups, each = draw.choice((1, 1, 1, 2, 4)), draw.choice((1, 2, 3, 8, 17, 64))
    kept = draw.randint(1, groups)
    return {
        "logits": Spec((*_rows(draw), groups * each), _float(draw)),
        "top_k": draw.randint(1, kept * each),
        "scoring": draw.choice(list(ENUMS["Scoring"])),
        "renormalize": draw.random() < 0.5,
        "scale": draw.choice((1.0, 2.5)),
        "correction_bias": _maybe(draw, Spec((groups * each,), torch.float32)),
        "groups": groups,
        "top_k_groups": kept,
        "epsilon": draw.choice((1e-20, 1e-6)),
    }


def _norm(draw: Random, weight: bool, bias: bool, residual: bool) -> Call:
    width, dtype, of_weight = draw.choice(_WIDTHS), _float(draw), _float(draw)
    shape = (*_rows(draw), width)
    call: Call = {"x": Spec(shape, dtype), "eps": draw.choice((1e-5, 0.0))}
    call["weight"] = Spec((width,), of_weight) if weight else _maybe(draw, Spec((width,), of_weight))
    if bias:
        call["bias"] = _maybe(draw, Spec((width,), of_weight))
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
    return {
        "positions": Spec(_rows(draw), torch.int64, (0, 5000)),
        "inv_freq": Spec((draw.choice((1, 4, 16, 33)),), torch.float32, "unit"),
        "scaling": draw.choice((1.0, 0.5)),
    }


def _rope(draw: Random) -> Call:
    size, dtype, lead = draw.choice((2, 8, 16, 24, 40, 64, 128)), _float(draw), _rows(draw) or (1,)
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


def _split_embedding(draw: Random) -> Call:
    vocabulary, width = draw.choice((1, 5, 16, 17, 40)), draw.choice(_WIDTHS)
    scheme = draw.choice(("i8", "int6"))
    return {
        "ids": Spec(_rows(draw), torch.int64, (0, vocabulary - 1)),
        "weight": _packed(scheme, vocabulary, width),
        "rest": Spec((vocabulary, width), torch.int8, "bytes"),
        "dtype": draw.choice(list(_NAMES.values())),
        "scheme": scheme,
    }


def _gated_act(draw: Random) -> Call:
    shape, dtype = (*_rows(draw), draw.choice((*_WIDTHS, 4100))), _float(draw)
    return {"gate": Spec(shape, dtype), "up": Spec(shape, dtype), "activation": draw.choice(_ACTIVATIONS)}


def _cache(draw: Random, heads: int, size: int, value_size: int) -> tuple[Call, int, int]:
    """Returns the caches of one layer, and their blocks and block size."""
    blocks, block_size = draw.choice((1, 2, 3, 5)), draw.choice((16, 16, 16, 32, 64))
    if draw.random() < 0.02:
        blocks, block_size = 1, draw.choice(BLOCK_SIZES)
    dtype = draw.choice((*FLOATS, torch.int8))
    keys, values, scales = kv_cache_shapes(blocks, heads, size, value_size, block_size, dtype)
    kind = "bytes" if dtype == torch.int8 else "normal"
    call: Call = {"k_cache": Spec(keys, dtype, kind), "v_cache": Spec(values, dtype, kind)}
    if scales is not None:
        call |= {name: Spec(scales, torch.float32) for name in ("k_scales", "v_scales")}
    return call, blocks, block_size


def _slots(draw: Random, tokens: int, room: int) -> Spec:
    """Slots of their own for all tokens, or −1."""
    slots = draw.sample(range(room), min(tokens, room))
    slots += [-1] * (tokens - len(slots))
    return Spec((tokens,), torch.int64, slots)


def _kv_write(draw: Random) -> Call:
    heads, size, value_size = (
        draw.choice((1, 2, 3)),
        draw.choice((1, 8, 20, 32, 64)),
        draw.choice((1, 8, 20, 64)),
    )
    cache, blocks, block_size = _cache(draw, heads, size, value_size)
    tokens = draw.choice(_TOKENS)
    return cache | {
        "k": Spec((tokens, heads, size), _float(draw)),
        "v": Spec((tokens, heads, value_size), _float(draw)),
        "slots": _slots(draw, tokens, blocks * block_size),
    }


def _sequences(draw: Random, blocks: int, block_size: int) -> tuple[Call, int]:
    """Returns block table, starts and lengths of a few sequences, and their tokens."""
    table, starts, lengths = [], [0], []
    columns = draw.randint(1, 4)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        length = draw.randint(1, columns * block_size)
        new = draw.choice((0, 1, 1, 1, min(length, 5), min(length, 40)))
        table += [draw.randrange(blocks) for _ in range(columns)]
        starts.append(starts[-1] + new)
        lengths.append(length)
    count = len(lengths)
    call: Call = {
        "block_table": Spec((count, columns), torch.int32, table),
        "query_start": Spec((count + 1,), torch.int32, starts),
        "seq_lens": Spec((count,), torch.int32, lengths),
        "max_seq_len": max(lengths, default=0) + draw.choice((0, 0, 1, 300)),
    }
    return call, starts[-1]


def _paged_attention(draw: Random) -> Call:
    heads, group = draw.choice((1, 2, 3)), draw.choice((1, 1, 2, 3, 8))
    size, value_size = draw.choice((1, 8, 20, 32, 64, 128)), draw.choice((1, 8, 20, 64, 128))
    cache, blocks, block_size = _cache(draw, heads, size, value_size)
    sequences, tokens = _sequences(draw, blocks, block_size)
    return (
        cache
        | sequences
        | {
            "q": Spec((tokens, heads * group, size), _float(draw)),
            "scale": draw.choice((0.125, 1.0)),
            "window": draw.choice((0, 0, 1, 5, 64)),
            "softcap": draw.choice((0.0, 0.0, 10.0)),
            "sinks": _maybe(draw, Spec(draw.choice(((), (tokens,))) + (heads * group,), torch.float32)),
            "alibi_slopes": _maybe(draw, Spec((heads * group,), torch.float32)),
            **_profiles(draw, tokens, heads * group),
        }
    )


def _profiles(draw: Random, tokens: int, heads: int) -> Call:
    """Returns the factors and profiles of a learned bias of distance, often none."""
    if draw.random() < 0.6:
        return {"relative": None, "profiles": None}
    rank, extent = draw.choice((1, 3, 16)), draw.choice((1, 5, 16, 40, 300))
    return {
        "relative": Spec((tokens, heads, rank), torch.float32),
        "profiles": Spec((rank, extent), torch.float32),
    }


def _mla(draw: Random) -> tuple[Spec, int, int]:
    blocks, block_size = draw.choice((1, 2, 3)), draw.choice((16, 16, 32))
    rank, rope = draw.choice((1, 8, 20, 64)), draw.choice((0, 1, 4, 16, 32))
    return Spec((blocks, block_size, rank + rope), _float(draw)), rank, rope


def _mla_write(draw: Random) -> Call:
    cache, rank, rope = _mla(draw)
    tokens = draw.choice(_TOKENS)
    return {
        "latent": Spec((tokens, rank), _float(draw)),
        "k_rope": Spec((tokens, rope), _float(draw)),
        "cache": cache,
        "slots": _slots(draw, tokens, cache.shape[0] * cache.shape[1]),
    }


def _mla_attention(draw: Random) -> Call:
    cache, rank, rope = _mla(draw)
    sequences, tokens = _sequences(draw, cache.shape[0], cache.shape[1])
    heads, dtype = draw.choice((1, 2, 3, 8)), _float(draw)
    return sequences | {
        "q_latent": Spec((tokens, heads, rank), dtype),
        "q_rope": Spec((tokens, heads, rope), dtype),
        "cache": cache,
        "scale": draw.choice((0.125, 1.0)),
        "sinks": _maybe(draw, Spec((heads,), torch.float32)),
        "selected": _maybe(draw, _selected(draw, sequences, tokens)),
    }


def _selected(draw: Random, sequences: Call, tokens: int) -> Spec:
    """Returns positions that the tokens of a few sequences see, in ascending order."""
    most = draw.choice((1, 2, 5, 16, 40))
    starts, lengths = (sequences[name].values for name in ("query_start", "seq_lens"))  # type: ignore[union-attr]
    positions: list[int] = []
    for begin, end, length in zip(starts, starts[1:], lengths, strict=False):
        for token in range(begin, end):
            seen = length - end + token + 1
            chosen = sorted(draw.sample(range(seen), min(seen, most)))
            positions += chosen + [-1] * (most - len(chosen))
    return Spec((tokens, most), torch.int32, positions)


def _select_tokens(draw: Random) -> Call:
    blocks, block_size, size = draw.choice((1, 2, 3)), draw.choice((16, 16, 32)), draw.choice((1, 8, 20, 64))
    sequences, tokens = _sequences(draw, blocks, block_size)
    heads = draw.choice((1, 2, 3, 5, 8))
    return sequences | {
        "q": Spec((tokens, heads, size), _float(draw)),
        "weights": Spec((tokens, heads), _float(draw)),
        "keys": Spec((blocks, block_size, size), _float(draw)),
        "scale": draw.choice((0.125, 1.0)),
        "top_k": draw.choice((1, 2, 5, 16, 40)),
    }


def _states(draw: Random) -> tuple[Call, int, int]:
    """Returns slots, starts and lengths of a few sequences, their tokens, and the number of slots."""
    starts, lengths = [0], []
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        starts.append(starts[-1] + draw.choice((0, 1, 1, 1, 2, 5, 40)))
        lengths.append(starts[-1] - starts[-2] + draw.choice((0, 0, 1, 7)))
    count = len(lengths)
    slots = count + draw.choice((0, 0, 1, 3))
    order = draw.sample(range(slots), slots)
    call: Call = {
        "save_slots": _maybe(draw, saved_states(draw, starts[-1], order[count:])),
        "state_slots": Spec((count,), torch.int64, order[:count]),
        "query_start": Spec((count + 1,), torch.int32, starts),
        "seq_lens": Spec((count,), torch.int32, lengths),
    }
    return call, starts[-1], slots


def saved_states(draw: Random, tokens: int, free: list[int]) -> Spec:
    """Returns slots for the states after some tokens; often none."""
    if draw.random() < 0.3:
        return Spec((0,), torch.int64, [])
    saves = [-1] * tokens
    for token, slot in zip(draw.sample(range(tokens), min(tokens, len(free))), free, strict=False):
        saves[token] = slot
    return Spec((tokens,), torch.int64, saves)


def _causal_conv(draw: Random) -> Call:
    call, tokens, slots = _states(draw)
    channels, taps, dtype = draw.choice((*_WIDTHS, 520)), draw.choice((1, 2, 3, 4, 4, 8)), _float(draw)
    return call | {
        "x": Spec((tokens, channels), dtype),
        "weight": Spec((taps, channels), torch.float32),
        "bias": _maybe(draw, Spec((channels,), torch.float32)),
        "state": Spec((slots, taps - 1, channels), dtype),
        "silu": draw.random() < 0.5,
    }


def _gated_delta_rule(draw: Random) -> Call:
    call, tokens, slots = _states(draw)
    key_heads, repeats, dtype = draw.choice((1, 2, 3)), draw.choice((1, 2, 4)), _float(draw)
    key_size, value_size = draw.choice((1, 2, 7, 16, 64, 128)), draw.choice((1, 15, 16, 17, 33, 64))
    heads = key_heads * repeats
    gates = (heads,) if draw.random() < 0.5 else (heads, key_size)
    return call | {
        "q": Spec((tokens, key_heads, key_size), dtype),
        "k": Spec((tokens, key_heads, key_size), dtype),
        "v": Spec((tokens, heads, value_size), dtype if draw.random() < 0.7 else _float(draw)),
        "gate": Spec((tokens, *gates), _float(draw)),
        "beta": Spec((tokens, heads), _float(draw), "unit"),
        "state": Spec((slots, heads, key_size, value_size), draw.choice(STATES)),
        "scale": draw.choice((0.125, 1.0)),
        "normalize": draw.random() < 0.7,
        "delta": draw.random() < 0.7,
    }


def _selective_scan(draw: Random) -> Call:
    call, tokens, slots = _states(draw)
    channels, states = draw.choice((1, 15, 16, 17, 40, 130)), draw.choice((1, 2, 7, 16, 33, 256))
    factors = lambda: _maybe(draw, Spec((tokens, states), _float(draw)))  # noqa: E731
    return call | {
        "x": Spec((tokens, channels), _float(draw)),
        "dt": Spec((tokens, channels), _float(draw)),
        "a": Spec((states, channels), torch.float32),
        "b": factors(),
        "c": factors(),
        "state": Spec((slots, states, channels), draw.choice(STATES)),
        "normalize": draw.random() < 0.3,
    }


def _sample_probabilities(draw: Random) -> Call:
    rows, vocabulary = draw.choice((0, 1, 1, 2, 3)), draw.choice((1, 2, 5, 63, 64, 65, 200, 300))
    if draw.random() < 0.03:
        vocabulary = 9000  # more than one chunk
    row = lambda dtype, values: Spec((rows,), dtype, values)  # noqa: E731
    call: Call = {
        "logits": Spec((rows, vocabulary), _float(draw)),
        "temperature": row(torch.float32, draw.choice(("unit", "zeros"))),
        "top_k": row(torch.int64, (0, vocabulary + 3)),
        "top_p": row(torch.float32, "unit"),
        "min_p": row(torch.float32, draw.choice(("unit", "zeros"))),
        "repetition_penalty": _maybe(draw, row(torch.float32, (1, 3))),
        "presence_penalty": _maybe(draw, row(torch.float32, "normal")),
        "frequency_penalty": _maybe(draw, row(torch.float32, "normal")),
    }
    for name in ("prompt", "output"):
        if draw.random() < 0.5:
            offsets = [0]
            for _ in range(rows):
                offsets.append(offsets[-1] + draw.choice((0, 1, 5, 20)))
            call[f"{name}_ids"] = Spec((offsets[-1],), torch.int64, (0, vocabulary - 1))
            call[f"{name}_offsets"] = Spec((rows + 1,), torch.int64, offsets)
    return call


def _sample(draw: Random) -> Call:
    call = _sample_probabilities(draw)
    temperature = call["temperature"]
    assert isinstance(temperature, Spec)
    seeds = {name: Spec(temperature.shape, torch.int64, (0, 1 << 40)) for name in ("seeds", "steps")}
    return call | seeds | {"logprobs": draw.random() < 0.5}


def _best_tokens(draw: Random) -> Call:
    return {"logits": Spec((draw.choice(_TOKENS), draw.choice((*_WIDTHS, 5000))), _float(draw))}


def _top_logprobs(draw: Random) -> Call:
    rows, vocabulary = draw.choice(_TOKENS), draw.choice((*_WIDTHS, 300))
    return {
        "logits": Spec((rows, vocabulary), _float(draw)),
        "ids": Spec((rows,), torch.int64, (0, vocabulary - 1)),
        "count": draw.randint(0, min(vocabulary, 20)),
    }


@cache
def variants() -> tuple[str, ...]:
    """Returns the kernel variants that run on this CPU."""
    return tuple(json.loads(torch.ops.armllm.isa_list())["runnable"])


def _isa_select(draw: Random) -> Call:
    return {"name": draw.choice(variants())}


def _nothing(draw: Random) -> Call:
    return {}


CALLS: dict[str, Callable[[Random], Call]] = {
    "int4_linear": _int4_linear,
    "int8_linear": _int8_linear,
    "int4_gated_linear": _int4_gated_linear,
    "int4_linear_q": _int4_linear_q,
    "int4_gated_linear_q": _int4_gated_linear_q,
    "dense_linear": _dense_linear,
    "int8_heads_linear": _int8_heads_linear,
    "dense_heads_linear": _dense_heads_linear,
    "pack_int4": _pack_int4,
    "pack_int8": _pack_int8,
    "unpack_weight": _unpack_weight,
    "int4_moe": _int4_moe,
    "moe_route": _moe_route,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rms_norm_int8": _rms_norm_int8,
    "layer_norm": _layer_norm,
    "add_layer_norm": _add_layer_norm,
    "rope_table": _rope_table,
    "rope_": _rope,
    "split_embedding": _split_embedding,
    "gated_act": _gated_act,
    "kv_write": _kv_write,
    "paged_attention": _paged_attention,
    "mla_write": _mla_write,
    "mla_attention": _mla_attention,
    "select_tokens": _select_tokens,
    "causal_conv": _causal_conv,
    "gated_delta_rule": _gated_delta_rule,
    "selective_scan": _selective_scan,
    "sample": _sample,
    "sample_probabilities": _sample_probabilities,
    "best_tokens": _best_tokens,
    "top_logprobs": _top_logprobs,
    "isa_select": _isa_select,
    "isa_list": _nothing,
    "team_threads": _nothing,
    "plan_tables": _nothing,
}
"""A function for every op that makes a valid call."""
PLAN_OPS = ("plan_create", "plan_run", "plan_run_then", "plan_profile", "plan_free")
"""Ops of the target ``plans``."""
