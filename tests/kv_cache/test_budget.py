"""Memory budget of the KV cache, and the free memory that the system reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torch_armllm.kv_cache.budget import size_kv_memory
from torch_armllm.kv_cache.drafter_memory import DrafterNeeds
from torch_armllm.kv_cache.shapes import CacheShape, LatentShape
from torch_armllm.system import host

SHAPE = CacheShape(layers=10, kv_heads=2, head_size=64, value_size=64, dtype=torch.bfloat16)
TOKEN = 10 * 2 * 128 * 2
GB = 10**9


@pytest.mark.parametrize("memory", [None, 0.5, 1.0, 3 * GB, 2e9])
def test_kv_memory_stays_within_the_budget(memory: Any) -> None:
    found = size_kv_memory(SHAPE, 2048, memory=memory, max_num_seqs=10**6, free=8 * GB)
    most = {None: 2 * GB, 0.5: 4 * GB, 1.0: 8 * GB}.get(memory, memory)
    used = found.num_blocks * found.block_bytes
    assert most - found.block_bytes < used <= most
    assert found.block_bytes == 32 * TOKEN
    assert found.max_model_len == 2048


def test_default_memory_is_limited_by_max_num_seqs() -> None:
    found = size_kv_memory(SHAPE, 1000, max_num_seqs=4, free=80 * GB)
    assert found.num_blocks == 4 * 32
    asked = size_kv_memory(SHAPE, 1000, max_num_seqs=4, memory=0.5, free=80 * GB)
    assert asked.num_blocks > 1000


def test_max_model_len_is_limited_by_memory() -> None:
    free = 4 * 3000 * TOKEN
    found = size_kv_memory(SHAPE, 10**6, free=free)
    assert found.max_model_len == found.tokens == 3000 // 32 * 32
    with pytest.raises(
        ValueError, match="max_model_len = 10000 tokens needs .* set max_model_len to 2976 .* as int8"
    ):
        size_kv_memory(SHAPE, 10**6, max_model_len=10000, free=free)
    assert size_kv_memory(SHAPE, 10**6, max_model_len=2976, free=free).num_blocks == 93
    with pytest.raises(ValueError, match="tokens needs .*: raise kv_cache_memory, or store"):
        size_kv_memory(SHAPE, 10**6, free=4 * TOKEN)


def test_memory_beyond_free_memory_raises() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_memory = 9.00 GB .* 8.00 GB that are free"):
        size_kv_memory(SHAPE, 2048, memory=9 * GB, free=8 * GB)
    with pytest.raises(ValueError, match=r"swap_space = 7.00 GB"):
        size_kv_memory(SHAPE, 2048, swap_space=7 * GB, free=8 * GB)
    for wrong in (0, -5, 1, 0.0, -0.5):
        with pytest.raises(ValueError, match="kv_cache_memory is bytes"):
            size_kv_memory(SHAPE, 2048, memory=wrong, free=8 * GB)


def test_budget_is_printed() -> None:
    latents = LatentShape(layers=10, rank=512, rope_size=64, dtype=torch.float16)
    found = size_kv_memory(latents, 4096, max_num_seqs=2, swap_space=GB, free=40 * GB)
    assert found.swap_blocks == GB // (32 * 11520)
    assert str(found) == (
        "KV cache 94.4 MB for 8192 tokens (float16, 11520 bytes a token), and 999.8 MB of swap: "
        "2.0 texts of max_model_len = 4096"
    )


def test_a_drafter_is_part_of_the_memory() -> None:
    drafter = DrafterNeeds(TOKEN // 4, spare_bytes=10**6, state_bytes=10**6, state_slots=7, swapped=True)
    found = size_kv_memory(
        SHAPE, 2048, memory=GB, max_num_seqs=10**6, swap_space=GB, free=8 * GB, drafter=drafter
    )
    assert found.drafter_tokens == found.tokens and found.drafter_state_slots == 7
    assert found.drafter_bytes == found.tokens * TOKEN // 4 + 8 * 10**6
    used = found.num_blocks * found.block_bytes + found.drafter_bytes
    assert GB - 2 * found.block_bytes < used <= GB
    assert found.swap_blocks == GB // (40 * TOKEN)
    assert str(found).endswith("of max_model_len = 2048; the drafter's own cache 206.4 MB")
    assert "and 999.8 MB of swap" in str(found)
    scarce = size_kv_memory(SHAPE, 2048, max_model_len=64, memory=12 * 10**6, free=GB, drafter=drafter)
    assert scarce.drafter_state_slots == 3
    with pytest.raises(ValueError, match=r"beside 2\.0 MB for drafts: raise kv_cache_memory"):
        size_kv_memory(SHAPE, 2048, max_model_len=640, memory=6 * 10**6, free=GB, drafter=drafter)


def test_int8_latents_have_two_scales() -> None:
    latents = LatentShape(10, 512, 64, torch.int8, indexers=2, index_size=128, index_dtype=torch.bfloat16)
    assert latents.bytes_per_token == 10 * (512 + 64 + 8) + 2 * 128 * 2
    assert sum(t.nbytes for t in latents.tensors(3)) == 3 * 32 * latents.bytes_per_token
    floats = LatentShape(layers=10, rank=512, rope_size=64, dtype=torch.float16)
    with pytest.raises(ValueError, match=r'store them as int8 \(kv_cache_dtype="int8"\)'):
        size_kv_memory(floats, 4096, max_model_len=4096, memory=32 * 11520, free=8 * GB)


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_free_memory_respects_every_cgroup_limit(tmp_path: Path) -> None:
    write(tmp_path, meminfo="MemTotal: 9000 kB\nMemAvailable:    8000 kB")
    meminfo, v2, v1 = tmp_path / "meminfo", tmp_path / "v2", tmp_path / "v1"
    assert host.free_memory(v2, "0::/a/b\n", meminfo) == 8_192_000
    write(v2 / "a", memory__max=5_000_000, memory__current=3_000_000)
    write(v2 / "a", memory__stat="anon 7\ninactive_file 400000")
    write(v2 / "a" / "b", memory__max="max", memory__current=10)
    assert host.free_memory(v2, "0::/a/b\n", meminfo) == 2_400_000
    assert host.free_memory(v2, "0::/\n", meminfo) == 8_192_000
    group = v1 / "memory" / "x"
    write(group, memory__limit_in_bytes=1_000_000, memory__usage_in_bytes=1_300_000)
    write(group, memory__stat="inactive_file 5\ntotal_inactive_file 400000")
    write(v1 / "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=7)
    assert host.free_memory(v1, "5:cpu:/x\n4:memory:/x\n", meminfo) == 100_000
    assert host.free_memory(v1, "5:cpu:/x\n", meminfo) == 8_192_000


def test_free_memory_of_this_machine_is_plausible() -> None:
    assert 0 < host.free_memory() < 2**50
    assert host.free_memory(meminfo=Path("/nowhere")) > 0
