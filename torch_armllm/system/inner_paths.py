"""Paths that a folder's own files name: they stay in the folder."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def check_inner_name(name: object, where: str) -> str:
    """Returns a name that stays in the folder that it is joined to.

    Args:
        name: a path below a folder, as a file names it; empty: the folder itself.
        where: what names it, for the message.

    Raises:
        ValueError: it is no text, absolute, or has a part that leads up.
    """
    if not isinstance(name, str) or "\0" in name or "\\" in name:
        raise ValueError(f"{where} has {name!r}, and the name of a file or folder beside it is expected")
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{where} has {name!r}, which leaves its own folder: it is not read")
    return name


def is_inner(path: Path, folder: Path) -> bool:
    """True if a path leads into a folder, all links followed.

    The files of a snapshot in the cache of the model hub are links to its blobs, beside all snapshots. Those
    count as in the folder.

    Args:
        path: a file or folder, which may not exist.
        folder: the folder.
    """
    real, home = path.resolve(), folder.resolve()
    blobs = home.parent.parent / "blobs"
    return real.is_relative_to(home) or (home.parent.name == "snapshots" and real.is_relative_to(blobs))


def inner_path(folder: Path, name: object, where: str) -> Path:
    """Returns the path of what a file of a folder names.

    Args:
        folder: the folder.
        name: see `check_inner_name`.
        where: see `check_inner_name`.

    Raises:
        ValueError: the path leaves the folder, by its name or by a link.
    """
    path = folder / check_inner_name(name, where)
    if not is_inner(path, folder):
        raise ValueError(f"{where} has {name!r}, a link that leaves its own folder: it is not read")
    return path
