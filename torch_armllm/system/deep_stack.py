"""Calls on a thread with a large stack, for libraries that recurse as deeply as their input says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

_STACK_BYTES = 256 << 20
"""Reserved, not used: pages of a stack take memory when they are first written."""
_lock = threading.Lock()

Result = TypeVar("Result")


def call_on_deep_stack(function: Callable[..., Result], *args: Any) -> Result:
    """Calls a function on a new thread with 256 MB of stack, and returns its result or raises its error."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function(*args))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            errors.append(error)

    with _lock:  # the size applies to all threads that start meanwhile
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="armllm-deep-stack")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
