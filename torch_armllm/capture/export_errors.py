"""Reasons why a model cannot be exported: the layer, and what it does that one graph cannot hold."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

_LIBRARY = os.path.dirname(os.path.abspath(torch.__file__))
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OTHER_LENGTHS = (2, 3, 64, 1009, 1 << 22)


def export_reason(error: Exception, base: nn.Module) -> str:
    """Returns why a model cannot be exported.

    Args:
        error: raised by ``torch.export.export``.
        base: the model.
    """
    frames = list(_frames(error))
    if isinstance(error, torch._dynamo.exc.UserError) and "Constraints violated" in str(error):
        place = _place_of_guard(frames, base)
        return f"{place} depends on the number of tokens in its choice of operators"
    place = _place_of_frames(frames, base)
    if isinstance(error, GuardOnDataDependentSymNode):
        return f"{place} chooses its operators by values that it computes, such as counts of tokens"
    lines = str(error).strip().splitlines()
    return f"{place} cannot be exported: {type(error).__name__}: {lines[0] if lines else ''}"


def length_limit(error: Exception) -> int | None:
    """Returns the most tokens for which a model that cannot be exported chooses the same operators.

    None if that is not known, or not all fewer tokens are computed in that way.

    Args:
        error: raised by ``torch.export.export``.
    """
    advice = re.search(r"Suggested fixes:\s*tokens = Dim\('tokens', max=(\d+)\)", str(error))
    return int(advice[1]) if advice else None


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Yields the frames of an error and of its causes, the outermost first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    for link in chain:
        traceback = link.__traceback__
        while traceback is not None:
            yield traceback.tb_frame
            traceback = traceback.tb_next


def _is_model_code(file: str) -> bool:
    return not os.path.abspath(file).startswith((_LIBRARY + os.sep, _OWN + os.sep))


def _place_of_frames(frames: list[FrameType], base: nn.Module) -> str:
    """Returns the innermost module whose own code was running."""
    names = {id(module): name for name, module in base.named_modules()}
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names and _is_model_code(frame.f_code.co_filename):
            return _named(names[id(module)], module)
    return type(base).__name__


def _place_of_guard(frames: list[FrameType], base: nn.Module) -> str:
    """Returns the module whose code made the first assumption about the number of tokens."""
    for guard in _guards(frames):
        location = guard.sloc.framework_loc
        if not _excludes_lengths(guard.expr) or not hasattr(location, "filename"):
            continue
        if not _is_model_code(location.filename):
            continue
        for name, module in base.named_modules():
            if _defines(type(module), location.filename, int(location.lineno)):
                place = f"{type(module).__name__}, such as {name}" if name else type(module).__name__
                return f"{place} (line {location.lineno} of its code)"
    return type(base).__name__


def _guards(frames: list[FrameType]) -> list[Any]:
    """Returns the assumptions that an export made about sizes."""
    for frame in frames:
        for value in list(frame.f_locals.values()):
            shapes = value if isinstance(value, ShapeEnv) else getattr(value, "shape_env", None)
            if isinstance(shapes, ShapeEnv) and shapes.guards:
                return list(shapes.guards)
    return []


def _excludes_lengths(expression: Any) -> bool:
    """True if an assumption does not hold for all numbers of tokens."""
    symbols = expression.free_symbols
    results = [expression.subs(dict.fromkeys(symbols, length)) for length in _OTHER_LENGTHS]
    return bool(symbols) and any(not result for result in results if result.is_Boolean)


def _defines(kind: type, file: str, line: int) -> bool:
    """True if a class's own source holds a line of a file."""
    try:
        if inspect.getsourcefile(kind) != file:
            return False
        lines, first = inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return False
    return first <= line < first + len(lines)


def _named(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"{name} ({kind})" if name else kind
