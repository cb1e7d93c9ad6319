"""Cases of ``make bench-arm``: every op and shape, and the variants and CPUs that run it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.arm.limits import Work


@dataclass(frozen=True)
class Machine:
    """A kernel variant, the emulated CPU that runs it, and the cores whose cycles are modeled."""

    variant: str
    cpu: str
    cores: tuple[str, ...]
    families: tuple[str, ...] = ("linear", "groups", "attention", "rows", "recurrent", "sparse")
    """Kernel families that this variant implements itself."""


V2, V1, N2, N1 = "neoverse-v2", "neoverse-v1", "neoverse-n2", "neoverse-n1"

# SVE code is counted at the vector length of the modeled core; no model covers SME2.
MACHINES = (
    Machine("i8mm", "i8mm", (V2, V1, N2)),
    Machine("dotprod", "neoverse-n1", (V2, N1), ("linear", "groups", "attention", "rows", "sparse")),
    Machine("neon", "cortex-a72", (N1,)),
    Machine("svei8mm", "sve256", (V1,), ("linear",)),
    Machine("svei8mm", "sve128", (V2, N2), ("linear",)),
    Machine("svei8mm", "sve512", (), ("linear",)),
    Machine("sve", "sve256", (V1,), ("linear",)),
    Machine("sve", "sve512", ("a64fx",), ("linear",)),
    Machine("sme2", "sme2", (), ("linear",)),
)


@dataclass(frozen=True)
class Case:
    """One call of the driver."""

    op: str
    shape: str
    dtype: str
    options: tuple[str, ...]
    group_size: int = 0
    family: str = "linear"
    work: Work | None = None
    """Work that an element cannot do without, where cycles are shown beside that limit."""

    @property
    def name(self) -> str:
        return " ".join((self.op, *self.options))


GROUPS = {
    "g32i": 32,
    "g32iz": 32,
    "g32": 32,
    "g64": 64,
    "g128": 128,
    "g128z": 128,
    "row": 0,
    "i8": 0,
    "int6": 32,
    "int5": 32,
    "int3": 32,
}


WIDE_GROUPS = ("g64", "g128", "g128z")


def _linears() -> Iterator[Case]:
    for scheme, group in GROUPS.items():
        family = "groups" if scheme in WIDE_GROUPS else "linear"
        for m in (1, 4, 8, 16, 128):
            shape = f"M={m} N=K=2048"
            if scheme == "i8":
                yield Case("int8_linear", shape, "i8", (f"m={m}",))
            else:
                options = (f"scheme={scheme}", f"m={m}")
                yield Case("int4_linear", shape, scheme, options, group, family)
    for m in (1, 16, 128):
        options = ("scheme=g32iz", f"m={m}", "rotated=1")
        yield Case("int4_linear", f"rotated, M={m} N=K=2048", "g32iz", options, 32)
    for scheme in ("g32i", "g32iz", "g32"):
        shape = "16 tokens, top-2 of 8, H=I=1024"
        yield Case("int4_moe", shape, scheme, (f"scheme={scheme}",), 32)


def _attention() -> Iterator[Case]:
    for cache in ("bf16", "f16", "f32", "int8"):
        name = f"cache={cache.replace('int8', 'i8')}"
        yield Case("paged_attention", "decode 32/8x128, context 1024", cache, (name,), family="attention")
        yield Case(
            "paged_attention",
            "128 queries 32/8x128, context 1024",
            cache,
            (name, "queries=128"),
            family="attention",
        )

    text = (
        "cache=bf16",
        "queries=128",
        "context=128",
        "q_heads=12",
        "kv_heads=12",
        "head_size=64",
        "ahead=1",
    )
    for shape, options in (("", ()), (", biases", ("reach=128",))):
        shape = f"text of 128 tokens, 12x64, both sides{shape}"
        yield Case("paged_attention", shape, "bf16", (*text, *options), family="attention")
    for heads in (16, 128):
        options = ("cache=bf16", f"q_heads={heads}")
        shape = f"{heads} heads, 512 + 64, context 1024"
        yield Case("mla_attention", f"decode {shape}", "bf16", options, family="attention")
    options = ("cache=i8", "q_heads=16")
    yield Case(
        "mla_attention", "decode 16 heads, 512 + 64, context 1024", "int8", options, family="attention"
    )
    options = ("cache=bf16", "q_heads=16", "queries=32")
    shape = "32 queries, 16 heads, 512 + 64, context 1024"
    yield Case("mla_attention", shape, "bf16", options, family="attention")


def _rows() -> Iterator[Case]:
    def case(op: str, shape: str, *options: str) -> Case:
        return Case(op, shape, "bf16", options, family="rows")

    for op in ("rms_norm", "add_rms_norm", "layer_norm", "gated_act", "quantize"):
        yield case(op, "16 x 4096")
    yield case("rope_", "16 x 32/8x128")
    yield case("rope_", "16 x 32/8x128 interleaved", "interleaved=1")
    yield case("moe_route", "16 x 128, top-8", "width=128")
    vocabulary = ("rows=1", "width=151936")
    yield case("sample", "1 x 151936, greedy", *vocabulary, "temperature=0")
    yield case("sample", "1 x 151936, top-50, top-p 0.9", *vocabulary, "top_k=50", "top_p=0.9")
    yield Case("search_steps", "16 x 4096, groups of 32, 12 steps", "f32", (), family="rows")
    for m in (1, 16):
        yield case("dense_linear", f"M={m} N=128 K=2048", f"m={m}", "n=128")
    for adapters in (1, 8):
        shape = f"8 x 2048 to 2048, rank 16, adapters: {adapters}"
        yield case("lora_linear", shape, f"adapters={adapters}")


def _recurrent() -> Iterator[Case]:
    def case(op: str, shape: str, tokens: int, work: Work) -> Case:
        options = (f"tokens={tokens}",)
        step = "decode" if tokens == 1 else f"prompt of {tokens},"
        return Case(op, f"{step} {shape}", "bf16", options, family="recurrent", work=work)

    taps = 4
    for tokens in (1, 32):
        # A row and an output of each token, and for all tokens together the weights and the state, which is
        # read and written.
        conv = Work(2 + (4 * taps + 2 * (taps - 1)) / tokens, 2 + 2 * (taps - 1) / tokens, taps)
        yield case("causal_conv", f"8192 channels, {taps} taps", tokens, conv)
        # The decay, two products and the update.
        yield case("gated_delta_rule", "16/32 heads, 128x128", tokens, Work(4, 4, 4))
        # The state and its rate; the exponent, the added value, the update and the output.  The exponential
        # function itself is on top.
        yield case("selective_scan", "8192 channels, 16 states", tokens, Work(8, 4, 4))


def _sparse() -> Iterator[Case]:
    def case(op: str, shape: str, *options: str, work: Work | None = None) -> Case:
        return Case(op, shape, "bf16", options, family="sparse", work=work)

    yield case("select_tokens", "decode 64 heads of 128, 2048 of 8192")
    yield case("select_blocks", "decode 4 heads of 128, 16 of 64 blocks")
    yield case("block_attention", "decode 64/4x128, 16 blocks of 128")
    for rate, parts in ((4, 2), (128, 1)):
        # Values and gates are read once, and the bias; the bias, the largest, the sum of weights and the
        # product.  The exponential function itself is on top.
        work = Work(2 + 2 + 4, 2 / (rate * parts), 4)
        options = (f"rate={rate}", f"parts={parts}", "queries=128")
        yield case("compress_windows", f"prompt of 128, 512 values, rate {rate}", *options, work=work)
    yield case("select_entries", "decode 64 heads of 128, 512 of 2048")
    for queries in (1, 32):
        tokens = "decode" if queries == 1 else f"{queries} queries"
        call = f"queries={queries}"
        shape = f"{tokens} 64 heads of 512, 128 tokens and"
        yield case("entry_attention", f"{shape} 512 selected", call, "selected=512")
        yield case("entry_attention", f"{shape} 64 entries", call, "rate=128")


def cases() -> list[Case]:
    """Return all cases."""
    return [*_linears(), *_attention(), *_rows(), *_recurrent(), *_sparse()]
