"""Ops check their arguments before they read memory, and name the invalid one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_armllm.ops import attention, linear, moe, norm, rope

Call = Callable[[], Any]

X = torch.randn(5, 64)
IDS = torch.zeros(5, 2, dtype=torch.int64)


def packed_weight(moe_call: int = 0, rows: int = 40, columns: int = 64, scheme: str = "row") -> torch.Tensor:
    """Returns a packed weight of zeros; stacked if there are experts."""
    shape = (moe_call, rows, columns) if moe_call else (rows, columns)
    q = torch.zeros(shape, dtype=torch.int8)
    if scheme == "i8":
        return linear.pack_int8(q, torch.ones(shape[:-1]))
    return linear.pack_int4(q, None, torch.ones(shape[:-1]), scheme)


def moe_call(**replaced: Any) -> Call:
    """Returns a call of `int4_moe` with 4 experts, and with some arguments replaced."""
    valid = {
        "x": X,
        "expert_ids": IDS,
        "expert_weights": torch.ones(5, 2),
        "gate_up": linear.interleave_panels(packed_weight(4), packed_weight(4)),
        "down": packed_weight(4, 64, 40),
        "intermediate": 40,
        "scheme": "row",
    }
    return lambda: moe.int4_moe(**(valid | replaced))


def kv_cache() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values of a KV cache: 3 blocks of 16 positions for 2 heads of size 8."""
    return attention.new_kv_cache(3, 2, 8, 8, 16, torch.float32)[:2]


def write_call(slot: int, **replaced: Any) -> Call:
    """Returns a call of `kv_write` for two tokens, and with some arguments replaced."""
    keys, values = kv_cache()
    valid = {"k": torch.ones(2, 2, 8), "v": torch.ones(2, 2, 8), "slots": torch.tensor([0, slot])}
    return lambda: attention.kv_write(**(valid | {"k_cache": keys, "v_cache": values} | replaced))


INVALID_CALLS: dict[str, tuple[Call, str]] = {
    "unpack-huge": (
        lambda: linear.unpack_weight(torch.zeros(2, 640, dtype=torch.uint8), 32, 2**62 + 1, "int8g32m"),
        "positive sizes of a weight, not 32 and 4611686018427387905",
    ),
    "heads-huge": (
        lambda: linear.int8_heads_linear(X.view(5, 1, 64), packed_weight(1, scheme="i8"), 2**40),
        "weight has 3 panels of 16 rows per head; out_features = 1099511627776",
    ),
    "moe-above": (moe_call(expert_ids=IDS + 4), "names expert 4 as choice 0 of token 0, .* experts 0 to 3"),
    "moe-no-experts": (
        moe_call(
            gate_up=torch.zeros(0, 6, 64 + 2 * 256, dtype=torch.uint8), down=packed_weight(4, 64, 40)[:0]
        ),
        "gate_up holds no experts",
    ),
    "moe-rotated": (
        moe_call(rotated=True),
        "rotated experts need whole groups of 32 features, not 64 and 40",
    ),
    "rope-windows": (
        lambda: rope.rope_(
            torch.ones(3, 2, 8), torch.ones(12).as_strided((3, 1, 8), (2, 8, 1)), *torch.ones(2, 3, 4)
        ),
        "k is written, but its elements overlap in memory",
    ),
    "kv-slot": (write_call(48), "slot 48 of token 1 is past the cache of 3 blocks of 16"),
}


@pytest.mark.parametrize("name", INVALID_CALLS)
def test_invalid_arguments_raise(name: str) -> None:
    call, message = INVALID_CALLS[name]
    with pytest.raises(RuntimeError, match=message):
        call()


def test_unmodified_calls_succeed() -> None:
    moe_call()()
    write_call(47)()


def attend(max_seq_len: int, window: int = 0) -> torch.Tensor:
    """Attends to 20 positions of a sequence, from its last one."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(cache.shape, generator=generator) for cache in kv_cache())
    table, starts, lengths = torch.tensor([[2, 0]]), torch.tensor([0, 1]), torch.tensor([20])
    return attention.paged_attention(
        torch.randn(1, 4, 8, generator=generator), keys, values,
        table.int(), starts.int(), lengths.int(), max_seq_len, 0.3, window,
    )  # fmt: skip


@pytest.mark.parametrize("large", [2**40, 2**62, 2**63 - 1])
def test_bounds_of_attention_may_be_any_number(large: int) -> None:
    """The bound of the lengths was multiplied: its memory was a negative number of bytes."""
    expected = attend(20)
    assert torch.equal(attend(large), expected)
    assert torch.equal(attend(20, window=large), expected)


def test_results_that_do_not_fit_into_memory() -> None:
    x = torch.zeros(1, 64).expand(1 << 46, 64)  # takes no memory itself
    with pytest.raises(
        RuntimeError, match=r"there is no memory for a tensor of shape \(70368744177664, 64\)"
    ):
        norm.rms_norm(x, torch.ones(64), 1e-6)


def test_rope_rotates_heads_before_tokens() -> None:
    q, table = torch.randn(2, 3, 8), torch.rand(2, 3, 4)
    expected, turned = q.transpose(0, 1).contiguous(), q.clone().transpose(0, 1)
    for each in (expected, turned):
        rope.rope_(each, torch.ones(3, 1, 8), *table)
    assert torch.equal(turned, expected)


def overlapping(weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight of the same shape whose panels all lie at one address."""
    return weight[..., :1, :].expand(weight.shape)


OVERLAPPING: dict[str, Call] = {
    "int4_linear": lambda: linear.int4_linear(X, overlapping(packed_weight()), 40, "row"),
    "int4_linear-one-token": lambda: linear.int4_linear(X[:1], overlapping(packed_weight()), 40, "row"),
    "int8_linear": lambda: linear.int8_linear(X, overlapping(packed_weight(scheme="i8")), 40),
    "int4_linear_q": lambda: linear.int4_linear_q(
        torch.ones(5, 64, dtype=torch.int8), torch.ones(5), overlapping(packed_weight()), 40, "row", "float32"
    ),
    "int4_gated_linear": lambda: linear.int4_gated_linear(
        X, overlapping(linear.interleave_panels(packed_weight(), packed_weight())), 40, "row", "silu"
    ),
    "int8_heads_linear": lambda: linear.int8_heads_linear(
        X.view(5, 1, 64), overlapping(packed_weight(1, scheme="i8")), 40
    ),
    "unpack_weight": lambda: linear.unpack_weight(overlapping(packed_weight()), 40, 64, "row"),
    "int4_moe-gate_up": moe_call(
        gate_up=overlapping(linear.interleave_panels(packed_weight(4), packed_weight(4)))
    ),
    "int4_moe-down": moe_call(down=overlapping(packed_weight(4, 64, 40))),
}


@pytest.mark.parametrize("call", OVERLAPPING.values(), ids=list(OVERLAPPING))
def test_weights_with_overlapping_panels_raise(call: Call) -> None:
    """A stride of 0 was a division by zero, which ended the process."""
    with pytest.raises(RuntimeError, match="has panels that overlap in memory"):
        call()


def test_stride_of_a_single_panel_is_arbitrary() -> None:
    weight = packed_weight(rows=16)
    expected = linear.int4_linear(X, weight, 16, "row")
    assert torch.equal(linear.int4_linear(X, weight.as_strided(weight.shape, (0, 1)), 16, "row"), expected)
