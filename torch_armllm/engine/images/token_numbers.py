"""Numbers of each token of a step that plans of pictures read beside its id."""

from __future__ import annotations

from array import array
from typing import Any, Protocol

from torch_armllm.engine.scheduling.step import Step


class TokenNumbers(Protocol):
    """Numbers of each token, a further input of the plan.

    Attributes:
        columns: numbers of a token.
    """

    columns: int

    def write(self, items: Any, step: Step) -> None:
        """Writes those of all tokens of a step to the beginning of an array of int64."""
        ...


class RotaryPositions:
    """Positions of M-RoPE: a time, a row and a column, which are equal for tokens of texts."""

    columns = 3

    def write(self, items: Any, step: Step) -> None:
        """See `TokenNumbers.write`."""
        at = 0
        for sequence, start, count in step.scheduled:
            pictures = sequence.request.pictures
            end, after = start + count, 0
            values = array("q")
            if pictures is not None and pictures.rotary is not None:
                values = pictures.rotary[3 * start : 3 * end]
                after = pictures.rotary_offset
            for position in range(start + len(values) // 3 + after, end + after):
                values.extend((position, position, position))
            items[3 * at : 3 * (at + count)] = values
            at += count


class LaterTokens:
    """Number of later tokens that each token attends to: those of its picture, or of its prompt.

    Args:
        only_windows: True if layers without a window do not.
        prompts: True if all tokens of a prompt with pictures attend to each other.
    """

    columns = 1

    def __init__(self, only_windows: bool = False, prompts: bool = False) -> None:
        self.only_windows = only_windows
        self.prompts = prompts

    def write(self, items: Any, step: Step) -> None:
        """See `TokenNumbers.write`."""
        at = 0
        for sequence, start, count in step.scheduled:
            items[at : at + count] = array("q", bytes(8 * count))
            pictures = sequence.request.pictures
            if pictures is not None and start < sequence.prompt_length:
                for first, last in pictures.spans:
                    for position in range(max(first, start), min(last, start + count)):
                        items[at + position - start] = last - 1 - position
            at += count
