"""Files at places that others can guess: those that this user's processes did not write are refused."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_REFUSED = {
    errno.ELOOP: "it is a link",
    errno.ENXIO: "it is no regular file",
    errno.EISDIR: "it is no regular file",
}


class UntrustedFileError(OSError):
    """A file or folder that may be another's work; ``strerror`` says why."""


def complaint(state: os.stat_result) -> str | None:
    """Returns why a file may be another's work; None if this user's processes wrote it.

    A link, or a second name of a file, leads to a file that was not meant. A pipe never ends to be read.

    Args:
        state: of the file itself: from ``os.lstat`` or ``os.fstat``.
    """
    if stat.S_ISLNK(state.st_mode):
        return "it is a link"
    if not stat.S_ISREG(state.st_mode):
        return "it is no regular file"
    if state.st_nlink > 1:
        return "the same file has another name elsewhere (a hard link)"
    if state.st_mode & stat.S_IWOTH or (state.st_mode & stat.S_IWGRP and state.st_gid != os.getegid()):
        return f"other users may write to it (mode {stat.S_IMODE(state.st_mode):o})"
    return _foreign(state)


def open_own(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Opens a file that this user's processes wrote, and returns its handle; a new one is private.

    Nothing is read from, written to or cut off another file, and no pipe is waited for.

    Args:
        path: the file.
        flags: of ``os.open``, without ``O_TRUNC``.

    Raises:
        UntrustedFileError: the file may be another's work.
        OSError: it cannot be opened.
    """
    assert not flags & os.O_TRUNC
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _REFUSED:
            raise UntrustedFileError(errno.EPERM, _REFUSED[error.errno], str(path)) from None
        raise
    if (reason := complaint(os.fstat(handle))) is not None:
        os.close(handle)
        raise UntrustedFileError(errno.EPERM, reason, str(path))
    return handle


def check_own_file(path: str | Path) -> None:
    """Checks a file that another library opens by its name.

    Raises:
        UntrustedFileError: the file may be another's work.
        OSError: there is none.
    """
    if (reason := complaint(os.lstat(path))) is not None:
        raise UntrustedFileError(errno.EPERM, reason, str(path))


def check_own_folder(path: str | Path, may_be_link: bool = False) -> None:
    """Checks a folder in which this user's files lie.

    Args:
        path: the folder.
        may_be_link: the user has named it, and may have named a link.

    Raises:
        UntrustedFileError: it is another's, or no folder.
        OSError: there is none.
    """
    state = os.stat(path) if may_be_link else os.lstat(path)
    reason = "it is a link" if stat.S_ISLNK(state.st_mode) else _foreign(state)
    if not stat.S_ISDIR(state.st_mode) and reason is None:
        reason = "it is no folder"
    if reason is not None:
        raise UntrustedFileError(errno.EPERM, reason, str(path))


def _foreign(state: os.stat_result) -> str | None:
    if state.st_uid in (os.geteuid(), 0):
        return None
    return f"it belongs to another user (uid {state.st_uid})"
