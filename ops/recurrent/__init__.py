"""Recurrent layers over packed tokens of sequences: causal convolution, gated delta rule, selective scan.

Each sequence has a slot of a state, which the ops read and write.  A token is computed by itself, after the
one before it: its result has the same bits however a prompt is cut into chunks, batched or recomputed.
Bfloat16 states of the delta rule and the scan are therefore rounded after every token, not once a call.
"""

from __future__ import annotations

from torch import Tensor

from torch_armllm.ops.declare import op
from torch_armllm.ops.recurrent.reference import (
    reference_causal_conv,
    reference_gated_delta_rule,
    reference_selective_scan,
)

__all__ = [
    "causal_conv",
    "gated_delta_rule",
    "reference_causal_conv",
    "reference_gated_delta_rule",
    "reference_selective_scan",
    "selective_scan",
]


@op(lambda a: a.x.new_empty(a.x.shape))
def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    state_slots: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    silu: bool = False,
    save_slots: Tensor | None = None,
) -> Tensor:
    """Convolves each channel with its last ``taps`` tokens (Gu, Dao, arXiv 2312.00752, section 3.4).

    Sums are float32, in the order of the taps.  The output is rounded once.

    Args:
        x: ``(T, channels)`` in float32, bfloat16 or float16, packed tokens of S sequences, which may be
            strided.
        weight: ``(taps, channels)`` float32, 1 to 8 taps; the last belongs to the token itself.
        bias: ``(channels,)`` float32, or None.
        state: ``(slots, taps - 1, channels)`` in the dtype of ``x``: the inputs before the new tokens, the
            latest last.  It is updated.
        state_slots: ``(S,)`` int64, the slot of each sequence, all different.
        query_start: ``(S + 1,)`` int32, the first token of each sequence, and T.
        seq_lens: ``(S,)`` int32, the length of each sequence including its new tokens.  The slot of a
            sequence without earlier tokens is not read.
        silu: applies ``x · sigmoid(x)`` to the output.
        save_slots: ``(T,)`` int64, the slot to which the state after a token is also written, -1 for none;
            None or empty: none at all.  No slot may be named twice, or belong to a sequence of the step.

    Returns:
        ``(T, channels)`` in the dtype of ``x``.

    Raises:
        RuntimeError: a shape, dtype, slot or length is wrong.
    """


@op(lambda a: a.v.new_empty(a.v.shape))
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    state: Tensor,
    state_slots: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    normalize: bool = False,
    delta: bool = True,
    save_slots: Tensor | None = None,
) -> Tensor:
    """Runs the gated delta rule (Yang, Kautz, Hatamizadeh, arXiv 2412.06464), token by token in float32.

    Each head has a state S ``(key_size, value_size)``.  A token decays it to ``S' = exp(gate) · S``, and
    corrects what it returns for k: ``S = S' + k (beta · (v − S'ᵀ k))ᵀ``.  The output is ``Sᵀ q``.  Without
    ``delta`` values are added as they are, ``S = S' + k (beta · v)ᵀ``, as in Mamba-2 (Dao, Gu, arXiv
    2405.21060).

    Args:
        q: ``(T, key_heads, key_size)`` in float32, bfloat16 or float16, packed tokens of S sequences, which
            may be strided; ``key_size`` is at most 512.
        k: as ``q``.
        v: ``(T, value_heads, value_size)`` in any of the dtypes; ``value_heads`` is a multiple of
            ``key_heads``, and each key head belongs to adjacent value heads.
        gate: ``(T, value_heads)``, or ``(T, value_heads, key_size)`` for a factor of each key channel (Kimi
            Linear, arXiv 2510.26692), in any of the dtypes.
        beta: ``(T, value_heads)`` in any of the dtypes.
        state: ``(slots, value_heads, key_size, value_size)`` float32 or bfloat16, updated.  It is rounded to
            bfloat16 after every token, whose output is computed before.
        state_slots: ``(S,)`` int64, the slot of each sequence, all different.
        query_start: ``(S + 1,)`` int32, the first token of each sequence, and T.
        seq_lens: ``(S,)`` int32, the length of each sequence including its new tokens.  The slot of a
            sequence without earlier tokens is not read.
        scale: factor of ``q``.
        normalize: divides q and k by ``sqrt(Σx² + 1e-6)`` first.
        delta: subtracts what the state returns for k.
        save_slots: ``(T,)`` int64, the slot to which the state after a token is also written, -1 for none;
            None or empty: none at all.  No slot may be named twice, or belong to a sequence of the step.

    Returns:
        ``(T, value_heads, value_size)`` in the dtype of ``v``.

    Raises:
        RuntimeError: a shape, dtype, slot or length is wrong.
    """


@op(lambda a: a.x.new_empty(a.x.shape))
def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    state: Tensor,
    state_slots: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    normalize: bool = False,
    save_slots: Tensor | None = None,
) -> Tensor:
    """Runs the selective scan of Mamba (Gu, Dao, arXiv 2312.00752), token by token in float32.

    Each channel has N states h.  A token changes them to ``h = exp(dt · a) · h + b · x``, and its output is
    ``Σ c · h``.  Mamba passes ``x · dt`` as ``x``.  With one state a channel, neither b nor c, and
    ``normalize``, this is the real-gated linear recurrent unit (De and others, arXiv 2402.19427).

    Args:
        x: ``(T, channels)`` in float32, bfloat16 or float16, packed tokens of S sequences, which may be
            strided.
        dt: ``(T, channels)`` in any of the dtypes.
        a: ``(N, channels)`` float32, 1 to 256 states.
        b: ``(T, N)`` in any of the dtypes, or None for ones.
        c: likewise.
        state: ``(slots, N, channels)`` float32 or bfloat16, updated.  It is rounded to bfloat16 after every
            token, whose output is computed before.
        state_slots: ``(S,)`` int64, the slot of each sequence, all different.
        query_start: ``(S + 1,)`` int32, the first token of each sequence, and T.
        seq_lens: ``(S,)`` int32, the length of each sequence including its new tokens.  The slot of a
            sequence without earlier tokens is not read.
        normalize: multiplies x by ``sqrt(1 - exp(2 · dt · a))``, except in the first token of a sequence.
        save_slots: ``(T,)`` int64, the slot to which the state after a token is also written, -1 for none;
            None or empty: none at all.  No slot may be named twice, or belong to a sequence of the step.

    Returns:
        ``(T, channels)`` in the dtype of ``x``.

    Raises:
        RuntimeError: a shape, dtype, slot or length is wrong.
    """
