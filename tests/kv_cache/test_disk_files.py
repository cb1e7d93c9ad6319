"""Files of the prefix cache on disk, without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from torch_armllm.kv_cache.disk.digests import prefix_digests
from torch_armllm.kv_cache.disk.folder import CacheFolder
from torch_armllm.kv_cache.disk.record import DamagedError, Identity, Section, read_record, write_record
from torch_armllm.kv_cache.disk.rows import Rows

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
