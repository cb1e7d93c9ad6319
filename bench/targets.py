"""Target figures of the kernels, and how the measured records compare with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.records import Record


@dataclass(frozen=True)
class Target:
    """Target for one figure of the records that match."""

    what: str
    op: str
    shape: str
    """A regular expression."""
    dtype: str
    variant: str
    cpu: str
    figure: str
    """A name in records.FIGURES; ``ratio``: the measured rate over ``peer_value``."""
    least: float | None = None
    most: float | None = None
    reference: str = ""
    """Figure of the best other kernel by the same method."""
    peer: str = ""

    def values(self, records: Sequence[Record]) -> list[float]:
        """Return the figure of every record that matches."""
        values = []
        for r in records:
            same = r["op"] == self.op and r["dtype"] == self.dtype and re.search(self.shape, r["shape"])
            here = re.fullmatch(self.variant, r["variant"]) and re.search(self.cpu, r["cpu"])
            if not same or not here or (self.peer and r.get("peer") != self.peer):
                continue
            if self.figure == "ratio":
                reached = r.get("gops", r.get("gb_s"))
                if reached is not None and r.get("peer_value"):
                    values.append(reached / r["peer_value"])
            elif self.figure in r:
                values.append(r[self.figure])
        return values

    def row(self, records: Sequence[Record]) -> list[Any]:
        """Return the cells: subject, figure, target, value, met or not, and the best other kernel."""
        values = self.values(records)
        goal = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        if not values:
            return [self.what, self.figure, goal, "not measured", "", self.reference]
        value = min(values) if self.least is not None else max(values)
        met = value >= self.least if self.least is not None else value <= (self.most or 0)
        return [self.what, self.figure, goal, value, "yes" if met else "no", self.reference]


def _arm(what: str, op: str, shape: str, dtype: str, figure: str, goal: float, reference: str = "") -> Target:
    bound = {"least" if figure == MACS else "most": goal}
    variant, core = ("dotprod", "neoverse-n1") if "N1" in what else ("i8mm", "neoverse-v2")
    return Target(what, op, shape, dtype, variant, core, figure, reference=reference, **bound)


PER_MAC, MACS, CYCLES = "insn_per_mac", "mac_per_cycle", "cycles_per_elem"
GEMM, GEMV, DECODE, PROMPT = "^M=128 ", "^M=1 ", "^decode.*1024", "^128 queries"
LINEAR, PAGED = "int4_linear", "paged_attention"

MODELED_TARGETS = (
    _arm("GEMM g32i, V2", LINEAR, GEMM, "g32i", MACS, 104, "KleidiAI group-32 59"),
    _arm("GEMM g32i", LINEAR, GEMM, "g32i", PER_MAC, 0.057, "KleidiAI group-32 0.0906"),
    _arm("GEMM g32iz, V2", LINEAR, GEMM, "g32iz", MACS, 104, "KleidiAI group-32 59"),
    _arm("GEMM g32iz", LINEAR, GEMM, "g32iz", PER_MAC, 0.057, "KleidiAI group-32 0.0906"),
    _arm("GEMM g32 folded, V2", LINEAR, GEMM, "g32", MACS, 104, "KleidiAI group-32 59"),
    _arm("GEMM g32 folded", LINEAR, GEMM, "g32", PER_MAC, 0.057, "KleidiAI group-32 0.0906"),
    _arm("GEMV g32i, V2", LINEAR, GEMV, "g32i", MACS, 26, "KleidiAI group-32 25.4"),
    _arm("GEMV g32i", LINEAR, GEMV, "g32i", PER_MAC, 0.20, "KleidiAI group-32 0.233"),
    _arm("GEMV g32iz, V2", LINEAR, GEMV, "g32iz", MACS, 26, "KleidiAI group-32 25.4"),
    _arm("GEMV g32iz", LINEAR, GEMV, "g32iz", PER_MAC, 0.20, "KleidiAI group-32 0.233"),
    _arm("GEMM g32i, dotprod, N1", LINEAR, GEMM, "g32i", MACS, 29, "KleidiAI group-32 22"),
    _arm("GEMM g32iz, dotprod, N1", LINEAR, GEMM, "g32iz", MACS, 29, "KleidiAI group-32 22"),
    _arm("MoE g32i, 16 tokens", "int4_moe", "^16 tokens", "g32i", PER_MAC, 0.075, "vLLM 0.161"),
    _arm("MoE g32iz, 16 tokens", "int4_moe", "^16 tokens", "g32iz", PER_MAC, 0.075, "vLLM 0.161"),
    _arm("decode bf16, V2", PAGED, DECODE, "bf16", CYCLES, 0.10, "vLLM 0.10"),
    _arm("decode f16, V2", PAGED, DECODE, "f16", CYCLES, 0.15, "vLLM 0.45"),
    _arm("decode int8, V2", PAGED, DECODE, "int8", CYCLES, 0.085),
    _arm("prefill bf16, V2", PAGED, PROMPT, "bf16", MACS, 50, "vLLM 43"),
    _arm("rms_norm, V2", "rms_norm", "", "bf16", CYCLES, 0.5, "vLLM 0.76"),
    _arm("add_rms_norm, V2", "add_rms_norm", "", "bf16", CYCLES, 0.7, "vLLM 1.04"),
    _arm("rope, V2", "rope_", "8x128$", "bf16", CYCLES, 0.4, "vLLM 0.51"),
    _arm("silu · up, V2", "gated_act", "", "bf16", CYCLES, 1.0, "vLLM 2.5"),
    _arm("quantize, V2", "quantize", "", "bf16", CYCLES, 0.5, "vLLM 0.75"),
)


def _x86(what: str, op: str, shape: str, dtype: str, peer: str, least: float) -> Target:
    return Target(what, op, shape, dtype, "avx512.*", "", "ratio", least=least, reference=peer, peer=peer)


PLAIN, DENSE, SDPA = "plain read", "int4_linear M=512 N=K=2048", "SDPA bf16"

TIMED_TARGETS = (
    _x86("GEMM g32i, M = 512, over oneDNN INT8", "int4_linear", "^M=512 ", "g32i", "oneDNN u8s8", 1.0),
    _x86("GEMV g32i, M = 1, over read bandwidth", "int4_linear", GEMV, "g32i", PLAIN, 0.9),
    _x86("MoE, one token, over read bandwidth", "int4_moe", "^1 tokens.* 2 threads", "g32i", PLAIN, 0.85),
    _x86("MoE, 512 tokens, over dense GEMM", "int4_moe", "^512 tokens, spread", "g32i", DENSE, 0.7),
    _x86("decode at 8k, bf16, over read bandwidth", "paged_attention", "^decode", "bf16", PLAIN, 0.8),
    _x86("prompt of 2048, over SDPA, 32/8x128", "paged_attention", "^prompt.*32/8", "bf16", SDPA, 1.3),
    _x86("prompt of 2048, over SDPA, 9/3x64", "paged_attention", "^prompt.*9/3", "bf16", SDPA, 1.3),
)
