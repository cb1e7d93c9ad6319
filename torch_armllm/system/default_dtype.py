"""torch's default dtype while models are read, quantized and captured."""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType

import torch


class Float32ByDefault(ContextDecorator):
    """Makes float32 the dtype of new tensors while a context or a decorated function lasts.

    Samples, scales and checks are computed in it, and would otherwise depend on a setting of the caller's.
    """

    def __init__(self) -> None:
        self._before: list[torch.dtype] = []

    def __enter__(self) -> None:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_default_dtype(self._before.pop())
