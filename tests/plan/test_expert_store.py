"""The store of experts on disk, compared with a dictionary of their bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.server_live import until
from torch_armllm.ops.linear import interleave_panels, pack_int4
from torch_armllm.ops.moe import int4_moe
from torch_armllm.plan.expert_store import ExpertStore, StoredWeight, reserve, stored_bytes

SMALL = (2, 700)
LARGE = (3, 500_000)
"""Panels and their bytes: less than a page, and more than what is read at once."""


def written(file: Path, shapes: list[tuple[int, int, int]], seed: int = 0) -> list[Tensor]:
    """Writes random weights one after another, and returns them."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes]
    file.write_bytes(b"header" + b"".join(weight.numpy().tobytes() for weight in weights))
    return weights


def opened(file: Path, weights: list[Tensor], budget: int) -> tuple[ExpertStore, list[Tensor]]:
    stored, offset = [], len(b"header")
    for weight in weights:
        stored.append(StoredWeight(reserve(*weight.shape), file, offset))
        offset += weight.nbytes
    layers = list(zip(stored[::2], stored[1::2], strict=True))
    return ExpertStore(budget, layers), [weight.memory for weight in stored]


def expert_bytes(weights: list[Tensor], layer: int) -> int:
    return sum(stored_bytes(*weight.shape[1:]) for weight in weights[2 * layer : 2 * layer + 2])


def settled(store: ExpertStore, sizes: list[int]) -> list[int]:
    """Returns the resident experts when nothing is being read anymore."""
    resident: list[int] = []

    def has_read() -> bool:
        resident[:] = store.resident()
        return store.counts().resident == sum(sizes[expert] for expert in resident)

    until(has_read)
    return resident


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_store_holds_what_the_files_hold(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4), label="experts of layers")
    panels = [data.draw(st.sampled_from([SMALL, SMALL, LARGE]), label="panels") for _ in counts]
    shapes = [(count, *shape) for count, shape in zip(counts, panels, strict=True) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        weights = written(file := Path(folder) / "weights", shapes)
        sizes = [expert_bytes(weights, layer) for layer, count in enumerate(counts) for _ in range(count)]
        firsts = [sum(counts[:layer]) for layer in range(len(counts) + 1)]
        layers = [sum(sizes[a:b]) for a, b in zip(firsts, firsts[1:], strict=False)]
        budget = data.draw(st.integers(max(layers), sum(sizes) + 1), label="budget")
        store, memory = opened(file, weights, budget)
        hits = misses = 0
        resident: list[int] = []
        for _ in range(data.draw(st.integers(1, 12), label="calls")):
            layer = data.draw(st.integers(0, len(counts) - 1), label="layer")
            needed = data.draw(st.sets(st.integers(0, counts[layer] - 1), min_size=1), label="needed")
            store.require(layer, sorted(needed))
            found = {firsts[layer] + expert for expert in needed}
            hits += len(found & set(resident))
            misses += len(found - set(resident))
            assert found <= set(store.resident())
            resident = settled(store, sizes)
            assert found <= set(resident)
            for expert in resident:
                at = max(i for i in range(len(counts)) if firsts[i] <= expert)
                for part in (2 * at, 2 * at + 1):
                    place = expert - firsts[at]
                    assert torch.equal(memory[part][place], weights[part][place])
            seen = store.counts()
            assert (seen.hits, seen.misses) == (hits, misses)
            assert seen.resident <= seen.budget == budget


def test_least_recently_used_experts_are_evicted(tmp_path: Path) -> None:
    weights = written(tmp_path / "w", [(8, *SMALL)] * 4)
    store, _ = opened(tmp_path / "w", weights, 8 * expert_bytes(weights, 0))
    for expert in range(4):
        store.require(0, [expert])
        store.require(1, [expert])
    assert store.resident() == [0, 1, 2, 3, 8, 9, 10, 11]
    store.require(0, [0])
    store.require(1, [7])
    assert store.resident() == [0, 1, 2, 3, 9, 10, 11, 15]
    assert store.counts().hits == 1


def test_a_long_prompt_does_not_evict_what_tokens_need(tmp_path: Path) -> None:
    layers = 6
    weights = written(tmp_path / "w", [(8, *SMALL)] * 2 * layers)
    size = expert_bytes(weights, 0)
    store, _ = opened(tmp_path / "w", weights, (2 * 8 + 2 * layers) * size)
    for layer in range(layers):
        store.require(layer, [layer, 7 - layer])
    hot = store.resident()
    for layer in range(layers):
        store.require(layer, list(range(8)))
    assert set(hot) <= set(settled(store, [size] * 8 * layers))


def bytes_in_memory(tensor: Tensor) -> int:
    """Returns the bytes of a reserved tensor that are in memory, as the system counts them."""
    size = tensor.shape[0] * tensor.stride(0)
    pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(size), pages) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems free pages later")
def test_evicted_experts_take_no_memory(tmp_path: Path) -> None:
    weights = written(tmp_path / "w", [(16, *LARGE)] * 4)
    size = expert_bytes(weights, 0)
    store, memory = opened(tmp_path / "w", weights, 20 * size)
    assert sum(map(bytes_in_memory, memory)) == 0
    for layer, experts in ((0, range(16)), (1, range(16)), (0, range(5)), (1, range(3, 9)), (0, range(16))):
        store.require(layer, list(experts))
        resident = settled(store, [size] * 32)
        assert sum(map(bytes_in_memory, memory)) == len(resident) * size == store.counts().resident
        assert len(resident) <= 20


@pytest.mark.parametrize("damage", ["shorter", "empty"])
def test_a_file_that_became_shorter_is_reported(tmp_path: Path, damage: str) -> None:
    weights = written(tmp_path / "w", [(4, *LARGE)] * 2)
    store, memory = opened(tmp_path / "w", weights, 4 * expert_bytes(weights, 0))
    store.require(0, [0])
    whole = (tmp_path / "w").read_bytes()
    os.truncate(tmp_path / "w", len(whole) - 100 if damage == "shorter" else 0)
    with pytest.raises(RuntimeError, match="w is shorter than it was"):
        store.require(0, [0, 3])
    assert 3 not in store.resident() and 0 in store.resident()
    (tmp_path / "w").write_bytes(whole)
    store.require(0, [0, 3])
    assert torch.equal(memory[0][3], weights[0][3]) and torch.equal(memory[1][3], weights[1][3])
    assert store.counts().resident == 2 * expert_bytes(weights, 0)


def test_missing_files_and_small_budgets_are_refused(tmp_path: Path) -> None:
    weights = written(tmp_path / "w", [(4, *SMALL)] * 2)
    with pytest.raises(RuntimeError, match=r"missing cannot be opened: No such file"):
        opened(tmp_path / "missing", weights, 1 << 30)
    size = 4 * expert_bytes(weights, 0)
    with pytest.raises(RuntimeError, match=rf"experts take {size} bytes; the budget has {size - 1}"):
        opened(tmp_path / "w", weights, size - 1)
    store, _ = opened(tmp_path / "w", weights, size)
    with pytest.raises(RuntimeError, match="there is no layer 1"):
        store.require(1, [0])
    with pytest.raises(RuntimeError, match="there is no expert 4"):
        store.require(0, [4])


def test_op_reads_its_experts_and_identities_need_none(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def packed(rows: int, columns: int) -> Tensor:
        return pack_int4(
            torch.randint(-8, 8, (rows, columns), dtype=torch.int8),
            torch.randint(1, 17, (rows, columns // 32), dtype=torch.uint8),
            torch.rand(rows) * 0.01,
            "g32i",
        )

    gate_up = torch.stack([interleave_panels(packed(64, 64), packed(64, 64)) for _ in range(8)])
    down = torch.stack([packed(64, 64) for _ in range(8)])
    (tmp_path / "w").write_bytes(b"header" + gate_up.numpy().tobytes() + down.numpy().tobytes())
    store, memory = opened(tmp_path / "w", [gate_up, down], 8 * expert_bytes([gate_up, down], 0))
    for tokens, top_k, low, high in (
        (1, 2, 0, 12),
        (3, 1, 0, 12),
        (300, 1, 5, 6),
        (2, 2, 8, 12),
        (40, 4, 0, 12),
    ):
        ids = torch.randint(low, high, (tokens, top_k))
        x, weights = torch.randn(tokens, 64), torch.rand(tokens, top_k)
        results = [
            int4_moe(x, ids, weights, *experts, 64, identity_experts=4)
            for experts in ((gate_up, down), memory)
        ]
        assert torch.equal(*results)
        assert {int(i) for i in ids.flatten() if i < 8} <= set(store.resident())
    os.truncate(tmp_path / "w", 0)
    del store
    other, memory = opened(tmp_path / "w", [gate_up, down], 8 * expert_bytes([gate_up, down], 0))
    with pytest.raises(RuntimeError, match="is shorter"):
        int4_moe(x, ids, weights, *memory, 64, identity_experts=4)
    assert other.resident() == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs procfs")
def test_stores_leave_no_files_threads_or_memory(tmp_path: Path) -> None:
    weights = written(tmp_path / "w", [(4, *SMALL)] * 2)

    def held() -> tuple[int, int, int]:
        mappings = Path("/proc/self/maps").read_text().count("\n")
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mappings

    def used() -> None:
        store, _ = opened(tmp_path / "w", weights, 4 * expert_bytes(weights, 0))
        store.require(0, [1, 3])

    for _ in range(3):
        used()
    before = held()
    for _ in range(100):
        used()
    until(lambda: held()[1] <= before[1])  # a thread is listed for a moment after it has been joined
    after = held()
    assert after[0] == before[0]
    assert after[2] <= before[2] + 2
