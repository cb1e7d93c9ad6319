"""The counter of `make bench-arm`: formats, loops, and a tiny real count if the tools are installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.arm.counting import Counts, Emulator, has_plugins, parse_blocks, parse_log, symbols
from bench.arm.disassembly import branch_target, disassemble, kind, neutral, tool
from bench.arm.limits import Work, cycles_per_element, instructions
from bench.arm.model import Mca, Model
from bench.records import record, table

SUBS, B_NE, NOP = 0xF1000400, 0x54FFFFE1, 0xD503201F  # subs x0, x0, #1; b.ne to it; nop

# Two overlapping blocks, as QEMU makes them where a loop is entered in the middle.
BLOCKS = """\
T 400000 1 d503201f f1000400 54ffffe1
T 400004 99 f1000400 54ffffe1
"""

LOG = """\
----------------
IN: _start
0x00400000:  d5032e1f      hint     #0x70
0x00400004:  d503201f      nop
0x00400008:  14000001      b        #0x40000c

Trace 0: 0x7f5c40000100 [0000000000000000/0000000000400000/00000111/00000000] _start
----------------
IN: loop
0x0040000c:  f1000400      subs     x0, x0, #1
0x00400010:  54ffffe1      b.ne     #0x40000c

Linking TBs 0x7f5c40000100 index 0 -> 0x7f5c40000200
Trace 0: 0x7f5c40000200 [0000000000000000/000000000040000c/00000111/00000000] loop
Trace 0: 0x7f5c40000200 [0000000000000000/000000000040000c/00000111/00000000] loop
IN: done
0x00400014:  d5032e3f      hint     #0x71
0x00400018:  d4000001      svc      #0x0

Trace 0: 0x7f5c40000300 [0000000000000000/0000000000400014/00000111/00000000] done
Trace 0: 0x7f5c40000200 [0000000000000000/000000000040000c/00000111/00000000] loop
"""

PROGRAM = """\
.global _start
_start: mov x1, #3
hint #112
again: mov x0, #1000
loop: subs x0, x0, #1
b.ne loop
subs x1, x1, #1
b.ne again
hint #113
mov x8, #93
svc #0
"""


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [name for name in programs if shutil.which(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def llvm(*names: str) -> pytest.MarkDecorator:
    return needs(*(f"{name}-19" for name in names))


def test_overlapping_blocks_are_summed() -> None:
    counts = parse_blocks(BLOCKS.splitlines())
    assert counts.executions == {0x400000: 1, 0x400004: 100, 0x400008: 100}
    assert counts.opcodes == {0x400000: NOP, 0x400004: SUBS, 0x400008: B_NE}
    assert counts.total == 201


def test_unknown_lines_raise() -> None:
    with pytest.raises(ValueError, match="not a line of tbcount"):
        parse_blocks(["X 400000 1 d503201f"])


def test_log_counts_between_the_marks() -> None:
    counts = parse_log(LOG.splitlines(keepends=True))
    assert counts.executions == {0x40000C: 2, 0x400010: 2, 0x400014: 1, 0x400018: 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("smmla\tv0.4s, v1.16b, v2.16b", "smmla"),
        ("sdot\tv0.4s, v1.16b, v2.4b[0]", "dot"),
        ("fmla\tv0.4s, v1.4s, v2.s[0]", "fma"),
        ("ldp\tq0, q1, [x0]", "load.vec"),
        ("ld1\t{ v0.16b }, [x0]", "load.vec"),
        ("ldr\tx0, [x1]", "load"),
        ("stp\tq0, q1, [x0]", "store"),
        ("sub\tx0, x0, #1", "integer"),
        ("b.ne\t#-4", "branch"),
        ("bfcvtn\tv0.4h, v1.4s", "convert"),
        ("bic\tv0.4h, #1", "vector"),
        ("add\tv0.4s, v1.4s, v2.4s", "vector"),
    ],
)
def test_instruction_kinds(text: str, expected: str) -> None:
    assert kind(text) == expected


def test_branch_targets() -> None:
    assert branch_target("b.ne\t#-4", 100) == 96
    assert branch_target("tbz\tw0, #3, #8", 100) == 108
    assert branch_target("bl\t#-4", 100) is None
    assert neutral("cbnz\tx0, #-64") == "cbnz\tx0, ."
    assert neutral("tbz\tw0, #3, #8") == "tbz\tw0, #3, ."
    assert neutral("bl\t#64") == neutral("ret") == neutral("b\t#-8") == "b ."
    assert neutral("blr\tx9") == "br\tx9"
    assert neutral("bfi\tx0, x1, #3, #5") == "bfi\tx0, x1, #3, #5"


def fake_tool(folder: Path, name: str, version: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\necho Debian LLVM version {version}\n")
    program.chmod(0o755)


@pytest.fixture
def only_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sets PATH to a single folder."""
    monkeypatch.setenv("PATH", str(tmp_path))
    tool.cache_clear()
    yield tmp_path
    tool.cache_clear()


def test_tools_without_models_of_all_cores_raise(only_these: Path) -> None:
    fake_tool(only_these, "llvm-mca", "14.0.6")
    with pytest.raises(RuntimeError, match="LLVM 17 or later .*llvm-mca is version 14.*setup.sh"):
        tool("llvm-mca")


def test_newer_tool_is_preferred_to_an_older_unversioned_tool(only_these: Path) -> None:
    fake_tool(only_these, "llvm-mca", "14.0.6")
    fake_tool(only_these, "llvm-mca-17", "17.0.6")
    assert tool("llvm-mca") == "llvm-mca-17"


def test_missing_tool_raises_with_the_remedy(only_these: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no llvm-mc of LLVM 17 or later; run bench/arm/setup.sh"):
        tool("llvm-mc")


@llvm("llvm-mc")
def test_disassembly_of_known_and_unknown_opcodes() -> None:
    texts = disassemble([SUBS, B_NE, 0xFFFFFFFF])
    assert texts[SUBS].split() == ["subs", "x0,", "x0,", "#1"]
    assert texts[B_NE].split() == ["b.ne", "#-4"]
    assert texts[0xFFFFFFFF] == ".inst 0xffffffff"


@llvm("llvm-mc", "llvm-mca")
def test_loop_cycles_equal_its_dependency_chain(tmp_path: Path) -> None:
    counts = Counts()
    counts.add(0x400000, 1, [NOP])
    counts.add(0x400004, 1000, [SUBS, B_NE])
    mca = Mca(tmp_path / "mca.json")
    cycles, shares = Model(counts, [(0x400000, "f")], mca).cycles(("neoverse-v2", "neoverse-n1"))
    assert cycles["neoverse-v2"] == pytest.approx(1000, rel=0.02)
    assert cycles["neoverse-n1"] == pytest.approx(1000, rel=0.02)
    assert sum(share.instructions for share in shares) == 2001
    mca.save()
    again, _ = Model(counts, [(0x400000, "f")], Mca(tmp_path / "mca.json")).cycles(("neoverse-v2",))
    assert again["neoverse-v2"] == cycles["neoverse-v2"]


def test_limit_holds_the_named_work_evenly_spread() -> None:
    body = instructions(Work(loaded=4, stored=2, multiply_adds=3))
    names = [text.split()[0] for text in body]
    assert [names.count(name) for name in ("ldp", "stp", "fmla")] == [16, 8, 96]
    assert names[: len(names) // 2].count("ldp") == 8


@pytest.mark.parametrize(
    ("work", "core", "cycles"),
    [
        (Work(0, 0, 4), "neoverse-v2", 4 / 4 / 4),  # four lanes in each of four pipes
        (Work(0, 0, 4), "neoverse-n1", 4 / 4 / 2),
        (Work(12, 0, 1), "neoverse-v2", 12 / 16 / 3),  # 16 bytes through each of three ports
        (Work(4, 4, 4), "neoverse-v2", (4 + 1) / 4 / 4),  # a store takes a slot of the vector pipes too
    ],
)
@llvm("llvm-mc", "llvm-mca")
def test_limit_is_that_of_the_busiest_ports(work: Work, core: str, cycles: float) -> None:
    assert cycles_per_element(work, core, Mca()) == pytest.approx(cycles, rel=0.02)


@pytest.mark.parametrize("by_plugin", [True, False], ids=["plugin", "log"])
@needs("qemu-aarch64", "aarch64-linux-gnu-gcc", "cc")
@llvm("llvm-mc", "llvm-mca")
def test_real_program_is_counted(tmp_path: Path, by_plugin: bool) -> None:
    source, program, plugin = tmp_path / "p.s", tmp_path / "p", tmp_path / "tbcount.so"
    source.write_text(PROGRAM)
    subprocess.run(["aarch64-linux-gnu-gcc", "-nostdlib", "-static", "-o", program, source], check=True)
    if by_plugin:
        if not has_plugins("qemu-aarch64"):
            pytest.skip("this QEMU has no plugins")
        code = Path(__file__).parents[2] / "bench/arm/tbcount.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-fvisibility=hidden", "-o", plugin, code], check=True)
    counts, worth = Emulator("qemu-aarch64", plugin if by_plugin else None).count(
        "neoverse-n1", [str(program)]
    )
    assert worth == {}
    assert counts.total == pytest.approx(3 * 2000, abs=20)
    cycles, _ = Model(counts, symbols(program), Mca()).cycles(("neoverse-v2",))
    assert cycles["neoverse-v2"] == pytest.approx(3000, rel=0.05)


def test_records_and_tables() -> None:
    made = record("op", "M=1", "bf16", "i8mm", "neoverse-v2", 32, insn_per_mac=0.2, mac_per_cycle=None)
    assert made == {
        "op": "op",
        "shape": "M=1",
        "dtype": "bf16",
        "group_size": 32,
        "variant": "i8mm",
        "cpu": "neoverse-v2",
        "insn_per_mac": 0.2,
    }
    with pytest.raises(AssertionError, match="no such figure"):
        record("op", "", "", "", "", speed=1.0)
    lines = table(["name", "rate"], [["a", 1.5], ["b", None]]).splitlines()
    assert lines == ["| name | rate |", "|------|-----:|", "| a    |  1.5 |", "| b    |      |"]
