"""Work in forked processes that are to be interrupted."""

from __future__ import annotations

import os
import resource
import traceback
from collections.abc import Callable

REFUSED = 7
"""Exit status of work that raised OSError."""


def fork(work: Callable[[], object], most_bytes: int | None = None) -> int:
    """Runs a function in a forked process, with a limit on the size of files; returns the process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        work()
        status = 0
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        full = isinstance(error, OSError) or "os error 27" in text  # safetensors has an error of its own
        status = REFUSED if full else 1
        if not full:
            traceback.print_exception(error)
    finally:
        os._exit(status)


def exit_code(child: int) -> int:
    """Waits for a process; returns its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
