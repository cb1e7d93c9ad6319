"""Memory of a drafter's own cache, which is part of the memory of the model's."""

from __future__ import annotations

from dataclasses import dataclass

_LARGEST_SHARE = 4
"""A drafter's states, and its positions beside a model that has none, take up to 1 / 4 of the memory."""


@dataclass(frozen=True)
class DrafterNeeds:
    """Memory that a drafter needs for what it keeps of its sequences.

    Attributes:
        bytes_per_token: bytes of keys and values at a position; it has as many positions as the model.
        spare_bytes: bytes of keys and values that do not depend on the number of positions.
        state_bytes: bytes of a slot for the states of recurrent layers.
        state_slots: slots that are of use; there are fewer where memory is scarce.
        swapped: True if its keys and values are swapped out together with the model's.
    """

    bytes_per_token: int = 0
    spare_bytes: int = 0
    state_bytes: int = 0
    state_slots: int = 0
    swapped: bool = False

    def slots(self, memory: int) -> int:
        """Returns the slots for states that get a part of so many bytes."""
        return self.state_bytes and min(self.state_slots, memory // _LARGEST_SHARE // self.state_bytes)

    def alone(self, memory: int, most: int) -> int:
        """Returns the positions, up to ``most``, that get a part of so many bytes.

        Args:
            memory: bytes for a model without keys and values, and the drafter.
            most: positions of the model.
        """
        if not self.bytes_per_token:
            return most
        return min(most, memory // _LARGEST_SHARE // self.bytes_per_token)


NO_DRAFTER = DrafterNeeds()
