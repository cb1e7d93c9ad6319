"""How a request's state becomes its output."""

from __future__ import annotations

from collections.abc import Mapping

from torch_armllm.engine.outputs import CompletionOutput, RequestOutput
from torch_armllm.engine.request import Request, Sequence, Status
from torch_armllm.engine.sampling_params import RequestOutputKind
from torch_armllm.engine.text.stopping import OutputText

_DELTA, _FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class DeltaProgress:
    """How much of a sequence its outputs have held."""

    __slots__ = ("finished", "text", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.text = 0
        self.finished = False


class OutputBuilder:
    """Makes outputs of the kind that a request asked for."""

    def __init__(self) -> None:
        self._reported: dict[Sequence, DeltaProgress] = {}

    def forget(self, request: Request) -> None:
        """Lets go of what is kept for a request."""
        for sequence in request.sequences:
            self._reported.pop(sequence, None)

    def build(
        self, request: Request, finished: bool, texts: Mapping[Sequence, OutputText]
    ) -> RequestOutput | None:
        """A request's output after a step, or None where its kind wants none yet.

        Args:
            request: what was worked on.
            finished: whether it is.
            texts: of the sequences that have begun.
        """
        params = request.params
        kind, selects_best = params.output_kind, params.best_of is not None and params.selects_best
        if not finished and (kind is _FINAL_ONLY or selects_best):
            return None
        wants_logprobs = params.logprobs is not None
        outputs = []
        for sequence in _best(request) if selects_best else request.sequences:
            begun = texts.get(sequence)
            text = "" if begun is None else begun.text
            first, shown = 0, 0
            if kind is _DELTA:
                begin = self._advance_delta(sequence, len(text))
                if begin is None:
                    continue
                first, shown = begin
            outputs.append(
                CompletionOutput(
                    sequence.index,
                    text[shown:],
                    sequence.token_ids[sequence.prompt_length + first :],
                    sequence.cumulative_logprob if wants_logprobs else None,
                    sequence.logprobs[first:] if wants_logprobs else None,
                    sequence.finish_reason,
                    sequence.stop_reason,
                )
            )
        if selects_best:
            for index, output in enumerate(outputs):
                output.index = index
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            outputs,
            finished,
            request.prompt_logprobs,
            request.num_cached_tokens,
            request.metrics,
        )

    def _advance_delta(self, sequence: Sequence, length: int) -> tuple[int, int] | None:
        """How many tokens and characters were reported before; None where there are no more of them."""
        reported = self._reported.setdefault(sequence, DeltaProgress())
        first, shown = reported.tokens, reported.text
        finished = sequence.status is Status.FINISHED
        if first == sequence.output_length and shown == length and reported.finished == finished:
            return None
        reported.tokens, reported.text, reported.finished = sequence.output_length, length, finished
        return first, shown


def _best(request: Request) -> list[Sequence]:
    """The sequences that are given of those that were written, the best first, of equal ones the earlier."""
    return sorted(request.sequences, key=lambda sequence: -sequence.cumulative_logprob)[: request.params.n]
