"""Pausing Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Disables the garbage collector during imports and captures: most of what they allocate is long-lived.

    Scanning those objects repeatedly takes a fifth of the time of importing torch and transformers, or of
    capturing a model.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
