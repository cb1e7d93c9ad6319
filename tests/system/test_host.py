from __future__ import annotations

from pathlib import Path

from torch_armllm.system.host import node_memory


def test_memory_of_nodes_is_their_total(tmp_path: Path) -> None:
    for number, text in enumerate(("Node 0 MemTotal: 64 kB\nNode 0 MemFree: 3 kB\n", "")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "meminfo").write_text(text)
    assert node_memory(tmp_path) == {"node0": 65536}
