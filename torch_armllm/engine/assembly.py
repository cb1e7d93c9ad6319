"""How a request's state becomes its output."""

from __future__ import annotations

from collections.abc import Callable

from torch_armllm.engine.outputs import CompletionOutput, RequestOutput
from torch_armllm.engine.request import Answer, Request, Status
from torch_armllm.engine.sampling_params import RequestOutputKind


class Reported:
    """How much of an answer its outputs have held."""

    __slots__ = ("finished", "text", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.text = 0
        self.finished = False


class Assembler:
    """Makes outputs of the kind that a request asked for."""

    def __init__(self) -> None:
        self._reported: dict[Answer, Reported] = {}

    def forget(self, request: Request) -> None:
        """Lets go of what is kept for a request."""
        for answer in request.answers:
            self._reported.pop(answer, None)

    def output(self, request: Request, text_of: Callable[[Answer], str]) -> RequestOutput | None:
        """A request's output after a step, or None where its kind wants none yet.

        Args:
            request: what was worked on.
            text_of: gives an answer's text, as far as it may be shown.
        """
        kind, finished = request.params.output_kind, request.finished
        chooses = request.params.chooses
        if (chooses or kind is RequestOutputKind.FINAL_ONLY) and not finished:
            return None
        outputs = []
        for answer in _best(request) if chooses else request.answers:
            text = text_of(answer)
            first, shown = 0, 0
            if kind is RequestOutputKind.DELTA:
                begin = self._begin_delta(answer, len(text))
                if begin is None:
                    continue
                first, shown = begin
            outputs.append(_completion(answer, text, first, shown))
        if chooses:
            for index, output in enumerate(outputs):
                output.index = index
        return RequestOutput(
            *(request.request_id, request.prompt, request.prompt_token_ids, outputs, finished),
            *(request.prompt_logprobs, request.num_cached_tokens, request.metrics),
        )

    def _begin_delta(self, answer: Answer, length: int) -> tuple[int, int] | None:
        """How many tokens and characters were reported before; None where there are no more of them."""
        reported = self._reported.setdefault(answer, Reported())
        first, shown = reported.tokens, reported.text
        finished = answer.status is Status.FINISHED
        if first == answer.output_length and shown == length and reported.finished == finished:
            return None
        reported.tokens, reported.text, reported.finished = answer.output_length, length, finished
        return first, shown


def _best(request: Request) -> list[Answer]:
    """The answers that are given of those that were written, the best first, of equal ones the earlier."""
    return sorted(request.answers, key=lambda answer: -answer.cumulative_logprob)[: request.params.n]


def _completion(answer: Answer, text: str, first: int, shown: int) -> CompletionOutput:
    """What an answer holds from a token and a character on."""
    wants_logprobs = answer.params.logprobs is not None
    return CompletionOutput(
        answer.index,
        text[shown:],
        answer.token_ids[answer.prompt_length + first :],
        answer.cumulative_logprob if wants_logprobs else None,
        answer.logprobs[first:] if wants_logprobs else None,
        answer.finish_reason,
        answer.stop_reason,
    )
