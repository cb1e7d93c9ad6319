"""The engine: accepts requests, computes steps and returns outputs."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as GenericSequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from torch_armllm.engine.disk.arrivals import Arrivals
from torch_armllm.engine.disk.session_files import SessionFiles
from torch_armllm.engine.engine_protocol import TextEngine
from torch_armllm.engine.errors import OnFailure, RankFailedError, StepFailedError
from torch_armllm.engine.execution.message import Message
from torch_armllm.engine.outputs import FailedOutput, RequestOutput
from torch_armllm.engine.reports.stats import EngineStats, Gauges
from torch_armllm.engine.reports.trace import NO_TRACE, Trace
from torch_armllm.engine.request import Request, Sequence, Status
from torch_armllm.engine.sampling.sampler import SampledToken, Sampler
from torch_armllm.engine.scheduling.scheduler import Scheduler
from torch_armllm.engine.scheduling.step import Step
from torch_armllm.engine.speculative.drafting import SpeculativeDecoder
from torch_armllm.engine.text.output_builder import OutputBuilder
from torch_armllm.engine.text.preprocess import NewRequest, Preprocessor
from torch_armllm.engine.text.stopping import Finish, OutputText
from torch_armllm.kv_cache.disk.disk_cache import DiskPrefixCache
from torch_armllm.lora.adapter_table import AdapterTable, PreparedAdapter
from torch_armllm.lora.request import LoRARequest
from torch_armllm.plan.expert_store import ExpertCounts
from torch_armllm.plan.step import Plan, StepResult
from torch_armllm.system.panics import PANICS_AS_ERRORS, PanicError


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

    @property
    def stages(self) -> int:
        """Most steps that are under way at the same time: the stages of a pipeline, or one."""
        ...

    def release_cache(self) -> int:
        """Gives the memory of the KV cache back to the system until it is written; returns its bytes."""
        ...

    @property
    def plan(self) -> Plan | None:
        """Computes the layers; None: the model's own modules do."""
        ...

    def tell(self, messages: Iterable[Message]) -> None:
        """Sends messages to all other processes, if there are any, between two steps."""
        ...

    def rows_are_exact(self) -> bool:
        """True if a token's logits are known to have the same bits whatever else a step computes."""
        ...

    def on_failure(self, method: OnFailure) -> None:
        """Calls a method, which is kept weakly, once another process has failed, if there are any."""
        ...

    def begin(self, step: Step, best: bool) -> None:
        """Begins a step, which may compute all of it.

        Args:
            step: to compute.
            best: asks for the most probable tokens too; they are returned if they cost little.
        """
        ...

    def finish(self) -> StepResult:
        """Waits for the oldest step under way, and returns its result.

        Its logits are those of all `Scheduled.logit_positions`, in the order of ``step.scheduled``.
        """
        ...


@dataclass(frozen=True)
class EngineFeatures:
    """Parts of an engine that not every one has.

    Attributes:
        speculative_decoder: drafts tokens; None: no speculative decoding.
        log_stats: logs throughput while requests run.
        trace: records the phases of steps.
        experts: returns the counts of a cache of experts; None: all weights are in memory.
        disk: the prefix cache on disk; None: there is none.
        adapters: the adapters that requests may use; None: they may use none.
    """

    speculative_decoder: SpeculativeDecoder | None = None
    log_stats: bool = False
    trace: Trace = NO_TRACE
    experts: Callable[[], ExpertCounts] | None = None
    disk: DiskPrefixCache | None = None
    adapters: AdapterTable | None = None


class LLMEngine(TextEngine):
    """Continuous batching over one model: the engine of `LLM` and `AsyncLLM`.

    Not thread-safe; see `torch_armllm.engine.engine_thread.EngineThread`.

    Args:
        preprocessor: turns prompts into requests.
        scheduler: chooses the tokens of each step.
        runner: computes logits.
        sampler: samples tokens from logits.
        begin_text: creates the output text of a sequence of a request, which also checks for its end.
        features: that not every engine has.

    Attributes:
        stats: counts of the work done.
        disk: the prefix cache on disk; None: there is none.
    """

    def __init__(
        self,
        preprocessor: Preprocessor,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        begin_text: Callable[[Request], OutputText],
        features: EngineFeatures,
    ) -> None:
        speculative_decoder, disk = features.speculative_decoder, features.disk
        self.preprocessor = preprocessor
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.speculative_decoder = speculative_decoder
        self._verify = speculative_decoder.verify if speculative_decoder is not None else sampler.verify_batch
        self.disk = disk
        self._adapters = features.adapters
        self._stages = runner.stages
        self._under_way: deque[tuple[Step, float]] = deque()
        self._ended = 0.0  # when the last step ended
        self._arrivals = None if disk is None else Arrivals(disk, scheduler)
        counts = None if disk is None else disk.counts
        self.stats = EngineStats(self._gauges, features.log_stats, experts=features.experts, disk=counts)
        self._trace = features.trace
        self._begin_text = begin_text
        self._output_builder = OutputBuilder()
        self._requests: dict[str, Request] = {}
        self._texts: dict[Sequence, OutputText] = {}
        self._unreadable: dict[Request, PanicError] = {}  # their output has no text

    def add_request(self, new: NewRequest) -> None:
        """Submits a request.

        Raises:
            ValueError: the request can never be served, or its id is in use, or its adapter cannot be loaded.
        """
        new.check_id(self._requests)
        with PANICS_AS_ERRORS:
            request = self.preprocessor.build_request(new)
        if new.lora_request is not None:
            request.adapter = self._adapter_table.acquire(new.lora_request, new.prepared)
        try:
            if self._arrivals is None or not self._arrivals.hold(request):
                self.scheduler.add(request)
        except Exception:
            self._release_adapter(request)
            raise
        self._requests[new.request_id] = request

    def prepare_lora(self, lora_request: LoRARequest) -> PreparedAdapter | None:
        """Reads and checks an adapter, unless it is loaded; any thread may call it while steps run.

        Raises:
            ValueError: it cannot be read or does not fit the model, or the engine has no room for adapters.
        """
        table = self._adapter_table
        return None if table.holds(lora_request) else table.prepare(lora_request)

    def add_lora(self, lora_request: LoRARequest, prepared: PreparedAdapter | None = None) -> None:
        """Loads an adapter before a request asks for it.

        Args:
            lora_request: names the adapter.
            prepared: see `NewRequest`.

        Raises:
            ValueError: it cannot be read, does not fit the model, or all adapters that fit are in use.
        """
        self._adapter_table.load(lora_request, prepared)

    def has_lora(self, lora_request: LoRARequest) -> bool:
        """True if an adapter of this id is loaded; any thread may ask."""
        return self._adapter_table.holds(lora_request)

    def remove_lora(self, lora_id: int) -> None:
        """Unloads an adapter.

        Raises:
            ValueError: it is not loaded, or unfinished requests use it.
        """
        self._adapter_table.unload(lora_id)

    def list_loras(self) -> list[LoRARequest]:
        """Returns the adapters that are loaded."""
        return self._adapter_table.loaded

    @property
    def _adapter_table(self) -> AdapterTable:
        if self._adapters is None:
            raise ValueError("this engine has no room for adapters: set enable_lora=True (--enable-lora)")
        return self._adapters

    def _release_adapter(self, request: Request) -> None:
        if request.adapter is not None:
            self._adapter_table.release(request.adapter)

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput | FailedOutput]:
        """Ends requests immediately and frees their blocks; unknown ids are ignored.

        Returns:
            Their outputs so far, with ``finish_reason`` ``abort`` for sequences that were not finished, and
            outputs of steps of a pipeline that have ended meanwhile.
        """
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        earlier: list[RequestOutput | FailedOutput] = []
        while self._under_way and any(name in self._requests for name in names):
            earlier += self._end_oldest()
        aborted = [self._requests[name] for name in names if name in self._requests]
        for request in aborted:
            self._flush_texts(request)
            if self._arrivals is None or self._arrivals.cancel(request.request_id) is None:
                self.scheduler.abort(request.request_id)
        return [*earlier, *self._outputs(aborted)]

    def reset_prefix_cache(self) -> bool:
        """Forgets the prefix cache in memory; False, and nothing is changed, while requests run."""
        return self.scheduler.blocks.reset_prefix_cache()

    def release_cache(self) -> int:
        """Gives the memory of the KV cache back to the system, until it is written again; returns its bytes.

        Its contents are lost: the prefix cache has to be reset before.
        """
        return self.runner.release_cache()

    def session_files(self) -> SessionFiles:
        """Returns what saves and loads conversations."""
        return SessionFiles(self.runner, self.scheduler)

    def on_failure(self, method: OnFailure) -> None:
        """See `Runner.on_failure`."""
        self.runner.on_failure(method)

    def has_unfinished_requests(self) -> bool:
        """True if there is anything to compute."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput | FailedOutput]:
        """Computes one step and returns the outputs of the requests that it changed.

        In a pipeline it begins a step, and waits for the oldest one if no more can begin.

        Raises:
            StepFailedError: the step failed, and its requests have ended.
            RankFailedError: a tensor parallel rank has failed, and the engine cannot go on.
        """
        began = time.monotonic()
        if self._arrivals:
            self._advance_arrivals(self._arrivals)
        self._trace.begin()
        step = self.scheduler.schedule()
        if not step.scheduled:
            return self._end_oldest() if self._under_way else []
        if not step.decode_only:
            self._record_start(step, began)
        self._trace.mark("schedule")
        try:
            with PANICS_AS_ERRORS:
                self._begin(step, began)
                return self._end_oldest() if len(self._under_way) == self._stages else []
        except RankFailedError:
            raise
        except Exception as error:
            if self._stages > 1:  # the steps that follow are under way
                raise
            raise self._abort_step(step, error) from error

    def _advance_arrivals(self, arrivals: Arrivals) -> None:
        try:
            arrivals.advance()
        except RankFailedError:
            self._forget_steps()
            raise

    def _begin(self, step: Step, began: float) -> None:
        sequences = [sequence for sequence, _, _ in step.scheduled]
        best_only = step.only_extends and self.sampler.needs_best_only(sequences)
        try:
            self.runner.begin(step, best_only)
        except RankFailedError:
            self._forget_steps()
            raise
        if self._stages > 1:
            self.scheduler.begin(step)
        self._under_way.append((step, began))

    def _end_oldest(self) -> list[RequestOutput | FailedOutput]:
        """Waits for the oldest step under way, and returns the outputs that it changed."""
        step, began = self._under_way.popleft()
        try:
            logits, best, hidden = self.runner.finish()
        except RankFailedError:
            self._forget_steps()
            raise
        drawn = None if best is None else self._take_greedy(step, best)
        if drawn is None:
            drawn = self._draw(step, logits)
        return self._complete(step, drawn, hidden, max(began, self._ended))

    def _forget_steps(self) -> None:
        """Forgets the steps under way, which do not end where a rank has failed."""
        self._under_way.clear()
        self.scheduler.forget_steps()

    def _draw(self, step: Step, logits: Tensor) -> dict[Sequence, list[int]]:
        """Samples and appends tokens; returns those of each sequence."""
        tokens = self._sample(step, logits)
        self._trace.mark("sample")
        return {sequence: self._append_tokens(sequence, samples) for sequence, samples in tokens.items()}

    def _complete(
        self, step: Step, drawn: dict[Sequence, list[int]], hidden: Tensor | None, began: float
    ) -> list[RequestOutput | FailedOutput]:
        """Records a computed step and returns the outputs of the requests that it changed."""
        self._trace.mark("detokenize")
        self._ended = now = time.monotonic()
        self.stats.record(step, drawn, began, now)
        self.scheduler.complete(step, drawn)
        self.scheduler.record_time(step, now - began)
        changed = self._finish(drawn, now)
        if self.speculative_decoder is not None:
            running = [a for a in drawn if a.status is Status.RUNNING]
            self.speculative_decoder.propose(running, step, hidden)
            self.speculative_decoder.record_time(step, time.monotonic() - began)
        outputs = self._outputs(changed)
        self._trace.mark("finish")
        if self._trace is not NO_TRACE:
            self._trace.end(sequences=len(step.scheduled), tokens=step.token_count, drawn=len(drawn))
        return outputs

    def _abort_step(self, step: Step, error: Exception) -> StepFailedError:
        """Ends all requests whose keys and values the step was to compute or copy: their state is unknown."""
        sequences = [*(scheduled.sequence for scheduled in step.scheduled), *step.preempted]
        requests = {sequence.request.request_id: sequence.request for sequence in sequences}
        for name, request in requests.items():
            self.scheduler.abort(name)
            if name in self._requests:
                self._forget(request)
        return StepFailedError(requests, error)

    def _gauges(self) -> Gauges:
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        waiting = scheduler.waiting + scheduler.swapped + len(self._arrivals or ())
        return Gauges(scheduler.running, waiting, blocks.usage, blocks.hit_rate)

    def _record_start(self, step: Step, now: float) -> None:
        for scheduled in step.scheduled:
            metrics = scheduled.sequence.request.metrics
            if metrics.scheduled_time is None:
                metrics.scheduled_time = now

    def _take_greedy(self, step: Step, best: array[int]) -> dict[Sequence, list[int]] | None:
        """Appends the most probable tokens; None if logits are needed to sample, or prompts were computed."""
        sequences = [sequence for sequence, _, _ in step.scheduled]
        tokens = self.sampler.take_greedy(best, sequences)
        self._trace.mark("sample")
        if tokens is None:
            return None
        if step.num_draft:
            return self._take_drafted(step, tokens)
        drawn = {}
        for sequence, token_id in zip(sequences, tokens, strict=True):
            self._append_token(sequence, token_id)
            drawn[sequence] = [token_id]
        return drawn

    def _take_drafted(self, step: Step, best: list[int]) -> dict[Sequence, list[int]]:
        """Appends the draft tokens that are the most probable ones, and the token after them."""
        assert self.speculative_decoder is not None
        drawn: dict[Sequence, list[int]] = {}
        begin = 0
        for scheduled in step.scheduled:
            sequence, count = scheduled.sequence, scheduled.num_draft
            tokens = self.speculative_decoder.verify_greedy(sequence, best[begin : begin + count + 1])
            begin += count + 1
            drawn[sequence] = self._append_tokens(sequence, [SampledToken(token, None) for token in tokens])
        return drawn

    def _sample(self, step: Step, logits: Tensor) -> dict[Sequence, list[SampledToken]]:
        """Samples tokens for each sequence whose prompt is computed: accepted draft tokens, and one more."""
        sequences: list[Sequence] = []
        counts: list[int] = []
        rows: list[int] = []
        end = 0
        for scheduled in step.scheduled:
            sequence, start, count = scheduled
            if (
                count == 1 and sequence.prompt_length <= start == len(sequence.token_ids) - 1
            ):  # the common case: decode without a draft
                sequences.append(sequence)
                counts.append(0)
                rows.append(end)
                end += 1
                continue
            first = end
            end += len(scheduled.logit_positions)
            if sequence.params.prompt_logprobs is not None and start < sequence.prompt_length:
                self._record_prompt_logprobs(sequence, start, logits[first:end])
            if scheduled.samples:
                for each in (sequence, *self._fork(sequence)):
                    sequences.append(each)
                    counts.append(scheduled.num_draft)
                    rows += range(end - 1 - scheduled.num_draft, end)
        chosen = logits if rows == list(range(end)) else logits[rows]
        return dict(zip(sequences, self._verify(chosen, sequences, counts), strict=True))

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """Creates a request's other sequences when its prompt is computed; they sample from its logits."""
        request = sequence.request
        return self.scheduler.fork(sequence) if len(request.sequences) < request.params.num_sequences else []

    def _record_prompt_logprobs(self, sequence: Sequence, start: int, logits: Tensor) -> None:
        """Records log-probabilities of the prompt tokens that follow positions from ``start`` on."""
        request, prompt = sequence.request, sequence.request.prompt_token_ids
        logprobs = request.prompt_logprobs = request.prompt_logprobs or [None]
        new = range(len(logprobs), min(start + len(logits) + 1, len(prompt)))
        if new:
            rows = logits[new.start - 1 - start : new.stop - 1 - start]
            count = sequence.params.prompt_logprobs
            assert count is not None
            logprobs += self.sampler.prompt_logprobs(rows, prompt[new.start : new.stop], count)

    def _append_tokens(self, sequence: Sequence, drawn: GenericSequence[SampledToken]) -> list[int]:
        """Appends tokens up to the end of a sequence; returns the appended ones."""
        token_ids = []
        for sample in drawn:
            token_ids.append(sample.token_id)
            if sample.logprobs is not None:
                sequence.logprobs.append(sample.logprobs)
                sequence.cumulative_logprob += sample.logprobs[sample.token_id].logprob
            if self._append_token(sequence, sample.token_id):
                break
        return token_ids

    def _append_token(self, sequence: Sequence, token_id: int) -> bool:
        """Appends a token to a sequence and its text; True if it ends the sequence."""
        text = self._texts.get(sequence) or self._texts.setdefault(
            sequence, self._begin_text(sequence.request)
        )
        try:
            finish = text.append(token_id)
        except PanicError as error:
            self._unreadable[sequence.request] = error
            finish = Finish("abort")
        if finish is None:
            return False
        sequence.finish_reason, sequence.stop_reason = finish
        return True

    def _finish(self, drawn: Iterable[Sequence], now: float) -> list[Request]:
        """Finishes sequences that ended; returns the requests with new tokens."""
        changed: dict[Request, None] = {}
        for sequence in drawn:
            changed[sequence.request] = None
            if sequence.finish_reason is not None:
                self.scheduler.finish(sequence, sequence.finish_reason)
        for request in changed:
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
        return list(changed)

    def _outputs(self, requests: Iterable[Request]) -> list[RequestOutput | FailedOutput]:
        outputs: list[RequestOutput | FailedOutput] = []
        for request in requests:
            finished = request.finished
            if finished:
                request.metrics.finished_time = time.monotonic()
            output = self._output(request, finished)
            if output is not None:
                outputs.append(output)
            if finished or isinstance(output, FailedOutput):
                self._forget(request)
        return outputs

    def _output(self, request: Request, finished: bool) -> RequestOutput | FailedOutput | None:
        """Returns a request's output after a step; it has failed where the tokenizer has no text for it."""
        try:
            if (error := self._unreadable.pop(request, None)) is not None:
                raise error
            return self._output_builder.build(request, finished, self._texts)
        except PanicError as error:
            if not finished:
                self.scheduler.abort(request.request_id)
            return FailedOutput(request.request_id, error)

    def _flush_texts(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.finish_reason is None and sequence in self._texts:
                with suppress(PanicError):  # the output says so
                    self._texts[sequence].flush()

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._release_adapter(request)
        self._output_builder.forget(request)
        for sequence in request.sequences:
            self._texts.pop(sequence, None)
