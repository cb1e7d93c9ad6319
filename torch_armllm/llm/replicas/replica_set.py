"""Replicas of an engine in processes of their own, in the place of one engine."""

from __future__ import annotations

import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.disk.session_files import SessionFiles
from torch_armllm.engine.engine_protocol import TextEngine
from torch_armllm.engine.errors import ReplicaFailedError
from torch_armllm.engine.outputs import FailedOutput, RequestOutput
from torch_armllm.engine.reports.stats import EngineStats
from torch_armllm.engine.request import Request
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.sampling.thinking_budget import find_reasoning
from torch_armllm.engine.sampling_params import RequestOutputKind
from torch_armllm.engine.text.preprocess import NewRequest, Preprocessor
from torch_armllm.llm.replicas.messages import Abort, Call, Failed, Returned, Short, Stats, Stepped
from torch_armllm.llm.replicas.prefix_router import PrefixRouter
from torch_armllm.llm.replicas.replica import Replica
from torch_armllm.lora.adapter_table import PreparedAdapter
from torch_armllm.lora.request import LoRARequest
from torch_armllm.ops.untraced import call_at_end
from torch_armllm.parallel.placement import rank_cpus

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OnEnd = Callable[[int], object]
_NO_PICTURES = "replicas take no pictures yet: leave data_parallel_size out to give some"


@dataclass
class _Sent:
    """A request that a replica computes; ``tokens`` are those of its outputs, by the completion."""

    request: Request
    replica: Replica
    adapter: int | None
    tokens: dict[int, list[int]] = field(default_factory=dict)


class ReplicaSet(TextEngine):
    """Submits requests to replicas, each to the one that holds its prefix, and collects their outputs.

    Other threads may call `wake`, `restart` and `on_end` only, and read what does not change it.

    Args:
        arguments: of `torch_armllm.LLM` in each process.
        count: number of replicas.
        tokenizer: of the model; None: prompts are tokens.
        config: settings of each replica.

    Attributes:
        facts: of all replicas together.
        preprocessor: turns prompts into requests.
        replicas: in the order of their numbers.

    Raises:
        ValueError: a replica could not be loaded; the message says why.
    """

    aborts_later = True

    def __init__(
        self, arguments: Mapping[str, Any], count: int, tokenizer: Any, config: EngineConfig
    ) -> None:
        self._cores = rank_cpus(count)
        self._arguments = arguments
        self._restarted: deque[Replica] = deque()
        self._wake_read, self._wake_write = files = os.pipe()
        os.set_blocking(self._wake_write, False)
        self.replicas = [Replica(number, cpus, arguments) for number, cpus in enumerate(self._cores)]
        self._finalizer = call_at_end(self, _close, self.replicas, self._restarted, files)
        try:
            facts = [replica.wait_until_loaded() for replica in self.replicas][0]
        except BaseException:
            self.close()
            raise
        self.facts = facts.of_replicas(count)
        self.stats = self.replicas[0].stats
        reasoning = find_reasoning(config.reasoning_config, tokenizer)
        check = Sampler(facts.drawable, facts.eos_token_ids, tokenizer, reasoning).check
        self.preprocessor = Preprocessor(tokenizer, facts.max_model_len, check, config.seed, _NO_PICTURES)
        self._router: PrefixRouter[int] = PrefixRouter(facts.kv_tokens)
        self._sent: dict[str, _Sent] = {}
        self._ready: list[RequestOutput | FailedOutput] = []
        self._numbers = itertools.count()
        self._returned: dict[tuple[int, int], Returned] = {}  # by replica and call
        self._on_end: list[OnEnd] = []
        for replica in self.replicas:
            replica.watch(_weakly(self._ended))

    def add_request(self, new: NewRequest) -> None:
        """Submits a request to a replica.

        Raises:
            ValueError: the request can never be served, or its id is in use.
            ReplicaFailedError: no replica is left.
        """
        new.check_id(self._sent)
        self._take_restarted()
        request = self.preprocessor.build_request(new)
        tokens, params = request.prompt_token_ids, replace(request.params, seed=request.seed)
        adapter = None if new.lora_request is None else new.lora_request.lora_int_id
        tokenized = {"prompt": request.prompt, "prompt_token_ids": tokens}
        sent = new._replace(prompt=tokenized, params=params)
        while loads := {r.number: r.load for r in self.replicas if r.reason is None}:
            replica = self.replicas[self._router.choose(tokens, loads, adapter)]
            if not replica.send(sent):
                replica.note_end()
                continue
            replica.load += request.params.num_sequences
            self._router.record(replica.number, tokens, adapter)
            self._sent[new.request_id] = _Sent(request, replica, adapter)
            return
        raise ReplicaFailedError(f"no replica is left: {self.replicas[0].reason}")

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """Ends requests; their last outputs come with a later step."""
        for name in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if name in self._sent:
                self._sent[name].replica.send(Abort([name]))
        return []

    def has_unfinished_requests(self) -> bool:
        """True if an output is to come."""
        return bool(self._sent or self._ready)

    def step(self) -> list[RequestOutput | FailedOutput]:
        """Waits for outputs of any replica, or for `wake`, and returns what has come.

        Raises:
            RuntimeError: no replica is left.
        """
        self._take_restarted()
        if all(replica.reason is not None and not replica.reads for replica in self.replicas):
            raise RuntimeError(f"no replica is left: {self.replicas[0].reason}")
        self._read(None)
        ready, self._ready = self._ready, []
        return ready

    def wake(self) -> None:
        """Ends a step that waits; any thread may call it."""
        with suppress(BlockingIOError):  # it is full, and wakes as it is
            os.write(self._wake_write, b"\0")

    def has_lora(self, lora_request: LoRARequest) -> bool:
        """True: each replica reads the adapters that it lacks."""
        return True

    def prepare_lora(self, lora_request: LoRARequest) -> PreparedAdapter | None:
        """Returns None: see `has_lora`."""
        return None

    def add_lora(self, lora_request: LoRARequest, prepared: PreparedAdapter | None = None) -> None:
        """Loads an adapter in all replicas; see `LLMEngine.add_lora`."""
        self._call("add_lora", lora_request)

    def remove_lora(self, lora_id: int) -> None:
        """Unloads an adapter in all replicas; see `LLMEngine.remove_lora`."""
        self._call("remove_lora", lora_id)

    def reset_prefix_cache(self) -> bool:
        """Forgets the prefix caches of all replicas; False if one computes, and keeps its own."""
        self._router.forget()
        return all(self._call("reset_prefix_cache"))

    def release_cache(self) -> int:
        """Gives the memory of all KV caches back, as `LLMEngine.release_cache` does; returns its bytes."""
        return sum(self._call("release_cache"))

    def load_model(self) -> PreTrainedModel:
        """Raises ValueError."""
        raise ValueError("the model is in the processes of the replicas: leave data_parallel_size out")

    def session_files(self) -> SessionFiles:
        """Raises ValueError."""
        raise ValueError("replicas save no sessions yet: leave data_parallel_size out")

    def all_stats(self) -> list[EngineStats]:
        """Returns the statistics of each replica."""
        return [replica.stats for replica in self.replicas]

    @property
    def dead(self) -> list[str]:
        """The reasons of replicas that have ended."""
        return [replica.reason for replica in self.replicas if replica.reason is not None]

    def on_end(self, callback: OnEnd) -> None:
        """Calls a function with the number of a replica that has ended, in a thread of its own."""
        self._on_end.append(callback)

    def restart(self, number: int) -> None:
        """Starts a replica that has ended once more, and returns when it takes requests.

        Raises:
            ValueError: it could not be loaded.
        """
        replica = Replica(number, self._cores[number], self._arguments)
        try:
            replica.wait_until_loaded()
        except BaseException:
            replica.close()
            raise
        replica.watch(_weakly(self._ended))
        self._restarted.append(replica)
        self.wake()

    def close(self) -> None:
        """Ends all processes."""
        self._finalizer()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of all engines between two steps, and returns the results.

        Raises:
            ValueError: it has failed in a replica.
        """
        self._take_restarted()
        number = next(self._numbers)
        called = [r for r in self.replicas if r.reason is None and r.send(Call(number, method, arguments))]
        while any(replica.reads and (replica.number, number) not in self._returned for replica in called):
            self._read([replica for replica in called if replica.reads])
        answers = [self._returned.pop((r.number, number)) for r in called if r.reads]
        for answer in answers:
            if answer.error is not None:
                raise ValueError(answer.error)
        return [answer.result for answer in answers]

    def _read(self, replicas: Sequence[Replica] | None) -> None:
        """Waits for messages and takes them; of all replicas, and ends by `wake`, if none are given."""
        readers = [replica for replica in replicas or self.replicas if replica.reads]
        others = [] if replicas else [self._wake_read]
        ready = wait([*(replica.connection for replica in readers), *others])
        if self._wake_read in ready:
            os.read(self._wake_read, 1 << 12)
        for replica in readers:
            if replica.connection in ready:
                try:
                    self._take(replica, replica.connection.recv())
                except (EOFError, OSError):
                    self._fail(replica)

    def _take(self, replica: Replica, message: Any) -> None:
        if isinstance(message, Stepped):
            for short in message.outputs:
                self._ready.append(self._whole(short))
            for ended in message.ended:
                self._finish(ended.request_id)
                self._ready.append(FailedOutput(ended.request_id, ended.error()))
        elif isinstance(message, Stats):
            replica.update(message)
        elif isinstance(message, Returned):
            self._returned[replica.number, message.number] = message
        else:
            assert isinstance(message, Failed)
            replica.reason = f"replica {replica.number} has ended: {message.reason}"

    def _whole(self, short: Short) -> RequestOutput:
        sent = self._sent[short.request_id]
        request = sent.request
        for completion in short.outputs:
            tokens = sent.tokens.setdefault(completion.index, [])
            if request.params.output_kind is not RequestOutputKind.DELTA:
                tokens.clear()
            tokens += completion.token_ids
        if short.finished:
            for tokens in sent.tokens.values():  # what follows the answer finds its blocks
                self._router.record(sent.replica.number, [*request.prompt_token_ids, *tokens], sent.adapter)
            self._finish(short.request_id)
        return short.whole(request.prompt, request.prompt_token_ids)

    def _finish(self, request_id: str) -> None:
        sent = self._sent.pop(request_id)
        sent.replica.load -= sent.request.params.num_sequences

    def _fail(self, replica: Replica) -> None:
        """Ends the requests of a replica that has ended."""
        replica.note_end()
        replica.reads = False
        self._router.forget(replica.number)
        for name in [name for name, sent in self._sent.items() if sent.replica is replica]:
            self._finish(name)
            assert replica.reason is not None
            self._ready.append(FailedOutput(name, ReplicaFailedError(replica.reason)))

    def _take_restarted(self) -> None:
        """Lets replicas that were started again take the places of those that have ended."""
        while self._restarted:
            replica = self._restarted.popleft()
            before = self.replicas[replica.number]
            if before.reads:
                self._fail(before)
            before.close()
            replica.stats.totals = before.stats.totals
            self.replicas[replica.number] = replica
            self.stats = self.replicas[0].stats

    def _ended(self, replica: Replica) -> None:
        self.wake()
        for callback in self._on_end:
            callback(replica.number)


def _weakly(method: Callable[[Replica], object]) -> Callable[[Replica], None]:
    """Returns a function that calls a method as long as its object lives."""
    kept = weakref.WeakMethod(method)

    def call(replica: Replica) -> None:
        if (found := kept()) is not None:
            found(replica)

    return call


def _close(replicas: list[Replica], restarted: deque[Replica], files: Sequence[int]) -> None:
    for replica in (*replicas, *restarted):
        replica.close()
    for file in files:
        os.close(file)
