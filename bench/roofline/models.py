"""Language models as the bytes and multiplications of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

INT4_BITS = 4 + 6 / 32
"""Bits per weight of ``g32iz``, without the four bytes of a row's scale."""


@dataclass(frozen=True)
class Product:
    """``rows`` × ``columns`` weights that every token of a step is multiplied by.

    With ``keeps_heads`` the rows of a head are all that other parts compute for it.
    """

    rows: int
    columns: int
    int8: bool = False
    last_token_only: bool = False
    keeps_heads: bool = False

    @property
    def bytes(self) -> float:
        """Size of the packed weights."""
        return self.rows * (4 + self.columns * (8 if self.int8 else INT4_BITS) / 8)


@dataclass(frozen=True)
class Experts:
    """Experts of one layer: gate, up and down; each token uses ``top_k`` of them."""

    count: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def matrices(self) -> tuple[Product, ...]:
        """Matrices of one expert."""
        inner, outer = self.intermediate, self.hidden
        return Product(2 * inner, outer), Product(outer, inner)

    def touched(self, tokens: int) -> float:
        """Return the number of experts that a step reads under uniform routing."""
        return self.count * (1 - (1 - self.top_k / self.count) ** tokens)


@dataclass(frozen=True)
class Attention:
    """Attention of one layer, bfloat16.

    With ``latent``, heads share rows of ``key`` elements; the first ``value`` of them are the values.
    """

    heads: int
    kv_heads: int
    key: int
    value: int
    window: int | None = None
    latent: bool = False

    @property
    def bytes_a_token(self) -> int:
        """KV cache bytes per token."""
        return 2 * self.key if self.latent else 2 * self.kv_heads * (self.key + self.value)


@dataclass(frozen=True)
class Recurrence:
    """Gated delta rule of one layer: a float32 state of ``heads`` × ``key`` × ``value`` for each sequence."""

    heads: int
    key: int
    value: int

    @property
    def elements(self) -> int:
        """Elements of a sequence's state."""
        return self.heads * self.key * self.value

    @property
    def bytes_a_step(self) -> int:
        """Bytes that a step reads and writes for each sequence, whatever its tokens."""
        return 2 * 4 * self.elements


Part = Product | Experts | Attention | Recurrence


@dataclass(frozen=True)
class Model:
    """The parts of each kind of layer, with their number."""

    name: str
    layers: tuple[tuple[int, tuple[Part, ...]], ...]
    head: Product

    def parts(self) -> Iterator[tuple[int, Part]]:
        """Yield every part with its number of occurrences in a step."""
        for count, parts in self.layers:
            for part in parts:
                yield count, part
        yield 1, self.head

    @property
    def depth(self) -> int:
        """Number of layers."""
        return sum(count for count, _ in self.layers)

    def weight_bytes(self) -> float:
        """Return the bytes of packed weights without embeddings."""
        total = 0.0
        for count, part in self.parts():
            if isinstance(part, Product):
                total += count * part.bytes
            elif isinstance(part, Experts):
                total += count * part.count * sum(matrix.bytes for matrix in part.matrices)
        return total


def _gated(hidden: int, intermediate: int) -> tuple[Product, Product]:
    return Product(2 * intermediate, hidden), Product(hidden, intermediate)


def _grouped(
    hidden: int, heads: int, kv_heads: int, size: int, window: int | None = None
) -> tuple[Product | Attention, ...]:
    """Queries, keys and values in one product; attention; the output."""
    return (
        Product((heads + 2 * kv_heads) * size, hidden),
        Attention(heads, kv_heads, size, size, window),
        Product(hidden, heads * size),
    )


def _latent(
    hidden: int, heads: int, rank: int, rope: int, nope: int, value: int
) -> tuple[Product | Attention, ...]:
    """Return MLA's parts without low-rank queries; both up-projections are INT8, one matrix per head."""
    return (
        Product(heads * (nope + rope), hidden, keeps_heads=True),
        Product(rank + rope, hidden),
        Product(heads * rank, nope, int8=True, keeps_heads=True),
        Attention(heads, 1, rank + rope, rank, latent=True),
        Product(heads * value, rank, int8=True),
        Product(hidden, heads * value),
    )


def _head(vocabulary: int, hidden: int) -> Product:
    return Product(vocabulary, hidden, int8=True, last_token_only=True)


_GPT_OSS = Experts(32, 4, 2880, 2880)
_QWEN35_MLP = (Experts(256, 8, 2048, 512), *_gated(2048, 512))

MODELS = (
    Model("Llama-3.1-8B", ((32, (*_grouped(4096, 32, 8, 128), *_gated(4096, 14336))),), _head(128256, 4096)),
    Model(
        "Qwen3-30B-A3B",
        ((48, (*_grouped(2048, 32, 4, 128), Experts(128, 8, 2048, 768))),),
        _head(151936, 2048),
    ),
    Model(
        "gpt-oss-20b",
        (
            (12, (*_grouped(2880, 64, 8, 64, window=128), _GPT_OSS)),
            (12, (*_grouped(2880, 64, 8, 64), _GPT_OSS)),
        ),
        _head(201088, 2880),
    ),
    Model(
        "DeepSeek-V2-Lite",
        (
            (1, (*_latent(2048, 16, 512, 64, 128, 128), *_gated(2048, 10944))),
            (26, (*_latent(2048, 16, 512, 64, 128, 128), Experts(64, 6, 2048, 1408), *_gated(2048, 2816))),
        ),
        _head(102400, 2048),
    ),
    Model(
        "Qwen3.5-35B-A3B",
        (
            (30, (Product(12288, 2048), Recurrence(32, 128, 128), Product(2048, 4096), *_QWEN35_MLP)),
            # queries have a gate of the same size
            (10, (Product(9216, 2048), Attention(16, 2, 256, 256), Product(2048, 4096), *_QWEN35_MLP)),
        ),
        _head(248320, 2048),
    ),
    Model("Qwen2.5-1.5B", ((28, (*_grouped(1536, 12, 2, 128), *_gated(1536, 8960))),), _head(151936, 1536)),
)


def model_named(name: str) -> Model:
    """Return the model with a name.

    Raises:
        ValueError: no model has this name.
    """
    for model in MODELS:
        if model.name.lower().startswith(name.lower()):
            return model
    raise ValueError(f"no model {name!r}; there are {', '.join(model.name for model in MODELS)}")
