"""Slots for adapters in the quantized experts of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torch_armllm.hf.expert_layout import ExpertLayout
from torch_armllm.ops.lora import BLOCK, lora_blocks, lora_integers
from torch_armllm.ops.moe import ExpertAdapters
from torch_armllm.quant.modules.experts import QuantExperts

if TYPE_CHECKING:
    from torch_armllm.lora.adapter import Adapter

Pair = tuple[Tensor, Tensor]


class ExpertFactors(NamedTuple):
    """An adapter's float factors of all experts of a layer; None where it has none.

    Attributes:
        inner: A ``(E, r, H)`` and B ``(E, 2, r, I)``, gate before up; ``(E, 1, r, I)`` without a gate.
        outer: A ``(E, r, I)`` and B ``(E, 1, r, H)``.
    """

    inner: Pair | None
    outer: Pair | None

    @property
    def rank(self) -> int:
        """The higher of both ranks."""
        return max((pair[0].shape[1] for pair in self if pair is not None), default=0)


class ExpertSlots(nn.Module):
    """Factors of adapters of a layer's experts.  Their memory is used from when an adapter is written to it.

    Attributes:
        factors: what the op reads, and the slots of the rows of a step; see
            `torch_armllm.ops.moe.ExpertAdapters`.
    """

    kind: ClassVar[Literal["experts"]] = "experts"
    adapters: Tensor

    def __init__(
        self, experts: QuantExperts, slots: int, rank: int, dtype: torch.dtype, adapters: Tensor
    ) -> None:
        super().__init__()
        self.count = experts.num_experts
        self.hidden, self.inner = experts.hidden_dim, experts.intermediate_dim
        self.identities = experts.identity_experts
        gated = experts.gated
        self.layout = experts.layout or ExpertLayout(False, False, False, experts.activation, gated=gated)
        parts = 2 if gated else 1

        def rows(*shape: int) -> Tensor:
            numbers = shape[-1]
            if dtype == torch.int8:
                numbers = lora_integers(torch.zeros(numbers)).shape[0]
            return torch.empty(slots, self.count, *shape[:-1], numbers, dtype=dtype)

        buffers = {
            "inner_a": rows(rank, self.hidden),
            "inner_b": rows(parts, -(-self.inner // BLOCK), rank, BLOCK),
            "inner_ranks": torch.zeros(slots, dtype=torch.int32),
            "outer_a": rows(rank, self.inner),
            "outer_b": rows(1, -(-self.hidden // BLOCK), rank, BLOCK),
            "outer_ranks": torch.zeros(slots, dtype=torch.int32),
            "adapters": adapters,
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    @property
    def factors(self) -> ExpertAdapters:
        """See the class."""
        return ExpertAdapters(*(getattr(self, name) for name in ExpertAdapters._fields))

    @property
    def slots(self) -> int:
        """Number of adapters that fit."""
        return len(self.factors.inner_ranks)

    @property
    def a(self) -> Tensor:
        """A constant of a plan that reads these slots."""
        return self.factors.inner_a

    def forget_layer(self) -> None:
        """Does nothing: they do not know the experts' weights."""

    def stacked(self, module: str, pairs: Sequence[Pair], adapter: Adapter) -> ExpertFactors:
        """Returns the factors of an adapter of whole parameters.

        Args:
            module: name of the experts.
            pairs: for each parameter A ``(r · E, in)``, expert by expert, and B ``(out, r · E)``, rank by
                rank.
            adapter: has their ranks and scales.

        Raises:
            ValueError: they are of other sizes than this layer's parameters.
        """
        names = self.layout.weights
        sizes = [(self.hidden, self.inner * (2 if self.layout.gated else 1)), (self.inner, self.hidden)]
        counts = [self.count + self.identities, self.count]
        found: list[Pair | None] = [None, None]
        for a, b in pairs:
            which = [n for n in (0, 1) if (a.shape[1], b.shape[0]) == sizes[n] and found[n] is None]
            if len(which) != 1:
                known = (f"{i} and {o} ({name})" for (i, o), name in zip(sizes, names, strict=True))
                raise ValueError(
                    f"with {a.shape[1]} inputs and {b.shape[0]} outputs; this model's experts have "
                    f"{' or '.join(known)}: it is an adapter of another model"
                )
            (at,) = which
            name = f"{module}.{names[at]}"
            rank = adapter.rank_of(name)
            if a.shape[0] != rank * counts[at] or b.shape[1] != rank * counts[at]:
                raise ValueError(
                    f"with lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} at rank {rank}; this model "
                    f"has {counts[at]} experts, of which each has {rank} rows of lora_A"
                )
            one = a.float().view(counts[at], rank, -1)[: self.count]
            other = adapter.scaled(name, b).view(b.shape[0], rank, counts[at]).permute(2, 1, 0)[: self.count]
            found[at] = one, self._parts(other) if at == 0 else other[:, None]
        return ExpertFactors(*found)

    def _parts(self, b: Tensor) -> Tensor:
        """Splits ``(E, r, 2 · I)`` into gate and up: ``(E, 2, r, I)``; without a gate there is one part."""
        if not self.layout.gated:
            return b[:, None]
        if self.layout.interleaved:
            return torch.stack([b[..., 0::2], b[..., 1::2]], 1)
        return torch.stack(b.chunk(2, -1), 1)

    def single(self, pairs: Mapping[tuple[int, int], Pair]) -> ExpertFactors:
        """Returns the factors of an adapter of linear layers of single experts.

        Args:
            pairs: A ``(r, in)`` and B ``(r, out)``, transposed and scaled, by expert and product; see
                `torch_armllm.lora.adapter.expert_layer`.

        Raises:
            ValueError: they are of other sizes than this layer's.
        """
        sizes = [(self.hidden, self.inner)] * 2 + [(self.inner, self.hidden)]
        most = [0, 0, 0]
        for (expert, product), (a, b) in pairs.items():
            if expert >= self.count or (product == 0 and not self.layout.gated):
                raise ValueError(
                    f"of expert {expert}; this model has {self.count}: it is one of another model"
                )
            if (a.shape[1], b.shape[1]) != sizes[product]:
                raise ValueError(
                    f"with {a.shape[1]} inputs and {b.shape[1]} outputs; this model's experts have "
                    f"{sizes[product][0]} and {sizes[product][1]}: it is an adapter of another model"
                )
            most[product] = max(most[product], len(a))
        gate, up, down = most
        parts = 2 if self.layout.gated else 1
        inner = (
            torch.zeros(self.count, gate + up, self.hidden),
            torch.zeros(self.count, parts, gate + up, self.inner),
        )
        outer = torch.zeros(self.count, down, self.inner), torch.zeros(self.count, 1, down, self.hidden)
        for (expert, product), (a, b) in pairs.items():
            to, part = (outer, 0) if product == 2 else (inner, product * (parts - 1))
            rows = slice(gate, gate + len(a)) if product == 1 else slice(len(a))
            to[0][expert, rows], to[1][expert, part, rows] = a, b
        return ExpertFactors(inner if gate + up else None, outer if down else None)

    def prepare(self, inner: Pair | None, outer: Pair | None) -> tuple[Tensor, ...]:
        """Returns an adapter's factors as slots hold them: those of `factors`; None: of rank 0."""
        own = self.factors
        return (*_packed(inner, own.inner_a, own.inner_b), *_packed(outer, own.outer_a, own.outer_b))

    def write(self, slot: int, *factors: Tensor) -> None:
        """Writes an adapter's factors, as `prepare` returns them, to a slot."""
        own, (inner_a, inner_b, outer_a, outer_b) = self.factors, factors
        own.inner_ranks[slot], own.outer_ranks[slot] = inner_a.shape[1], outer_a.shape[1]
        own.inner_a[slot, :, : inner_a.shape[1]] = inner_a
        own.inner_b[slot, :, :, :, : inner_a.shape[1]] = inner_b
        own.outer_a[slot, :, : outer_a.shape[1]] = outer_a
        own.outer_b[slot, :, :, :, : outer_a.shape[1]] = outer_b

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        own = self.factors
        own.inner_ranks[slot] = own.outer_ranks[slot] = 0


def _packed(pair: Pair | None, a: Tensor, b: Tensor) -> Pair:
    """Returns factors in the type and the layout of all slots; of rank 0 for None."""
    if pair is None:
        return a[0, :, :0], b[0, :, :, :, :0]
    first, blocks = pair[0], lora_blocks(pair[1])
    if a.dtype == torch.int8:
        return lora_integers(first), lora_integers(blocks)
    return first.to(a.dtype), blocks.to(b.dtype)


def is_adaptable(module: Any) -> bool:
    """True for quantized experts whose tokens choose them; those of Llama 4 see all tokens."""
    return isinstance(module, QuantExperts) and not (module.layout and module.layout.batched)
