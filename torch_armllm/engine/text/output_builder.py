"""Building of a request's outputs."""

from __future__ import annotations

from collections.abc import Mapping

from torch_armllm.engine.outputs import CompletionOutput, RequestOutput
from torch_armllm.engine.request import Request, Sequence, Status
from torch_armllm.engine.sampling_params import RequestOutputKind
from torch_armllm.engine.text.stopping import OutputText

_DELTA, _FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class DeltaProgress:
    """Amount of a sequence that earlier delta outputs have contained."""

    __slots__ = ("finished", "text", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.text = 0
        self.finished = False


class OutputBuilder:
    """Builds outputs of the kind that each request wants."""

    def __init__(self) -> None:
        self._reported: dict[Sequence, DeltaProgress] = {}

    def forget(self, request: Request) -> None:
        """Drops the state of a request."""
        for sequence in request.sequences:
            self._reported.pop(sequence, None)

    def build(
        self, request: Request, finished: bool, texts: Mapping[Sequence, OutputText]
    ) -> RequestOutput | None:
        """Returns a request's output after a step; None if its kind wants none yet.

        Args:
            request: the request.
            finished: True if the request has finished.
            texts: output texts of the sequences that have started.
        """
        params = request.params
        kind, selects_best = params.output_kind, params.best_of is not None and params.selects_best
        if not finished and (kind is _FINAL_ONLY or selects_best):
            return None
        wants_logprobs = params.logprobs is not None
        outputs = []
        for sequence in _best(request) if selects_best else request.sequences:
            begun = texts.get(sequence)
            first, shown = 0, 0
            if kind is _DELTA:
                begin = self._advance_delta(sequence, 0 if begun is None else begun.length)
                if begin is None:
                    continue
                first, shown = begin
            outputs.append(
                CompletionOutput(
                    sequence.index,
                    "" if begun is None else begun.since(shown),
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
            request.prompt_logprobs,
            outputs,
            finished,
            request.metrics,
            request.num_cached_tokens,
        )

    def _advance_delta(self, sequence: Sequence, length: int) -> tuple[int, int] | None:
        """Returns the token and character counts reported before; None if nothing is new."""
        reported = self._reported.setdefault(sequence, DeltaProgress())
        first, shown = reported.tokens, reported.text
        finished = sequence.status is Status.FINISHED
        if first == sequence.output_length and shown == length and reported.finished == finished:
            return None
        reported.tokens, reported.text, reported.finished = sequence.output_length, length, finished
        return first, shown


def _best(request: Request) -> list[Sequence]:
    """Returns the `n` best sequences, the best first; ties keep their order."""
    return sorted(request.sequences, key=lambda sequence: -sequence.cumulative_logprob)[: request.params.n]
