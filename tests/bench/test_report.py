"""docs/performance/tables.md is written from records."""

from __future__ import annotations

import pytest

from bench.records import record
from bench.report import DOCUMENT, rendered
from bench.targets import MODELED_TARGETS, TIMED_TARGETS


def test_target_selects_matching_records() -> None:
    target = MODELED_TARGETS[0]
    records = [
        record("int4_linear", "M=128 N=K=2048", "g32i", "i8mm", "neoverse-v2", 32, mac_per_cycle=110.0),
        record("int4_linear", "M=128 N=K=2048", "g32i", "i8mm", "neoverse-n2", 32, mac_per_cycle=55.0),
        record("int4_linear", "M=16 N=K=2048", "g32i", "i8mm", "neoverse-v2", 32, mac_per_cycle=70.0),
    ]
    assert target.values(records) == [110.0]
    assert target.row(records)[2:5] == ["at least 104", 110.0, "yes"]
    assert target.row([])[3] == "not measured"


def test_ratio_uses_the_named_peer() -> None:
    target = TIMED_TARGETS[0]
    shape = ("int4_linear", "M=512 N=K=2048", "g32i", "avx512", "EPYC", 32)
    records = [
        record(*shape, gops=400.0, peer="oneDNN u8s8", peer_value=500.0),
        record(*shape, gops=400.0, peer="_int_mm", peer_value=100.0),
    ]
    assert target.values(records) == [0.8]
    assert target.row(records)[4] == "no"


def test_tables_with_records_are_replaced() -> None:
    text = "".join(
        f"<!-- table: {name} -->\nbefore\n<!-- end -->\n" for name in ("arm-targets", "silicon-limits")
    )
    made = rendered(text, [], None)
    assert "| GEMM g32i, V2 " in made
    assert made.count("before") == 1
    with pytest.raises(ValueError, match="no table is called 'other'"):
        rendered("<!-- table: other -->\n<!-- end -->", [], [])


def test_ops_with_a_limit_have_a_table_of_their_own() -> None:
    shape = ("1 token", "bf16", "i8mm", "neoverse-v2")
    delta = record("delta", *shape, insn_per_elem=2.0, cycles_per_elem=0.6, limit_per_elem=0.3)
    norm = record("norm", *shape, insn_per_elem=3.0, cycles_per_elem=0.5)
    text = "".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in ("arm-elements", "arm-states"))
    elements, states = rendered(text, [delta, norm], None).split("<!-- table: arm-states -->")
    assert "norm" in elements and "delta" not in elements
    assert "norm" not in states
    cells = [cell.strip() for cell in states.splitlines()[3].split("|")[1:-1]]
    assert cells == ["delta", "1 token", "bf16", "i8mm", "V2", "2", "0.6", "0.3", "2"]


def test_document_contains_only_known_tables() -> None:
    assert rendered(DOCUMENT.read_text(), None, None) == DOCUMENT.read_text()
    rendered(DOCUMENT.read_text(), [], [])
