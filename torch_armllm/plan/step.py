"""Inputs of a step, its result, and the protocol of a plan that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_armllm.kv_cache.block_pool import BlockPool
from torch_armllm.kv_cache.encoder_keys import EncoderKeys
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks
from torch_armllm.kv_cache.shapes import Cache

if TYPE_CHECKING:
    from array import array

NO_SAVES = torch.empty(0, dtype=torch.int64)
"""`StepInputs.save_slots` of steps that save no states."""


@dataclass
class StepInputs:
    """The new tokens of B sequences, packed one sequence after another; T tokens in all."""

    input_ids: Tensor
    """int64 ``(1, T)``"""
    position_ids: Tensor
    """int64 ``(1, T)``, for rotary embeddings"""
    slots: Tensor
    """int64 ``(T,)``: block · block_size + offset of each token's key and value; negative: not stored"""
    block_table: Tensor
    """int32 ``(B, n)``, contiguous"""
    query_start: Tensor
    """int32 ``(B + 1,)``: first packed token of each sequence"""
    seq_lens: Tensor
    """int32 ``(B,)``: positions of each sequence, this step's tokens included"""
    max_seq_len: int
    cache: Cache
    """keys and values, or latents, of all layers, as `Shape.tensors` allocates them"""
    states: list[Tensor] = field(default_factory=list)
    """states of recurrent layers, as `StateShape.tensors` allocates them"""
    state_slots: Tensor | None = None
    """int64 ``(B,)``: slot of each sequence's states; None without recurrent layers"""
    save_slots: Tensor = field(default_factory=lambda: NO_SAVES)
    """int64 ``(T,)``: slot to which the states after a token are also written, -1 for none; may be empty"""
    given: Tensor | None = None
    """``(T, columns)``: hidden states of another model, an input of draft layers; int64 ``(T,)``: token
    types, of encoders; rows of the stage before, of stages of a pipeline; None for other models"""
    numbers: Tensor | None = None
    """int64 ``(T, n)``: numbers of each token of models that take pictures; None for others"""
    rows: Tensor | None = None
    """``(T, columns)``: of each token of models that take pictures, see `with_given_rows`; None for others"""
    angles: tuple[Tensor, ...] = ()
    """cosines and sines, float32 ``(T, half)``, of encoders of pictures, see `with_given_angles`"""
    encoder: tuple[Tensor, ...] = ()
    """inputs of attention to an encoder's tokens, as `EncoderKeys.step` returns them; none for most models"""

    @classmethod
    def pack(
        cls,
        pool: BlockPool,
        sequences: Sequence[SequenceBlocks],
        counts: Sequence[int],
        input_ids: Tensor,
        position_ids: Tensor,
    ) -> StepInputs:
        """Appends new tokens to sequences and returns the step that computes them.

        The engine's `StepBuilder` writes the same tensors into buffers that it reuses.

        Args:
            pool: owns the blocks of all sequences.
            sequences: each grows by its count.
            counts: new tokens of each sequence.
            input_ids: int64 ``(1, T)``, in the order of ``sequences``.
            position_ids: int64 ``(1, T)``.
        """
        slots: list[int] = []
        starts = [0]
        for sequence, count in zip(sequences, counts, strict=True):
            slots += sequence.append(count)
            starts.append(len(slots))
        width = max((len(sequence.blocks) for sequence in sequences), default=0)
        table = [sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence in sequences]
        lengths = [sequence.length for sequence in sequences]
        states = [sequence.state for sequence in sequences if sequence.state is not None]
        return cls(
            input_ids=input_ids.contiguous(),
            position_ids=position_ids.contiguous(),
            slots=torch.tensor(slots, dtype=torch.int64),
            block_table=torch.tensor(table, dtype=torch.int32),
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            max_seq_len=max(lengths, default=0),
            cache=pool.cache,  # read last: `append` may have moved it to larger tensors
            states=pool.states.tensors,
            state_slots=torch.tensor(states, dtype=torch.int64) if pool.states.tensors else None,
        )

    def attend_to(self, encoder: EncoderKeys, counts: Sequence[int]) -> None:
        """Lets the tokens of a decoder attend to an encoder's; see `EncoderKeys.step`."""
        self.encoder = encoder.step(counts)
        self.max_seq_len = max(self.max_seq_len, encoder.longest)

    @property
    def caches(self) -> list[Tensor]:
        """Tensors of the cache, then slots of states, slots of saved states, and states, if there are any.

        Those of an encoder's tokens follow.
        """
        states = () if self.state_slots is None else (self.state_slots, self.save_slots, *self.states)
        return [t for t in (*self.cache, *states, *self.encoder) if t is not None]

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return self.input_ids.shape[1]


class StepResult(NamedTuple):
    """Logits of a step, with the most probable tokens if they were computed."""

    logits: Tensor
    """``(R, vocab_size)``, in the model's dtype; of a tensor parallel rank its own where ``best`` is known"""
    best: array[int] | None = None
    """R most probable tokens, as by `torch_armllm.ops.sample.best_tokens`; None: not computed"""
    hidden: Tensor | None = None
    """``(T, columns)``: what a drafter reads of every token; None if no drafter does"""


class Plan(Protocol):
    """Computes the hidden states of a model's steps."""

    def run(self, inputs: StepInputs) -> Tensor:
        """Returns the last hidden state of every token, ``(T, hidden)``."""
        ...
