"""Rotary embeddings, the KV cache and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node

from torch_armllm.passes.lib.graph import constant
from torch_armllm.plan.lowering import Lowering, Unlowerable, Writer
from torch_armllm.plan.program import NOTHING, Operand

armllm = torch.ops.armllm


def _rope_table(
    low: Lowering, node: Node, positions: Any, inv_freq: Any, scaling: float = 1.0, offset: int = 0,
    axes: Any = None,
) -> Any:  # fmt: skip
    assert axes is None
    if offset > 0:
        raise Unlowerable("rotates by positions after a token's own")
    cos, sin = (low.new(node, val) for val in node.meta["val"])
    low.emit(
        "rope_table",
        positions=low.rows(positions),
        inv_freq=low.weight(inv_freq, torch.float32),
        axes=NOTHING,
        cos=cos,
        sin=sin,
        half=cos.width,
        numbers=1,
        before=-offset,
        scaling=scaling,
    )
    return cos, sin


def _rope(
    low: Lowering, node: Node, q: Any, k: Any, cos: Any, sin: Any, interleaved: bool = False,
    unzip: bool = False,
) -> None:  # fmt: skip
    queries, table = low.heads(q), low.rows(cos)
    heads, size = queries.inner[-2:]
    keys = low.heads(k) if k.meta["val"].numel() else NOTHING
    k_heads, k_head_stride = (keys.inner[-2], keys.head_stride) if keys is not NOTHING else (0, 0)
    low.emit(
        "rope",
        q=queries,
        k=keys,
        cos=table,
        sin=low.rows(sin),
        q_heads=heads,
        k_heads=k_heads,
        head_size=size,
        rotary=2 * table.width,
        pairs="unzipped" if unzip else "neighbors" if interleaved else "halves",
        q_head_stride=queries.head_stride,
        k_head_stride=k_head_stride,
    )


def cache_fields(low: Lowering, k: Any, v: Any, k_scales: Any, v_scales: Any) -> dict[str, int]:
    """Returns the fields of a cache: numbers of its inputs, -1 for scales that it lacks, and its layer."""
    keys, values = low.locations[k], low.locations[v]
    scales = [-1 if s is None else low.locations[s].input for s in (k_scales, v_scales)]
    return {
        "k_cache": keys.input,
        "v_cache": values.input,
        "layer": keys.layer,
        "k_scales": scales[0],
        "v_scales": scales[1],
    }


def sequence_fields(low: Lowering, table: Any, starts: Any, lengths: Any) -> dict[str, int]:
    """Returns the fields of a step's sequences: numbers of the inputs that hold them."""
    inputs = {"block_table": table, "query_start": starts, "seq_lens": lengths}
    return {name: low.rows(node).index for name, node in inputs.items()}


def _kv_write(
    low: Lowering, node: Node, k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any,
    k_scales: Any = None, v_scales: Any = None,
) -> None:  # fmt: skip
    keys = low.rows(k)
    cache = cache_fields(low, k_cache, v_cache, k_scales, v_scales)
    low.emit("kv_write", k=keys, v=low.rows(v), slots=low.rows(slots), **cache, head_size=keys.inner[-1])


def _rows_or_constant(low: Lowering, node: Any) -> Operand:
    """Returns float32 rows of tokens, a constant row that all tokens share, or nothing."""
    if node is None or constant(low.module, node) is not None:
        return low.weight(node, torch.float32)
    rows = low.rows(node)
    assert rows.dtype == torch.float32
    return rows


def _attention(
    low: Lowering, node: Node, q: Any, k_cache: Any, v_cache: Any, table: Any, starts: Any, lengths: Any,
        max_seq_len: Any,
    scale: float, window: int = 0, softcap: float = 0.0, sinks: Any = None,
    k_scales: Any = None, v_scales: Any = None, slopes: Any = None, relative: Any = None,
    profiles: Any = None, ahead: int = 0, biases: Any = None, later: Any = None, group_size: int = 0,
    skipped_heads: int = 0,
) -> Operand:  # fmt: skip
    assert later is None  # an input of pictures, which is added to the program
    queries = low.rows(q)
    bank = low.weight(profiles, torch.float32)
    rank, extent = (0, 0) if profiles is None else profiles.meta["val"].shape
    cache = cache_fields(low, k_cache, v_cache, k_scales, v_scales)
    out = low.new(node)
    q_heads, head_size = queries.inner[-2:]
    low.emit(
        "attention",
        q=queries,
        out=out,
        sinks=_rows_or_constant(low, sinks),
        slopes=low.weight(slopes, torch.float32),
        relative=_rows_or_constant(low, relative),
        profiles=bank,
        rank=rank,
        extent=extent,
        biases=low.weight(biases, torch.float32),
        reach=0 if biases is None else biases.meta["val"].shape[1] // 2,
        later=NOTHING,
        **cache,
        **sequence_fields(low, table, starts, lengths),
        q_heads=q_heads,
        group_size=group_size,
        skipped_heads=skipped_heads,
        head_size=head_size,
        window=window,
        ahead=ahead,
        scale=scale,
        softcap=softcap,
    )
    return out


WRITERS: dict[Any, Writer] = {
    armllm.rope_table.default: _rope_table,
    armllm.rope_.default: _rope,
    armllm.kv_write.default: _kv_write,
    armllm.paged_attention.default: _attention,
}
