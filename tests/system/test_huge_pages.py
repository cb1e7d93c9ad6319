"""Packed weights on huge pages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_armllm.system import huge_pages


def huge_bytes() -> int:
    """Bytes of this process on huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


def mapped_bytes(file: Path) -> int:
    """Bytes of this process in mappings of a file."""
    lines = [
        line.split()[0]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(file))
    ]
    return sum(int(last, 16) - int(first, 16) for first, last in (line.split("-") for line in lines))


@pytest.fixture
def page() -> int:
    """Bytes per huge page."""
    size = huge_pages.page_size()
    if size == 0:
        pytest.skip("this system gives no huge pages")
    if [int(part) for part in os.uname().release.split(".")[:2]] < [6, 1]:
        pytest.skip("this kernel cannot collapse pages")
    return size


def test_collapse_moves_pages_and_nothing_else(page: int) -> None:
    tensor = torch.randint(0, 256, (5 * page,), dtype=torch.uint8)
    before, address, held = tensor.clone(), tensor.data_ptr(), huge_bytes()
    assert huge_pages.collapse([tensor, tensor[page:]]) >= 4 * page
    assert tensor.data_ptr() == address and torch.equal(tensor, before)
    assert huge_bytes() >= held
    assert huge_bytes() >= 4 * page


def test_small_tensors_are_ignored() -> None:
    assert huge_pages.collapse([torch.zeros(4096, dtype=torch.uint8)]) == 0


def test_setting_disables_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(huge_pages.SETTING, "0")
    assert huge_pages.page_size() == 0
    assert huge_pages.collapse([torch.zeros(8 << 20, dtype=torch.uint8)]) == 0


@pytest.mark.parametrize("system", ["never", "nothing", "large"])
def test_systems_without_huge_pages(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if system != "nothing":
        (tmp_path / "enabled").write_text("always madvise [never]" if system == "never" else "[always] never")
        (tmp_path / "hpage_pmd_size").write_text(f"{(2 if system == 'never' else 512) << 20}\n")
    monkeypatch.setattr(huge_pages, "_SYSTEM", tmp_path)
    assert huge_pages.page_size() == 0


def test_packed_weights_of_a_model_are_collapsed(page: int) -> None:
    model = nn.Sequential(nn.Identity())
    model[0].register_buffer("weight_packed", torch.zeros(3 * page, dtype=torch.uint8))
    model[0].register_buffer("other", torch.zeros(3 * page, dtype=torch.uint8))
    assert 2 * page <= huge_pages.collapse_packed(model) <= 4 * page


def test_file_mappings_become_memory(page: int, tmp_path: Path) -> None:
    written = torch.randint(0, 256, (20 * page + 4096,), dtype=torch.uint8)
    file = tmp_path / "weights"
    file.write_bytes(written.numpy().tobytes())
    mapped = torch.from_file(str(file), shared=False, size=written.numel(), dtype=torch.uint8)
    address, held = mapped.data_ptr(), huge_bytes()
    assert huge_pages.collapse([mapped[4096:]]) >= 18 * page
    assert huge_bytes() >= held + 18 * page
    assert mapped.data_ptr() == address and torch.equal(mapped, written)
    assert mapped_bytes(file) < 3 * page
    file.write_bytes(bytes(written.numel()))
    assert torch.equal(mapped[2 * page : 18 * page], written[2 * page : 18 * page])
    mapped.zero_()
    assert not mapped.any()


def test_file_mappings_stay_when_memory_is_short(
    page: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(8 * page))
    mapped = torch.from_file(str(file), shared=False, size=8 * page, dtype=torch.uint8)
    monkeypatch.setattr(huge_pages, "free_memory", lambda: 8 * page)
    huge_pages.collapse([mapped])
    assert mapped_bytes(file) == 8 * page
