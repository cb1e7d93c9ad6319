"""Files of the prefix cache on disk, without an engine."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.support.planted_files import PLANTED, planted_folder
from torch_armllm.kv_cache.disk import counter
from torch_armllm.kv_cache.disk.digests import prefix_digests
from torch_armllm.kv_cache.disk.folder import CacheFolder
from torch_armllm.kv_cache.disk.record import DamagedError, Identity, Section, read_record, write_record
from torch_armllm.kv_cache.disk.rows import Rows
from torch_armllm.system import own_files
from torch_armllm.system.files import atomic_file

IDENTITY = Identity("ab" * 16, bytes(range(20)))


def test_rows_hold_all_layers_of_a_block() -> None:
    tensors = [torch.randn(3, 5, 4, 2), None, torch.randint(0, 99, (2, 5, 3), dtype=torch.int8)]
    rows = Rows(tensors)
    assert rows.nbytes == 3 * 4 * 2 * 4 + 2 * 3
    taken = rows.take(1)
    before = [None if tensor is None else tensor.clone() for tensor in tensors]
    rows.map_pages(5)
    rows.put(4, taken)
    for tensor, old in zip(tensors, before, strict=True):
        if tensor is not None and old is not None:
            assert torch.equal(tensor[:, 4], old[:, 1]) and torch.equal(tensor[:, :4], old[:, :4])


def test_digest_depends_on_all_tokens_before() -> None:
    first = list(prefix_digests(range(100), 32))
    other = list(prefix_digests([*range(40), 7, *range(41, 100)], 32))
    assert len(first) == 3 and first[0] == other[0]
    assert set(first[1:]).isdisjoint(other)
    assert first[:2] == list(prefix_digests(range(64), 32)), "what follows does not matter"


def test_flipped_bits_of_a_file_are_found(tmp_path: Path) -> None:
    path, section = tmp_path / "a.safetensors", Section("block", (1, 64))
    value, read = np.arange(64, dtype=np.uint8), np.empty(64, np.uint8)
    write_record(path, IDENTITY, [section], [value])
    read_record(path, IDENTITY, section, read)
    assert np.array_equal(read, value)
    with safe_open(path, "np") as opened:
        assert np.array_equal(opened.get_tensor("block")[0], value)
    data = path.read_bytes()
    for place in range(0, len(data), 3):
        path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        with pytest.raises(DamagedError):
            read_record(path, IDENTITY, section, read)
    path.write_bytes(data)
    with pytest.raises(DamagedError):
        read_record(path, IDENTITY._replace(digest=bytes(20)), section, read)


def test_folder_forgets_what_was_interrupted_and_leaves_other_files_alone(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, "f" * 32, 1000)
    path = folder.path(bytes(20), "kv")
    folder.store(path, 300, lambda free: free.write_bytes(bytes(300)))
    (path.parent / "tmp123").write_bytes(bytes(700))
    (tmp_path / "notes.txt").write_text(json.dumps({}))
    again = CacheFolder(tmp_path, "f" * 32, 1000)
    assert again.nbytes == again.found == 300 and not (path.parent / "tmp123").exists()
    assert (tmp_path / "notes.txt").exists()
    assert CacheFolder(tmp_path, "e" * 32, 1000).found == 0


def test_file_that_others_removed_makes_no_room_twice(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, "f" * 32, 1000)
    paths = [folder.path(bytes([number] * 20), "kv") for number in range(5)]
    for place, path in enumerate(paths):
        folder.store(path, 300, lambda free: free.write_bytes(bytes(300)))
        folder.touch(path, now=10**18 + place)
        if place == 1:
            paths[0].unlink()
    assert [path.exists() for path in paths] == [False, False, True, True, True]
    assert folder.nbytes == 900 and not folder.touch(paths[0])


def stored(root: Path, name: int = 0) -> tuple[CacheFolder, Path]:
    """A folder with a file of 300 bytes."""
    folder = CacheFolder(root, "f" * 32, 1000)
    path = folder.path(bytes([name] * 20), "kv")
    folder.store(path, 300, lambda free: write_scratch(free, 300))
    return folder, path


def write_scratch(path: Path, size: int) -> None:
    with atomic_file(path, shared=True) as scratch:
        scratch.write_bytes(bytes(size))


@pytest.mark.parametrize("plant", PLANTED)
def test_counter_that_others_planted_is_replaced_and_not_written_through(
    plant: Callable[[Path, Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim, root = tmp_path / "victim", tmp_path / "cache"
    victim.write_text("precious")
    _, path = stored(root)
    (root / "bytes").unlink()
    plant(root / "bytes", victim)
    if plant is planted_folder:  # which is not removed
        folder = CacheFolder(root, "f" * 32, 1000)
        assert folder.problem is not None and folder.found == 300 and folder.holds(path)
        return
    folder, _ = stored(root, 1)
    assert folder.problem is None and folder.nbytes == 600 and folder.holds(path)
    assert victim.read_text() == "precious" and not (tmp_path / "absent").exists()
    assert f"{root / 'bytes'} of the prefix cache is replaced, as " in caplog.text


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\xff" * 200, b"5", bytes(1 << 20)], ids=len)
def test_counter_of_any_content_is_counted_anew(content: bytes, tmp_path: Path) -> None:
    folder, _ = stored(tmp_path)
    (tmp_path / "bytes").write_bytes(content)
    assert folder.nbytes < 1 << 64
    again = CacheFolder(tmp_path, "f" * 32, 1000)
    assert again.nbytes == again.found == 300 and (tmp_path / "bytes").stat().st_size == 8


@pytest.mark.parametrize("plant", PLANTED)
def test_file_that_others_planted_is_absent_named_and_replaced(
    plant: Callable[[Path, Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim, root = tmp_path / "victim", tmp_path / "cache"
    victim.write_text("precious")
    folder, path = stored(root)
    path.unlink()
    plant(path, victim)
    before = victim.stat().st_mtime_ns
    assert not folder.holds(path) and not folder.touch(path)
    assert f"{path} of the prefix cache is not read, as " in caplog.text
    with pytest.raises(OSError, match="link|regular|other"):
        read_record(path, IDENTITY, Section("block", (1, 64)), np.empty(64, np.uint8))
    folder.store(path, 300, lambda free: write_scratch(free, 300))
    assert folder.holds(path) is (plant is not planted_folder)
    assert victim.read_text() == "precious" and victim.stat().st_mtime_ns == before


@pytest.mark.parametrize("level", ["model", "part"])
def test_link_in_place_of_a_folder_is_absent(
    level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    folder, path = stored(root)
    replaced = path.parent if level == "part" else path.parent.parent
    replaced.rename(elsewhere)
    replaced.symlink_to(elsewhere)
    names = sorted(elsewhere.rglob("*"))
    again = CacheFolder(root, "f" * 32, 1000)
    assert again.found == 0
    assert not again.holds(path)
    other = again.path(bytes(19) + b"\1", "kv")
    again.store(other, 300, lambda free: write_scratch(free, 300))
    assert sorted(elsewhere.rglob("*")) == names and "it is a link" in caplog.text + str(again.problem)


def test_folders_of_others_beside_the_cache_are_left_alone(tmp_path: Path) -> None:
    for place in ("project/src", "f" * 32 + "/source"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "main.py").write_text("")
        (tmp_path / place / "model.safetensors").write_bytes(bytes(5000))
    folder, path = stored(tmp_path)
    CacheFolder(tmp_path, "f" * 32, 1000)
    assert folder.nbytes == 300 and path.exists()
    assert len(list(tmp_path.rglob("main.py"))) == len(list(tmp_path.rglob("model.safetensors"))) == 2


def test_folder_of_another_user_is_named_and_its_files_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, path = stored(tmp_path)
    monkeypatch.setattr(own_files, "_foreign", lambda state: "it belongs to another user (uid 4712)")
    folder = CacheFolder(tmp_path, "f" * 32, 1000)
    assert folder.found == 0 and folder.problem is not None and not folder.holds(path)
    assert f"{tmp_path} is not this process's own folder, as it belongs to another user" in caplog.text


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_folder_that_cannot_be_written_is_read(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = stored(tmp_path)
    with monkeypatch.context() as patched:

        def refuse(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        patched.setattr(counter, "open_own", refuse)
        folder = CacheFolder(tmp_path, "f" * 32, 1000)
        assert folder.problem == os.strerror(number) and folder.found == 300 and folder.holds(path)
        if number != errno.ENOSPC:  # which passes
            with pytest.raises(OSError, match=os.strerror(number)):
                CacheFolder(tmp_path, "e" * 32, 1000)
    other = folder.path(bytes([1] * 20), "kv")
    folder.store(other, 300, lambda free: write_scratch(free, 300))
    assert folder.problem is None and folder.nbytes == 600, "it is tried again"
