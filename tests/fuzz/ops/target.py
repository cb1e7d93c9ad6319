"""Target: random calls of every op, most of them damaged, with tensors that end at guard pages.

A call returns, or raises an error that says what is wrong.  Either way it stays within its tensors and
changes only those that the schema marks.  A valid call returns, and strides never change a result.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.ops.arguments import Call, Spec, build
from tests.fuzz.ops.calls.every_op import CALLS, variants
from tests.fuzz.ops.memory import GuardedMemory, Region
from tests.fuzz.ops.mutations import LAYOUT, mutate

_EXPECTED = (RuntimeError, ValueError, TypeError)
_UNNAMED = 8
"""A message that is shorter says nothing."""
_UNCLEAR = (
    "Not yet supported",
    "INTERNAL ASSERT",
    "API call failed",
    "bad_alloc",
    "std::",
    "vector::",
    "basic_string",
    "map::at",
)
_NAMES = tuple(CALLS)


class Finding(Exception):
    """A call that does what it must not."""


@cache
def _memory() -> GuardedMemory:
    return GuardedMemory()


@cache
def _op(name: str) -> tuple[Any, list[str], set[str]]:
    """Returns an op, its optional arguments, and the arguments that it may change."""
    packet = getattr(torch.ops.armllm, name)
    arguments = packet.default._schema.arguments
    changed = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    return packet, [a.name for a in arguments if a.has_default_value()], changed


def check_message(error: BaseException) -> None:
    """Raises a finding if an error does not say what is wrong."""
    text = str(error)
    if len(text) < _UNNAMED or any(word in text for word in _UNCLEAR):
        raise Finding(f"{type(error).__name__}: {text}: what is wrong?") from error


def tensors_of(result: Any) -> Iterator[Tensor]:
    """Yields the tensors of a result."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for each in result:
            yield from tensors_of(each)


def same(a: Tensor, b: Tensor) -> bool:
    """True if two tensors are equal; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or torch.allclose(a, b, 0, 0, equal_nan=True)


def draw_call(seed: int) -> tuple[str, Call, list[str], Random]:
    """Returns an op's name, a call of it, the kinds of mutations, and the source of further decisions."""
    draw = Random(seed * 2654435761 & (1 << 62) - 1)
    name = draw.choice(_NAMES)
    call = copy.copy(CALLS[name](draw))
    kinds = mutate(call, draw, _op(name)[1])
    return name, call, kinds, draw


def run(seed: int) -> None:
    """Makes one call.

    Raises:
        Finding: the call touched other memory, is wrongly refused, or gives another result.
        Exception: an error of another family.
    """
    name, call, kinds, draw = draw_call(seed)
    try:
        _run(name, call, kinds, draw)
    except Finding as found:
        raise Finding(f"{name}, changed {kinds or 'nothing'}: {found}; arguments {call}") from found


def _run(name: str, call: Call, kinds: list[str], draw: Random) -> None:
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    op, _, changed = _op(name)
    torch.ops.armllm.isa_select(draw.choice(variants()))
    memory = _memory()
    memory.clear()
    arguments: dict[str, Any] = {}
    regions: dict[str, Region] = {}
    for key, value in call.items():
        if isinstance(value, Spec):
            value.at_end = draw.random() < 0.7
            try:
                arguments[key], region = build(value, memory, draw)
            except OverflowError:
                return
            if region is not None:
                regions[key] = region
        else:
            arguments[key] = value
    before = {key: region.inside() for key, region in regions.items() if key not in changed}
    beside = {key: region.outside() for key, region in regions.items()}
    only_strides = bool(kinds) and set(kinds) == {LAYOUT}
    plain = (
        {k: v.contiguous().clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        if only_strides
        else {}
    )
    result = None
    try:
        result = op(**arguments)
    except _EXPECTED as error:
        if "huge" not in kinds:  # torch's "out of memory" does not pass through its stable ABI
            check_message(error)
        if not kinds and not _may_fail(name, error):
            raise Finding(f"a valid call raised {type(error).__name__}: {error}") from error
        only_strides = False
    for key, region in regions.items():
        if region.outside() != beside[key]:
            raise Finding(f"memory beside {key} was written")
        if key in before and region.inside() != before[key]:
            raise Finding(f"{key} was changed")
    if only_strides:
        _compare(op, name, plain, arguments, changed, result)


def _may_fail(name: str, error: BaseException) -> bool:
    """True for errors of valid calls that depend on the values."""
    return name.startswith("sample") and "no number above" in str(error)


def _compare(
    op: Any, name: str, plain: dict[str, Any], arguments: dict[str, Any], changed: set[str], result: Any
) -> None:
    """Compares a result, and what was written, with the same call on contiguous tensors."""
    expected = op(**plain)
    pairs = [*zip(tensors_of(result), tensors_of(expected), strict=True)]
    pairs += [(arguments[key], plain[key]) for key in changed if isinstance(arguments.get(key), Tensor)]
    for got, wanted in pairs:
        if not same(got, wanted):
            raise Finding("other strides give another result")
