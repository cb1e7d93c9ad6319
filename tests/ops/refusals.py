"""Texts of ops about wrong arguments, in `refusals.txt`, which `python -m tests.ops.refusals` writes anew.

Wrong arguments derive from those of valid calls: other dtypes, dimensions, sizes and strides, one element
that is out of range, numbers below and above all others, names that do not exist.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.ops.arguments import Spec
from tests.fuzz.ops.calls.every_op import CALLS
from tests.ops.properties import TESTED, OpCall

FILE = Path(__file__).with_suffix(".txt")
_SEEDS = 100
_DECIDE = (("pack_int4", "scheme"), ("int4_moe", "activation"))
"""Arguments on which it depends what others may be, beside the dtype of a cache."""
_LEAST = {"query_start": 3, "logits": 2}
"""Sizes: some faults need two sequences or rows."""
_DTYPES = (torch.complex64, torch.int64, torch.int32, torch.int8, torch.float16, torch.float32)
_ELEMENTS = (math.nan, -1.5, 1.5, -1 << 40, 1 << 40, -3, 1, 99)
_OTHERS: dict[type, tuple[Any, ...]] = {
    **{bool: (False, True), int: (-1, 0, 3, 1 << 40), float: (-1.0, 0.0, math.nan)},
    **{str: ("other", "int32", "i8", "g64z", "g32i"), list: ([], [0], [1, 1])},
}


def calls(name: str) -> Iterator[OpCall]:
    """Yields a few valid calls of an op that together have all of its arguments."""
    seen: set[str] = set()
    for seed in range(_SEEDS):
        drawn = CALLS[name](Random(seed))
        given = {key for key, value in drawn.items() if value is not None}
        given |= {f"{key} {drawn[key]}" for op, key in _DECIDE if op == name}
        given |= {f"cache of {value.dtype}" for key, value in drawn.items() if key == "k_cache"}
        tensors = [value for value in drawn.values() if isinstance(value, Spec)]
        small = any(name in drawn and drawn[name].shape[0] < least for name, least in _LEAST.items())
        if not given <= seen and not small and all(0 not in tensor.shape for tensor in tensors):
            seen |= given
            yield OpCall.random(name, seed)


def _tensors(value: Tensor) -> Iterator[Tensor | None]:
    """Yields tensors that are almost like a valid one."""
    yield None
    yield from (value.to(dtype) for dtype in _DTYPES if dtype != value.dtype)
    yield value[None]
    yield value.flatten()[0]
    for dim, size in enumerate(value.shape):
        yield value.select(dim, 0)
        yield value.narrow(dim, 0, size - 1).contiguous()
        yield value.narrow(dim, 0, 1).expand(value.shape)
        yield torch.cat([value, value.narrow(dim, 0, 1)], dim)
        yield torch.cat([value, value], dim)
        yield torch.stack([value, value], dim + 1).select(dim + 1, 0)
        yield value.flip(dim)
    yield value.flatten()[0].expand(value.shape).clone()
    if value.is_floating_point():
        yield torch.full_like(value, math.nan)
    limits = None if value.is_floating_point() else torch.iinfo(value.dtype)
    for element, place in itertools.product(_ELEMENTS, sorted({0, min(1, value.numel() - 1), -1})):
        if limits is None or isinstance(element, int):
            other = value.clone(memory_format=torch.contiguous_format)
            fits = element if limits is None else min(max(element, limits.min), limits.max)
            other.view(-1)[place] = fits
            yield other


def wrong(call: OpCall) -> Iterator[OpCall]:
    """Yields calls of which one argument is wrong, or unusual."""
    for key, value in call.arguments.items():
        for other in _tensors(value) if isinstance(value, Tensor) else _OTHERS.get(type(value), ()):
            yield (call.copied() if call.written else call).replaced(**{key: other})


def said(error: Exception) -> str:
    """Returns what an op says, without the place, numbers and shapes; nothing if torch says it."""
    text = re.sub(r"^.*?\.(cpp|h):\d+, ", "", str(error).splitlines()[0])
    if "armllm::" in text:
        return ""
    text = re.sub(r"'[^']*'", "'…'", text)
    text = re.sub(r"(?<![\w.])-?\d+(\.\d+)?(e[+-]\d+)?(?!\w)", "N", text)
    return re.sub(r"\((N(, N)*,?)?\)", "(…)", text)


def refusals() -> str:
    """Returns the lines of the file: a text, and the ops that say it."""
    ops: dict[str, list[str]] = {}
    for name in sorted(TESTED):
        for call in calls(name):
            for other in wrong(call):
                try:
                    other.run()
                except (RuntimeError, ValueError, TypeError) as error:
                    if name not in ops.setdefault(said(error), []):
                        ops[said(error)].append(name)
    ops.pop("", None)
    return "".join(f"{text} | {', '.join(names)}\n" for text, names in sorted(ops.items()))


if __name__ == "__main__":
    FILE.write_text(refusals())
