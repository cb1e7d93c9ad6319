"""The slow reference of every op that has one, and how far a result may be from it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import torch_armllm.ops  # noqa: F401  (imports the modules that have references)
from tests.fuzz.ops.target import tensors_of
from tests.ops.properties import ROWS, SEQUENCES, OpCall
from torch_armllm.ops import linear, norm, rope, variants
from torch_armllm.ops.attention import SCALED, kv_write, value_size_of
from torch_armllm.ops.attention.cache_layout import block_size_of, rotated, rotation_of
from torch_armllm.ops.mla import latents_by_token

_UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Relative to each number: a last bit of a result that is rounded to fewer bits than float32 has."""
_SUMS, _PLAIN_SUMS = 2e-5, 3e-6
"""Relative to the largest number of a result: float32 sums in another order; such without exponentials."""
_NORMS = {"rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"}
_ARE_PLAIN_SUMS = {"dense_linear", "dense_heads_linear", *_NORMS}
_CACHES = {
    torch.bfloat16: {"avx512bf16": 8e-3, "amx": 8e-3, "i8mm": 8e-3},
    torch.float16: {"dotprod": 5e-3, "i8mm": 5e-3},
    torch.int8: {"avx512": 2e-4, "avx512bf16": 2e-4, "amx": 2e-4, "dotprod": 2e-3, "i8mm": 2e-3},
}
_CACHES[torch.uint8] = _CACHES[torch.int8]
"""The same for kernels of attention that compute with less than float32, by the dtype of the cache: they
round queries and weights to bfloat16, sum chains of products in float16, or round weights to 16 bits, on Arm
after a shorter polynomial for exp.  All others sum in float32."""
_STATES = 4e-3
"""The same where a state in fewer bits than float32 is read again: a last bit of it."""
_FEW = 64
"""Results with fewer numbers may all be what is left of larger ones, which the error is of."""
_TABLES = variants.machine().tables
_INT8_QUERIES = ("dotprod", "i8mm")
"""Kernels of attention that multiply INT8 by INT8."""
_BITS = ("kv_write", "mla_write", "int8_heads_linear", "split_embedding")
"""Ops with the bits of their references."""


def _add_rms_norm(x: Tensor, residual: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
    return norm.reference_rms_norm(x + residual, *rest, **more), x + residual


def _add_layer_norm(x: Tensor, residual: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
    return norm.reference_layer_norm(x + residual, *rest, **more), x + residual


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *options: bool, **more: bool) -> None:
    for x in (q, k):
        x.copy_(rope.reference_rope(x, cos, sin, *options, **more))


def _found() -> Iterator[tuple[str, Callable[..., Any]]]:
    names = {*ROWS, *SEQUENCES, "kv_write", "mla_write", "select_entries"} - {"sample"}
    for module in [module for name, module in sys.modules.items() if name.startswith("torch_armllm.ops.")]:
        for name, function in vars(module).items():
            if name.startswith("reference_") and name.removeprefix("reference_") in names:
                yield name.removeprefix("reference_"), function


REFERENCES: dict[str, Callable[..., Any]] = {
    "add_rms_norm": _add_rms_norm,
    "add_layer_norm": _add_layer_norm,
    "rope_": _rope,
    **dict(_found()),
}
"""A function for each op that is called like it."""


def _unused(call: OpCall, blocks: int, block_size: int) -> Tensor:
    """Returns the slots of a paged cache that no sequence has."""
    tables, lengths = (call.arguments[name].tolist() for name in ("block_table", "seq_lens"))
    used = {
        table[position // block_size] * block_size + position % block_size
        for table, length in zip(tables, lengths, strict=True)
        for position in range(length)
    }
    return torch.tensor([slot for slot in range(blocks * block_size) if slot not in used], dtype=torch.int64)


def poisoned(call: OpCall) -> OpCall:
    """Returns a call whose caches hold NaN where no sequence has a position: no product may read it."""
    own = call.copied().arguments
    if isinstance(k_cache := own.get("k_cache"), Tensor) and "seq_lens" in own:
        own["k_cache"], own["v_cache"] = k_cache.clone(), own["v_cache"].clone()
        heads, sizes = k_cache.shape[1], (own["q"].shape[-1], value_size_of(own["v_cache"]))
        slots = _unused(call, len(k_cache), block_size_of(k_cache))
        if k_cache.is_floating_point():
            rows = [torch.full((len(slots), heads, size), math.nan) for size in sizes]
            kv_write(*rows, own["k_cache"], own["v_cache"], slots)
    for name in ("cache", "keys"):
        rows_of = own.get(name)
        if call.name != "select_entries" and isinstance(rows_of, Tensor) and rows_of.is_floating_point():
            own[name] = rows_of.clone()
            own[name].flatten(0, 1)[_unused(call, *rows_of.shape[:2])] = math.nan
    return call.replaced(**own)


def comparable(call: OpCall) -> OpCall:
    """Returns a call whose result does not hang on the last bit of a sum, which depends on its order."""
    own = dict(call.arguments)
    if call.name.startswith("select_"):  # scores of small whole numbers are exact
        for name in {"q", "keys", "weights"} & own.keys():
            own[name] = (2 * own[name]).round().clamp(-2, 2)
    elif "seq_lens" in own and "scale" in own:
        own["scale"] = own.get("q", own.get("q_latent")).shape[-1] ** -0.5
    elif call.name == "moe_route" and own["correction_bias"] is not None:
        own["logits"] = torch.randn(own["logits"].shape)
    return poisoned(call.replaced(**own)) if "block_table" in own else call.replaced(**own)


def rounded(call: OpCall, variant: str) -> OpCall:
    """Returns the call that a variant computes: INT8 latents are expanded to bfloat16, and Arm's INT8 dot
    products round queries as keys are rounded."""
    given = call.arguments
    if call.name == "mla_attention" and given["cache"].dtype == torch.int8:
        return call.replaced(cache=latents_by_token(given["cache"], given["q_latent"].shape[-1]).bfloat16())
    k_cache, q = given.get("k_cache"), given.get("q")
    if call.name == "kv_write" or k_cache is None or k_cache.dtype not in SCALED:
        return call
    biased = any(given.get(name) is not None for name in ("alibi_slopes", "relative", "biases"))
    if _TABLES[variant]["attention"] not in _INT8_QUERIES or biased or value_size_of(given["v_cache"]) % 8:
        return call
    padded = torch.nn.functional.pad(q.float(), (0, -q.shape[-1] % 8))
    rotation = rotation_of(padded.shape[-1]) if k_cache.dtype == torch.int8 else 1
    rows = rotated(padded, rotation)
    step = rows.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127.0
    rows = rotated((rows / step).round() * step, rotation)[..., : q.shape[-1]] / rotation
    return call.replaced(q=rows)


def reference(call: OpCall, variant: str = "scalar") -> list[Tensor]:
    """Returns the results of the reference for a variant, and after them what it has written."""
    own = rounded(call, variant).copied()
    if isinstance(dtype := own.arguments.get("dtype"), str):
        own = own.replaced(dtype=getattr(torch, dtype))
    results = list(tensors_of(REFERENCES[call.name](**own.arguments)))
    if call.name in ("paged_attention", "block_attention"):
        results = [result.to(call.arguments["q"].dtype) for result in results]
    return results + [own.arguments[name] for name in own.written]


def _error_of_sums(call: OpCall, variant: str) -> float:
    """Returns how far a variant's float32 values may be from the reference's, relative to the largest."""
    if call.name.startswith("int4_moe") and call.arguments["activation"] != "relu":
        return 1e-2  # a last bit of a sum can move an intermediate value by one INT8 step
    for name in ("k_cache", "cache", "entries"):
        if isinstance(cache := call.arguments.get(name), Tensor) and call.name not in _BITS:
            products = torch.bfloat16 if name == "cache" and cache.dtype == torch.int8 else cache.dtype
            return _CACHES.get(products, {}).get(_TABLES[variant]["attention"], _SUMS)
    if isinstance(state := call.arguments.get("state"), Tensor) and state.dtype != torch.float32:
        return _STATES
    return _PLAIN_SUMS if call.name in _ARE_PLAIN_SUMS else _SUMS


def assert_near(call: OpCall, found: Tensor, expected: Tensor, variant: str) -> None:
    """Asserts that a result is the reference's, up to the rounding of sums and results."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    exact = call.name in _BITS or (
        call.name in ("int4_linear", "int8_linear") and call.arguments.get("scheme", "i8") in linear.EXACT
    )
    if exact or not found.is_floating_point():
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        return
    size = float(expected.float().abs().nan_to_num(0, 1, 1).max()) if expected.numel() else 1.0
    pair = found.float() / max(size, 1e-30), expected.float() / max(size, 1e-30)
    error = _error_of_sums(call, variant) * (1 if found.numel() >= _FEW else 4)
    torch.testing.assert_close(*pair, rtol=_UNIT[found.dtype], atol=error, equal_nan=True)
