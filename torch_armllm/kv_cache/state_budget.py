"""Share of an engine's cache memory that the states of recurrent layers get."""

from __future__ import annotations

from typing import NamedTuple

from torch_armllm.system.files import format_bytes

_LEAST_CHECKPOINTS = 16


class StateShare(NamedTuple):
    """Slots of running sequences, and spare ones for checkpoints and for states before draft tokens."""

    running: int
    spare: int

    @property
    def slots(self) -> int:
        """Number of all slots."""
        return self.running + self.spare


def share_of_states(
    state_bytes: int,
    granted: int,
    origin: str,
    max_num_seqs: int,
    *,
    needed: int = 0,
    checkpoints: bool = False,
    draft_tokens: int = 0,
    alone: bool = False,
    may_narrow: bool = False,
) -> StateShare:
    """Returns the slots that get memory: at most half of it, unless that holds none.

    A quarter of them, or half with draft tokens, are spare, and more where there is memory.

    Args:
        state_bytes: bytes of a sequence's states; 0 without recurrent layers.
        granted: bytes of states, keys and values.
        origin: phrase that explains them.
        max_num_seqs: most sequences that run together.
        needed: bytes of keys and values that slots leave, if one sequence's states then fit.
        checkpoints: True if the prefix cache keeps states.
        draft_tokens: most draft tokens of a sequence.
        alone: True if there are neither keys nor values; states then get all of the memory.
        may_narrow: True if a narrower ``state_dtype`` would make states smaller.

    Raises:
        ValueError: the states of one sequence do not fit.
    """
    if not state_bytes:
        return StateShare(0, 0)
    if state_bytes > granted or (state_bytes == granted and not alone):
        narrower = ', or store them as bfloat16 (state_dtype="bfloat16")' if may_narrow else ""
        raise ValueError(
            f"the states of one sequence need {format_bytes(state_bytes)}, but the KV cache has "
            f"{format_bytes(granted)}, {origin}: raise kv_cache_memory{narrower}"
        )
    most = granted if alone else granted // 2
    total = max(1, min(most, granted - needed) // state_bytes)
    least = total // 2 if draft_tokens else max(1, total // 4) if checkpoints and total > 1 else 0
    running = min(max_num_seqs, total - least)
    wanted = draft_tokens * running
    if checkpoints:
        wanted = max(wanted, _LEAST_CHECKPOINTS, 4 * max_num_seqs)
    return StateShare(running, min(wanted, total - running))
