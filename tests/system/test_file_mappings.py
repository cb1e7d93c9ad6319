"""Replacement of mapped file pages by memory."""

from __future__ import annotations

from torch_armllm.system import file_mappings

PAGE = 0x1000
MAPS = """\
10000-14000 r--p 00000000 fe:00 77 /weights with a space
14000-18000 rw-p 00000000 00:00 0
20000-22800 rw-p 00002000 fe:00 77 /weights
30000-33000 rw-s 00002000 fe:00 77 /shared
40000-43000 ---p 00002000 fe:00 77 /guard
"""


def test_only_whole_pages_of_private_file_mappings_are_detachable() -> None:
    pages = range(0x0F000, 0x45000, PAGE)
    assert file_mappings.detachable(pages, PAGE, MAPS) == {*range(0x10000, 0x14000, PAGE), 0x20000, 0x21000}


def test_no_pages_are_detachable_without_mappings() -> None:
    assert file_mappings.detachable([], PAGE, MAPS) == set()
    assert file_mappings.detachable([0x10000], PAGE, "") == set()
