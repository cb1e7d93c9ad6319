"""Files of tensors in torch's own format."""

from __future__ import annotations

from pathlib import Path

import torch

from torch_armllm.system.files import atomic_file


def save_tensors(value: object, path: Path) -> None:
    """Writes tensors, or containers of them, to a file that ``torch.load`` reads; all of it or nothing.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.  ``torch.save`` itself
            raises a RuntimeError about positions in its archive.
    """
    with atomic_file(path) as scratch, scratch.open("wb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            raise _cause(error) from None


def _cause(error: BaseException) -> BaseException:
    """Returns the OSError during whose handling an error was raised; the error itself if there is none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__context__
    return error
