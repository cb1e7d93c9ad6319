"""Messages between a replica and the process that has started it, beside each `NewRequest`."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_armllm.engine.errors import StepFailedError
from torch_armllm.engine.outputs import CompletionOutput, Logprobs, RequestMetrics, RequestOutput
from torch_armllm.engine.reports.stats import Gauges, Totals
from torch_armllm.llm.loading.engine_facts import EngineFacts


class Abort(NamedTuple):
    """Ends requests; their last outputs come in a `Stepped`."""

    request_ids: list[str]


class Call(NamedTuple):
    """Calls a method of the engine between two steps; a `Returned` of the same number answers."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class Loaded(NamedTuple):
    """The engine is there."""

    facts: EngineFacts


class Failed(NamedTuple):
    """The process ends for this reason."""

    reason: str


class Returned(NamedTuple):
    """The result of a call, or the text of its error."""

    number: int
    result: Any
    error: str | None


class Stats(NamedTuple):
    """Statistics of the engine."""

    gauges: Gauges
    totals: Totals


class Short(NamedTuple):
    """A request's output without its prompt, which the other side knows."""

    request_id: str
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int

    @classmethod
    def of(cls, output: RequestOutput) -> Short:
        """Returns an output without its prompt."""
        return cls(
            output.request_id,
            output.prompt_logprobs,
            output.outputs,
            output.finished,
            output.metrics,
            output.num_cached_tokens,
        )

    def whole(self, prompt: str | None, token_ids: list[int]) -> RequestOutput:
        """Returns the output with its prompt."""
        return RequestOutput(self.request_id, prompt, token_ids, *self[1:])


class Ended(NamedTuple):
    """A request that has ended without an output: it was refused, or its step has failed."""

    request_id: str
    refused: bool
    reason: str

    def error(self) -> Exception:
        """Returns the error of the request."""
        if self.refused:
            return ValueError(self.reason)
        return StepFailedError([self.request_id], RuntimeError(self.reason))


class Stepped(NamedTuple):
    """Outputs of a step, and requests that have ended without one."""

    outputs: list[Short]
    ended: list[Ended]
