"""Outputs that a second engine computes again, after the first has failed in the middle of a request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch_armllm.engine.outputs import CompletionOutput, RequestOutput


class DifferentOutputError(RuntimeError):
    """A second engine computes other tokens than those that were sent."""


@dataclass
class _Sent:
    tokens: list[int] = field(default_factory=list)
    characters: int = 0
    finished: bool = False


class RepeatedOutputs:
    """Takes from delta outputs what was sent before; whole outputs, which are sent once, stay as they are.

    Args:
        deltas: True if outputs are deltas.
    """

    def __init__(self, deltas: bool) -> None:
        self._deltas = deltas
        self._sent: dict[int, _Sent] = {}  # by the index of the completion
        self._came: dict[int, _Sent] = {}  # of the present engine

    @property
    def begun(self) -> bool:
        """True if something was sent."""
        return bool(self._sent)

    def again(self) -> None:
        """Begins the outputs of another engine."""
        self._came.clear()

    def rest(self, output: RequestOutput) -> RequestOutput | None:
        """Returns the part of an output that is to be sent; None if all of it was.

        Raises:
            DifferentOutputError: its tokens are not those that were sent.
        """
        if not self._deltas:
            return output
        parts = [part for each in output.outputs if (part := self._part(each)) is not None]
        return replace(output, outputs=parts) if parts or output.finished else None

    def _part(self, completion: CompletionOutput) -> CompletionOutput | None:
        sent = self._sent.setdefault(completion.index, _Sent())
        came = self._came.setdefault(completion.index, _Sent())
        known = sent.tokens[len(came.tokens) : len(came.tokens) + len(completion.token_ids)]
        shown = min(sent.characters - came.characters, len(completion.text))
        came.tokens += completion.token_ids
        came.characters += len(completion.text)
        if known != completion.token_ids[: len(known)]:
            raise DifferentOutputError("another engine continues the text in another way")
        part = replace(
            completion,
            text=completion.text[shown:],
            token_ids=completion.token_ids[len(known) :],
            logprobs=None if completion.logprobs is None else completion.logprobs[len(known) :],
        )
        if not (part.text or part.token_ids or (part.finished and not sent.finished)):
            return None
        sent.tokens += part.token_ids
        sent.characters += len(part.text)
        sent.finished = sent.finished or part.finished
        return part
