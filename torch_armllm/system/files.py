"""Atomic writes of files and folders, the cache folder, and readable sizes."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_file(path: Path, shared: bool = False, durable: bool = False) -> Iterator[Path]:
    """Yields a scratch path, which replaces ``path`` when the block ends without an error.

    Readers and interrupted runs find the old file or the new one, never half of it.

    Args:
        path: the file to write; its folder exists.
        shared: several processes may write the file at once, so each gets a scratch file of its own.
        durable: waits until the disk has the file's contents before the file gets its name.
    """
    if shared:
        handle, name = tempfile.mkstemp(dir=path.parent)
        os.close(handle)
        scratch = Path(name)
    else:
        scratch = path.with_name(scratch_name(path.name))
        _make_anew(scratch)
    try:
        yield scratch
        if durable:
            _wait_for_disk(scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _make_anew(path: Path) -> None:
    """Makes an empty file, so that its writer does not follow a link that has its name."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))


def _wait_for_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def scratch_name(name: str) -> str:
    """Returns the name of a file's scratch file, which a process that was killed leaves."""
    return f"{name}.part"


@contextmanager
def atomic_folder(folder: Path, replace: bool = False) -> Iterator[Path]:
    """Yields an empty scratch folder, which becomes ``folder`` when the block ends without an error.

    If another process creates ``folder`` meanwhile, that one stays.

    Args:
        folder: the folder to write; its parents are created.
        replace: ``folder`` may exist, and is then removed when the new one is complete.
    """
    existed = folder.exists()
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        if existed and replace:
            _remove_at_once(folder)
        try:
            scratch.rename(folder)
        except OSError:
            if (existed and not replace) or not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_at_once(folder: Path) -> None:
    """Removes a folder that others may be reading: they find all of it or nothing."""
    away = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with suppress(FileNotFoundError):  # another process was faster
            folder.rename(away / folder.name)
    finally:
        shutil.rmtree(away, ignore_errors=True)


def cache_folder() -> Path:
    """Returns ``$XDG_CACHE_HOME/torch_armllm`` (default: ``~/.cache/torch_armllm``), which may not exist.

    Raises:
        FileNotFoundError: the user has no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_armllm"
    except RuntimeError as error:
        raise FileNotFoundError("there is no home folder to cache in: set XDG_CACHE_HOME") from error


_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str) -> int | None:
    """Returns the bytes of a size such as ``500MB``, ``2GiB`` or ``0.9g``; None if the text is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?([kmg]i?)b?", text.strip().lower())
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def format_bytes(count: float) -> str:
    """Returns a size as text, such as ``1.25 GB`` or ``98.0 MB`` (decimal units)."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
