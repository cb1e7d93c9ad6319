"""Low-rank additions to the results of linear layers and embeddings (LoRA).

Each row has an adapter of its own, or none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.declare import op

__all__ = [
    "lora_blocks",
    "lora_embedding",
    "lora_integers",
    "lora_linear",
    "reference_lora_embedding",
    "reference_lora_linear",
    "reference_lora_sums",
]

BLOCK = 64
"""Columns of the second factor that are adjacent for all ranks, so that memory is read in long runs."""


def lora_blocks(b: Tensor) -> Tensor:
    """Returns second factors ``(..., R, N)`` as blocks of columns ``(..., ⌈N / 64⌉, R, 64)``, zero-filled."""
    padded = torch.nn.functional.pad(b, (0, -b.shape[-1] % BLOCK))
    blocks: Tensor = padded.unflatten(-1, (-1, BLOCK))
    return blocks.transpose(-2, -3).contiguous()


def lora_integers(factors: Tensor) -> Tensor:
    """Returns rows of factors ``(…, K)`` as integers: int8 ``(…, ⌈K / 64⌉ · 68)``.

    64 numbers are their integers and the four bytes of a float32 scale: the largest number over 127.  Behind
    the last number of a row are zeros.
    """
    padded = torch.nn.functional.pad(factors.float(), (0, -factors.shape[-1] % BLOCK))
    groups = padded.unflatten(-1, (-1, BLOCK))
    scales = (groups.abs().amax(-1, keepdim=True) / 127).clone(memory_format=torch.contiguous_format)
    # a scale that is not normal is less exact than its numbers
    steps = torch.where(scales > 0, groups / scales, 0.0).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([steps, scales.view(torch.int8)], -1).flatten(-2)


def _numbers(factors: Tensor) -> Tensor:
    """Returns factors as float32; behind integers are zeros."""
    if factors.dtype != torch.int8:
        return factors.float()
    groups = factors.unflatten(-1, (-1, BLOCK + 4))
    scales = groups[..., BLOCK:].contiguous().view(torch.float32)
    numbers: Tensor = groups[..., :BLOCK] * scales
    return numbers.flatten(-2)


@op(lambda a: a.base.new_empty(a.base.shape))
def lora_linear(base: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, adapters: Tensor) -> Tensor:
    """Returns ``base + (x · A[s]ᵀ) · B[s]``, where each row's slot s is its number in ``adapters``.

    Sums are float32, in an order that depends on the row and its adapter only: a row has the same bits alone
    and in any batch.  The result is rounded once.

    Args:
        base: ``(..., N)`` in float32, bfloat16 or float16: the result of a linear layer.
        x: ``(..., K)``, the input of the layer, of any of these dtypes.
        a: ``(slots, R, K)``, contiguous; or integers of these rows, as :func:`lora_integers` makes them.
        b: ``(slots, ⌈N / 64⌉, R, 64)``, as :func:`lora_blocks` makes it, of the dtype of ``a``; or integers
            of these rows, if ``a`` holds integers.
        ranks: int32 ``(slots,)``: ranks in use, at most R; 0: the adapter has no part in this layer.
        adapters: int32 ``(L,)``: slot of each row, −1 for none.  Rows from L on have none.

    Returns:
        A contiguous tensor of the shape and dtype of ``base``.

    Raises:
        RuntimeError: shapes or dtypes do not fit, or a row's slot or a rank is out of range.
    """


def reference_lora_linear(
    base: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, adapters: Tensor
) -> Tensor:
    """Reference of :func:`lora_linear` in float32 PyTorch."""
    rows, out = x.reshape(-1, x.shape[-1]).float(), base.float().reshape(-1, base.shape[-1]).clone()
    for row, slot in enumerate(adapters[: len(rows)].tolist()):
        if slot >= 0:
            out[row] += reference_lora_sums(rows[row], a[slot], b[slot], int(ranks[slot]), out.shape[-1])
    return out.view(base.shape).to(base.dtype)


def reference_lora_sums(x: Tensor, a: Tensor, b: Tensor, rank: int, columns: int) -> Tensor:
    """Returns ``(x · Aᵀ) · B`` of a float32 row, in float32 PyTorch.

    Args:
        x: ``(K,)``.
        a: ``(R, K)``, or integers.
        b: blocks ``(⌈N / 64⌉, R, 64)``, or integers.
        rank: ranks in use.
        columns: N.
    """
    second = _numbers(b).transpose(-2, -3).flatten(-2)[..., :columns]
    sums: Tensor = x @ _numbers(a)[:rank, : x.shape[-1]].T
    return sums @ second[:rank]


@op(lambda a: a.base.new_empty(a.base.shape))
def lora_embedding(
    base: Tensor, ids: Tensor, a: Tensor, b: Tensor, ranks: Tensor, adapters: Tensor
) -> Tensor:
    """Returns ``base + A[s][id] · B[s]``, where each row's slot s is its number in ``adapters``.

    Sums are float32, as in :func:`lora_linear`; the result is rounded once.

    Args:
        base: ``(..., N)`` in float32, bfloat16 or float16: the embeddings of ``ids``.
        ids: int64 ``(...)``.
        a: ``(slots, V, R)`` in any of these dtypes, contiguous: a row for each id.
        b: ``(slots, ⌈N / 64⌉, R, 64)``, as in :func:`lora_linear`, in any of these dtypes or as integers.
        ranks: int32 ``(slots,)``: ranks in use, at most R; 0: the adapter has no part in the embedding.
        adapters: int32 ``(L,)``: slot of each row, −1 for none.  Rows from L on have none.

    Returns:
        A contiguous tensor of the shape and dtype of ``base``.

    Raises:
        RuntimeError: shapes or dtypes do not fit; a row's slot, a rank or the id of a row with an adapter is
            out of range.
    """


def reference_lora_embedding(
    base: Tensor, ids: Tensor, a: Tensor, b: Tensor, ranks: Tensor, adapters: Tensor
) -> Tensor:
    """Reference of :func:`lora_embedding` in float32 PyTorch."""
    out, flat = base.float().reshape(-1, base.shape[-1]).clone(), ids.flatten().tolist()
    columns = _numbers(b).transpose(-2, -3).flatten(-2)[..., : base.shape[-1]]
    for row, slot in enumerate(adapters[: len(flat)].tolist()):
        if slot >= 0:
            rank = int(ranks[slot])
            out[row] += a[slot, flat[row], :rank].float() @ columns[slot, :rank]
    return out.view(base.shape).to(base.dtype)
