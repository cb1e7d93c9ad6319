"""Memory budget of an engine's KV cache, and of the states of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from torch_armllm.kv_cache.drafter_memory import NO_DRAFTER, DrafterNeeds
from torch_armllm.kv_cache.dtypes import kv_cache_dtype_name
from torch_armllm.kv_cache.shapes import CompressedShape, Shape
from torch_armllm.kv_cache.state_budget import share_of_states
from torch_armllm.ops.attention import SCALED
from torch_armllm.system.dtypes import dtype_name
from torch_armllm.system.files import format_bytes
from torch_armllm.system.host import free_memory

DEFAULT_SHARE = 0.25
"""Largest default fraction of the free memory.

The weights are loaded by then, but other processes may need memory too.
"""


@dataclass(frozen=True)
class KvMemory:
    """Size of an engine's KV cache and swap space.

    Attributes:
        num_blocks: number of blocks in the cache.
        swap_blocks: number of blocks in swap space.
        block_size: positions per block.
        block_bytes: bytes of all layers' keys and values in one block.
        max_model_len: maximum sequence length, in tokens, that fits and is allowed.
        dtype: name of the dtype of the stored keys and values.
        state_slots: sequences whose states fit; 0 without recurrent layers.
        swap_state_slots: sequences whose states fit into swap space.
        state_bytes: bytes of a sequence's states.
        spare_state_slots: further slots, for checkpoints and for states before draft tokens.
        state_dtype: name of the dtype of the states that sum over all tokens; empty if there are none.
        drafter: what a drafter keeps of its sequences.
        drafter_tokens: number of positions of the drafter's cache.
        drafter_state_slots: slots for states of the drafter.
    """

    num_blocks: int
    swap_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int
    dtype: str
    state_slots: int = 0
    swap_state_slots: int = 0
    state_bytes: int = 0
    spare_state_slots: int = 0
    state_dtype: str = ""
    drafter: DrafterNeeds = NO_DRAFTER
    drafter_tokens: int = 0
    drafter_state_slots: int = 0

    @property
    def tokens(self) -> int:
        """Number of positions that fit into the cache."""
        return self.num_blocks * self.block_size

    @property
    def drafter_bytes(self) -> int:
        """Bytes of the drafter's cache, swap memory not included."""
        keys_and_values = self.drafter_tokens * self.drafter.bytes_per_token + self.drafter.spare_bytes
        return keys_and_values + self.drafter_state_slots * self.drafter.state_bytes

    def __str__(self) -> str:
        swap_bytes = self.swap_blocks * self.block_bytes + self.swap_state_slots * self.state_bytes
        if self.drafter.swapped:
            swap_bytes += self.swap_blocks * self.block_size * self.drafter.bytes_per_token
        swap = f", and {format_bytes(swap_bytes)} of swap" if swap_bytes else ""
        states = self._describe_states() if self.state_slots else ""
        if self.drafter_bytes:
            states += f"; the drafter's own cache {format_bytes(self.drafter_bytes)}"
        if not self.block_bytes:
            return f"no keys and values{swap}{states}"
        return (
            f"KV cache {format_bytes(self.num_blocks * self.block_bytes)} for {self.tokens} tokens "
            f"({self.dtype}, {self.block_bytes // self.block_size} bytes a token){swap}: "
            f"{self.tokens / self.max_model_len:.1f} texts of max_model_len = {self.max_model_len}{states}"
        )

    def _describe_states(self) -> str:
        slots = self.state_slots + self.spare_state_slots
        spare = f" and {self.spare_state_slots} checkpoints" if self.spare_state_slots else ""
        dtype = f", {self.state_dtype}" if self.state_dtype else ""
        return (
            f"; states {format_bytes(slots * self.state_bytes)} for {self.state_slots} sequences{spare} "
            f"({format_bytes(self.state_bytes)} each{dtype})"
        )


def size_kv_memory(
    shape: Shape,
    max_length: int,
    *,
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    memory: int | float | None = None,
    most: int | None = None,
    swap_space: int = 0,
    free: int | None = None,
    checkpoints: bool = False,
    draft_tokens: int = 0,
    drafter: DrafterNeeds = NO_DRAFTER,
) -> KvMemory:
    """Computes the number of blocks that the memory holds.

    Args:
        shape: shape of the cache, from which the bytes per position follow.
        max_length: maximum sequence length, in tokens, of the model.
        max_model_len: requested maximum sequence length; None: as many tokens as fit, up to ``max_length``.
        max_num_seqs: sequences that run together; unless ``memory`` is set, the cache is not larger than they
            can fill.
        memory: bytes, a fraction of the free memory (a float up to 1), or None: at most `DEFAULT_SHARE` of
            it.
        most: bytes that the cache may have at most if ``memory`` is None; None: no further limit.
        swap_space: bytes for the blocks of swapped-out sequences.
        free: bytes that the process may allocate; measured by default.
        checkpoints: gives memory to checkpoints of the states of recurrent layers.
        draft_tokens: most draft tokens of a sequence, before each of which a step saves the states.
        drafter: what a drafter keeps of its sequences, which is part of the memory.

    Raises:
        ValueError: a sequence of ``max_model_len`` tokens does not fit, more memory is requested than is
            free, or ``memory`` is neither a number of bytes nor a fraction.
    """
    free = free_memory() if free is None else free
    length = max_length if max_model_len is None else max_model_len
    block_bytes = shape.block_size * shape.bytes_per_token
    bytes_per_token = shape.bytes_per_token + drafter.bytes_per_token
    both_bytes = shape.block_size * bytes_per_token
    granted, origin = _granted(memory, free, most)
    if granted + swap_space > free:
        raise ValueError(
            f"kv_cache_memory = {format_bytes(granted)} and swap_space = {format_bytes(swap_space)} are more "
            f"than the {format_bytes(free)} that are free: ask for less, or for a share such as "
            "kv_cache_memory=0.5"
        )
    drafter_slots = drafter.slots(granted)
    if reserved := drafter.spare_bytes + drafter_slots * drafter.state_bytes:
        granted = max(0, granted - reserved)
        origin = f"{origin}, beside {format_bytes(reserved)} for drafts"
    state_bytes, stored = shape.states.bytes_per_sequence, shape.states.accumulated_dtype
    state_dtype = "" if stored is None else dtype_name(stored)
    blocks_per_sequence = -(-length // shape.block_size)
    drafter_tokens = 0
    if not block_bytes:  # the drafter's positions come first, as those of the model take no memory
        most = max_num_seqs * blocks_per_sequence * shape.block_size
        drafter_tokens = drafter.alone(granted, most) // shape.block_size * shape.block_size
        granted -= drafter_tokens * drafter.bytes_per_token
    states = share_of_states(
        state_bytes=state_bytes,
        granted=granted,
        origin=origin,
        max_num_seqs=max_num_seqs,
        needed=0 if max_model_len is None else blocks_per_sequence * both_bytes,
        checkpoints=checkpoints,
        draft_tokens=draft_tokens,
        alone=not block_bytes,
        may_narrow=stored == torch.float32,
    )
    sized = KvMemory(
        num_blocks=0,
        swap_blocks=0,
        block_size=shape.block_size,
        block_bytes=block_bytes,
        max_model_len=length,
        dtype=kv_cache_dtype_name(shape.dtype),
        state_slots=states.running,
        state_bytes=state_bytes,
        spare_state_slots=states.spare,
        state_dtype=state_dtype,
        drafter=drafter,
        drafter_tokens=drafter_tokens,
        drafter_state_slots=drafter_slots,
    )
    if not block_bytes:  # blocks only count positions
        swap_state_slots = min(max_num_seqs, swap_space // state_bytes)
        blocks, swap_blocks = (n * blocks_per_sequence for n in (states.running, swap_state_slots))
        return replace(sized, num_blocks=blocks, swap_blocks=swap_blocks, swap_state_slots=swap_state_slots)
    swap_state_slots = min(max_num_seqs, swap_space // 2 // state_bytes) if state_bytes else 0
    swap_space -= swap_state_slots * state_bytes
    granted -= states.slots * state_bytes
    blocks = granted // both_bytes
    if blocks < blocks_per_sequence:
        fitting = blocks * shape.block_size
        if max_model_len is not None or fitting == 0:
            raise ValueError(
                f"one sequence of max_model_len = {length} tokens needs "
                f"{format_bytes(blocks_per_sequence * both_bytes)} of keys and values "
                f"({bytes_per_token} bytes per token), but the KV cache has {format_bytes(granted)}, "
                f"{origin}: {_remedies(shape, fitting)}"
            )
        length = fitting
    if memory is None:
        blocks = min(blocks, max_num_seqs * blocks_per_sequence)
    swap_blocks = swap_space // (both_bytes if drafter.swapped else block_bytes)
    return replace(
        sized,
        num_blocks=blocks,
        swap_blocks=swap_blocks,
        max_model_len=length,
        swap_state_slots=swap_state_slots,
        drafter_tokens=blocks * shape.block_size,
    )


def _remedies(shape: Shape, fitting: int) -> str:
    remedies = ["raise kv_cache_memory"]
    if fitting:
        remedies.append(f"set max_model_len to {fitting} or less")
    if not isinstance(shape, CompressedShape) and shape.dtype not in SCALED:
        remedies.append('store them as int8 (kv_cache_dtype="int8")')
    return ", or ".join(remedies)


def _granted(memory: int | float | None, free: int, most: int | None) -> tuple[int, str]:
    """Returns the bytes for keys and values, and a phrase that explains them in error messages."""
    if memory is None and most is not None and most < DEFAULT_SHARE * free:
        return most, "an eighth of max_memory"
    if memory is None:
        return int(DEFAULT_SHARE * free), f"a quarter of the {format_bytes(free)} that are free"
    if isinstance(memory, float) and 0 < memory <= 1:
        return int(memory * free), f"{memory:.0%} of the {format_bytes(free)} that are free"
    if memory <= 1:
        raise ValueError(f"kv_cache_memory is bytes, or a share 0.0 … 1.0 of the free memory, not {memory}")
    return int(memory), "as kv_cache_memory says"
