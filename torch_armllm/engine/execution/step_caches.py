"""The KV cache and the recurrent states of a process, and their swap memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_armllm.engine.execution.executor_sizes import ExecutorSizes
from torch_armllm.kv_cache.block_copies import copy_blocks
from torch_armllm.kv_cache.shapes import Cache, Shape
from torch_armllm.system.huge_pages import release_pages


class StepCaches:
    """The memory that the steps of a process read and write.

    The system maps memory at the first write, so unused blocks cost nothing.

    Args:
        shape: of the cache and the states.
        sizes: of both, and of swap memory.

    Attributes:
        cache: keys and values, or latents.
        states: of recurrent layers; empty without.
        swap: blocks of swap memory; None: there are none.
        swapped_states: states of swap memory.
    """

    def __init__(self, shape: Shape, sizes: ExecutorSizes) -> None:
        self.cache: Cache = shape.tensors(sizes.num_blocks)
        self.swap: Cache | None = shape.tensors(sizes.swap_blocks) if sizes.swap_blocks else None
        self.states = shape.states.tensors(sizes.state_slots)
        self.swapped_states = shape.states.tensors(sizes.swap_state_slots)

    @property
    def tensors(self) -> list[Tensor]:
        """The memory of the KV cache and of recurrent states, without swap memory."""
        return [tensor for tensor in (*self.cache, *self.states) if tensor is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the KV cache and the states, swap memory not included."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def release(self) -> int:
        """Gives the memory back to the system until it is written; returns its bytes."""
        return release_pages(self.tensors)

    def copy_blocks(
        self,
        swaps_out: Sequence[tuple[int, int]],
        swaps_in: Sequence[tuple[int, int]],
        copies: Sequence[tuple[int, int]],
    ) -> None:
        """Copies the blocks of a step; see `torch_armllm.engine.scheduling.step.Step`."""
        copy_blocks(self.cache, self.swap, swaps_out, swaps_in, copies)
