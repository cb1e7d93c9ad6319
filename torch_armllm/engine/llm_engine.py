"""The engine: requests come in, steps run, outputs come out."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as GenericSequence
from typing import Protocol

from torch import Tensor

from torch_armllm.engine.errors import StepFailedError
from torch_armllm.engine.execution.computed import StepResult
from torch_armllm.engine.output_builder import OutputBuilder
from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.preprocess import Preprocessor, Prompt
from torch_armllm.engine.request import Request, Sequence, Status
from torch_armllm.engine.sampling.sampler import SampledToken, Sampler
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.scheduling.scheduler import Scheduler
from torch_armllm.engine.speculative.drafting import SpeculativeDecoder
from torch_armllm.engine.stats import EngineStats, Gauges
from torch_armllm.engine.step import Step
from torch_armllm.engine.text.stopping import OutputText
from torch_armllm.engine.trace import NO_TRACE, Trace


class Runner(Protocol):
    """Computes the logits of steps."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model embeds."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache."""
        ...

    def compute(self, step: Step, best: bool = False) -> StepResult:
        """Logits of all wanted positions, in the order of ``step.scheduled``.

        Args:
            step: what to compute.
            best: whether the most probable tokens are of use.
        """
        ...


class LLMEngine:
    """Continuous batching over one model: what `LLM` and `AsyncLLM` run on.

    Not for several threads at once.

    Args:
        preprocessor: makes requests of prompts.
        scheduler: decides what a step computes.
        runner: computes it.
        sampler: draws tokens of logits.
        begin_text: makes a sequence's text, which tells when it has come to its end.
        speculative_decoder: drafts tokens; None: no speculative decoding.
        log_stats: whether a line of rates is logged while requests run.
        trace: takes notes of what a step spends its time on.

    Attributes:
        stats: what the steps did.
    """

    def __init__(
        self,
        preprocessor: Preprocessor,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        begin_text: Callable[[Sequence], OutputText],
        speculative_decoder: SpeculativeDecoder | None = None,
        log_stats: bool = False,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.preprocessor = preprocessor
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.speculative_decoder = speculative_decoder
        self._verify = speculative_decoder.verify if speculative_decoder is not None else sampler.verify_batch
        self.stats = EngineStats(self._gauges, log_stats)
        self._trace = trace
        self._begin_text = begin_text
        self._output_builder = OutputBuilder()
        self._requests: dict[str, Request] = {}
        self._texts: dict[Sequence, OutputText] = {}

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> None:
        """Submits a request.

        Args:
            request_id: its name, which no other running request has.
            prompt: a text or tokens; see `Prompt`.
            params: how its tokens are drawn; default: `SamplingParams()`.
            priority: lower ones are served first.

        Raises:
            ValueError: it can never be served, or its name is taken.
        """
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is running already; give every request its own name")
        request = self.preprocessor.build_request(request_id, prompt, params or SamplingParams(), priority)
        self.scheduler.add(request)
        self._requests[request_id] = request

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """Ends requests at once and frees what they hold; unknown names are ignored.

        Returns:
            What they had so far, with ``finish_reason`` ``abort`` for sequences that were not finished.
        """
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        aborted = [self._requests[name] for name in names if name in self._requests]
        for request in aborted:
            self._show_all(request)
            self.scheduler.abort(request.request_id)
        return self._outputs(aborted)

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Computes one step and returns the outputs of requests that it changed.

        Raises:
            StepFailedError: it could not be computed, which ended the requests that took part.
        """
        began = time.monotonic()
        self._trace.begin()
        step = self.scheduler.schedule()
        if not step.scheduled:
            return []
        if not step.decodes:
            self._note_start(step, began)
        self._trace.mark("schedule")
        try:
            return self._compute(step, began)
        except Exception as error:
            raise self._give_up(step, error) from error

    def _compute(self, step: Step, began: float) -> list[RequestOutput]:
        greedy_only = step.decodes and self.speculative_decoder is None and self.sampler.greedy_only
        logits, best = self.runner.compute(step, greedy_only)
        drawn = None if best is None else self._take(step, best)
        if drawn is None:
            tokens = self._draw(step, logits)
            self._trace.mark("sample")
            drawn = {sequence: self._append(sequence, found) for sequence, found in tokens.items()}
        self._trace.mark("detokenize")
        now = time.monotonic()
        self.stats.record(step, drawn, began, now)
        self.scheduler.complete(step, drawn)
        self.scheduler.note_time(step, now - began)
        changed = self._advance(drawn, now)
        if self.speculative_decoder is not None:
            self.speculative_decoder.propose([a for a in drawn if a.status is Status.RUNNING])
        outputs = self._outputs(changed)
        self._trace.mark("finish")
        if self._trace is not NO_TRACE:
            self._trace.end(sequences=len(step.scheduled), tokens=step.token_count, drawn=len(drawn))
        return outputs

    def _give_up(self, step: Step, error: Exception) -> StepFailedError:
        """Ends all whose keys and values the step was to compute or to move: nobody knows which it did."""
        sequences = [*(scheduled.sequence for scheduled in step.scheduled), *step.preempted]
        requests = {sequence.request.request_id: sequence.request for sequence in sequences}
        for name, request in requests.items():
            self.scheduler.abort(name)
            if name in self._requests:
                self._forget(request)
        return StepFailedError(requests, error)

    def _gauges(self) -> Gauges:
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        waiting = scheduler.waiting + scheduler.swapped
        return Gauges(scheduler.running, waiting, blocks.usage, blocks.hit_rate)

    def _note_start(self, step: Step, now: float) -> None:
        for scheduled in step.scheduled:
            metrics = scheduled.sequence.request.metrics
            if metrics.scheduled_time is None:
                metrics.scheduled_time = now

    def _take(self, step: Step, best: array[int]) -> dict[Sequence, list[int]] | None:
        """The best tokens of a step that `Step.decodes`; None where they have to be drawn by their logits."""
        sequences = [sequence for sequence, _, _ in step.scheduled]
        tokens = self.sampler.take_greedy(best, sequences)
        self._trace.mark("sample")
        if tokens is None:
            return None
        drawn = {}
        for sequence, token_id in zip(sequences, tokens, strict=True):
            self._lengthen(sequence, token_id)
            drawn[sequence] = [token_id]
        return drawn

    def _draw(self, step: Step, logits: Tensor) -> dict[Sequence, list[SampledToken]]:
        """Tokens of every sequence that the step brings forward: one, and as many as were guessed rightly."""
        sequences: list[Sequence] = []
        counts: list[int] = []
        rows: list[int] = []
        end = 0
        for scheduled in step.scheduled:
            sequence, start, count = scheduled
            if count == 1 and sequence.prompt_length <= start == len(sequence.token_ids) - 1:  # most are so
                sequences.append(sequence)
                counts.append(0)
                rows.append(end)
                end += 1
                continue
            first = end
            end += len(scheduled.wanted)
            if sequence.params.prompt_logprobs is not None and start < sequence.prompt_length:
                self._note_prompt(sequence, start, logits[first:end])
            if scheduled.draws:
                for each in (sequence, *self._siblings(sequence)):
                    sequences.append(each)
                    counts.append(scheduled.draft_count)
                    rows += range(end - 1 - scheduled.draft_count, end)
        chosen = logits if rows == list(range(end)) else logits[rows]
        return dict(zip(sequences, self._verify(chosen, sequences, counts), strict=True))

    def _siblings(self, sequence: Sequence) -> list[Sequence]:
        """A request's further sequences, made when its prompt is read: they draw from the same logits."""
        request = sequence.request
        return self.scheduler.fork(sequence) if len(request.sequences) < request.params.num_sequences else []

    def _note_prompt(self, sequence: Sequence, start: int, logits: Tensor) -> None:
        """Keeps log-probabilities of the prompt's tokens that follow positions from ``start`` on."""
        request, prompt = sequence.request, sequence.request.prompt_token_ids
        found = request.prompt_logprobs = request.prompt_logprobs or [None]
        new = range(len(found), min(start + len(logits) + 1, len(prompt)))
        if new:
            rows = logits[new.start - 1 - start : new.stop - 1 - start]
            count = sequence.params.prompt_logprobs
            assert count is not None
            found += self.sampler.prompt_logprobs(rows, prompt[new.start : new.stop], count)

    def _append(self, sequence: Sequence, drawn: GenericSequence[SampledToken]) -> list[int]:
        """Lengthens a sequence's text up to its end and returns the tokens that belong to it."""
        kept = []
        for one in drawn:
            kept.append(one.token_id)
            if one.logprobs is not None:
                sequence.logprobs.append(one.logprobs)
                sequence.cumulative_logprob += one.logprobs[one.token_id].logprob
            if self._lengthen(sequence, one.token_id):
                break
        return kept

    def _lengthen(self, sequence: Sequence, token_id: int) -> bool:
        """Lengthens a sequence's text by a token; says whether that is its end."""
        text = self._texts.get(sequence) or self._texts.setdefault(sequence, self._begin_text(sequence))
        finish = text.append(token_id)
        if finish is None:
            return False
        sequence.finish_reason, sequence.stop_reason = finish
        return True

    def _advance(self, drawn: Iterable[Sequence], now: float) -> list[Request]:
        """Finishes what came to its end; returns the requests that have something new."""
        changed: dict[Request, None] = {}
        for sequence in drawn:
            changed[sequence.request] = None
            if sequence.finish_reason is not None:
                self.scheduler.finish(sequence, sequence.finish_reason)
        for request in changed:
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
        return list(changed)

    def _outputs(self, requests: Iterable[Request]) -> list[RequestOutput]:
        outputs = []
        for request in requests:
            finished = request.finished
            if finished:
                request.metrics.finished_time = time.monotonic()
            output = self._output_builder.build(request, finished, self._texts)
            if output is not None:
                outputs.append(output)
            if finished:
                self._forget(request)
        return outputs

    def _show_all(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.finish_reason is None and sequence in self._texts:
                self._texts[sequence].flush()

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._output_builder.forget(request)
        for sequence in request.sequences:
            self._texts.pop(sequence, None)
