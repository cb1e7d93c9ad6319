"""Files that others may have put where this user's processes look."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.planted_files import PLANTED
from torch_armllm.system import own_files
from torch_armllm.system.files import atomic_file
from torch_armllm.system.own_files import (
    UntrustedFileError,
    check_own_file,
    check_own_folder,
    complaint,
    open_own,
)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT], ids=["read", "write"])
@pytest.mark.parametrize("plant", PLANTED)
def test_what_others_planted_is_not_opened(
    plant: Callable[[Path, Path], None], flags: int, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    plant(tmp_path / "bytes", victim)
    for check in (lambda path: open_own(path, flags), check_own_file):
        with pytest.raises(UntrustedFileError) as raised:
            check(tmp_path / "bytes")
        assert raised.value.strerror in (
            *("it is a link", "it is no regular file", "other users may write to it (mode 666)"),
            "the same file has another name elsewhere (a hard link)",
        )
        assert raised.value.filename == str(tmp_path / "bytes")
    assert victim.read_text() == "precious" and not (tmp_path / "absent").exists()


def test_new_file_is_private(tmp_path: Path) -> None:
    os.close(open_own(tmp_path / "bytes", os.O_RDWR | os.O_CREAT))
    assert (tmp_path / "bytes").stat().st_mode & 0o777 == 0o600
    check_own_file(tmp_path / "bytes")
    with pytest.raises(FileNotFoundError):
        open_own(tmp_path / "absent")


def test_files_of_other_users_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bytes").write_text("")
    state = list(os.lstat(tmp_path / "bytes"))
    state[4] = 4711
    assert complaint(os.stat_result(state)) == "it belongs to another user (uid 4711)"
    state[4] = 0
    monkeypatch.setattr(own_files.os, "geteuid", lambda: 4711)  # type: ignore[attr-defined]
    assert complaint(os.stat_result(state)) is None, "what the administrator installs"


def test_folder_may_be_a_link_only_where_the_user_names_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    check_own_folder(tmp_path)
    check_own_folder(tmp_path / "link", may_be_link=True)
    for path, reason in ((tmp_path / "link", "it is a link"), (tmp_path / "file", "it is no folder")):
        with pytest.raises(UntrustedFileError, match=reason):
            check_own_folder(path)


def test_scratch_file_of_an_atomic_write_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "results.json.part").symlink_to(victim)
    with atomic_file(tmp_path / "results.json") as scratch:
        scratch.write_text("{}")
    assert victim.read_text() == "precious" and (tmp_path / "results.json").read_text() == "{}"
    assert not (tmp_path / "results.json").is_symlink()
