"""llama.cpp by the low-level bindings of llama-cpp-python: continuous batching as its server does it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np

from bench.peers.setup import Setup
from bench.peers.work import Work, shared

BATCH, PIECE = 2048, 512  # tokens of a call, and of a pass through the model: its defaults
SLACK = 64
ERROR = 4  # the level of its messages


@dataclass
class Sequence:
    """A slot of the KV cache.

    Attributes:
        held: tokens in the cache.
        pending: tokens that are not in the cache yet.
        request: id of the request in the slot; None: the slot is free, and its tokens can be reused.
    """

    held: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    request: str | None = None


class Context:
    """Sequences that are computed together.

    Args:
        model: llama.cpp's handle of the model.
        sequences: maximum number of sequences.
        length: maximum tokens of a sequence.
        flash: True for fused attention.
        unified: True if sequences share one cache.
        threads: number of computing threads.
    """

    def __init__(
        self, model: Any, sequences: int, length: int, flash: bool, unified: bool, threads: int
    ) -> None:
        params = llama.llama_context_default_params()
        params.n_ctx = sequences * -(-(length + SLACK) // 256) * 256
        params.n_batch, params.n_ubatch, params.n_seq_max = BATCH, PIECE, sequences
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(flash)
        params.kv_unified = unified
        params.no_perf = True
        self.handle = llama.llama_init_from_model(model, params)
        if not self.handle:
            raise RuntimeError("llama.cpp cannot create a context with these settings")
        self.memory = llama.llama_get_memory(self.handle)
        self.batch = llama.llama_batch_init(BATCH, 0, 1)
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self.slots = [Sequence() for _ in range(sequences)]

    def start(self, request: str, prompt: list[int]) -> None:
        """Assign the free slot that shares the longest prefix with the prompt."""
        free = [i for i, slot in enumerate(self.slots) if slot.request is None]
        chosen = max(free, key=lambda i: shared(self.slots[i].held, prompt))
        num_cached = min(shared(self.slots[chosen].held, prompt), len(prompt) - 1)
        if not llama.llama_memory_seq_rm(self.memory, chosen, num_cached, -1):
            num_cached = 0  # the states of recurrent layers cannot go back
            llama.llama_memory_seq_rm(self.memory, chosen, -1, -1)
        self.slots[chosen] = Sequence(prompt[:num_cached], prompt[num_cached:], request)

    def stop(self, request: str) -> None:
        """Free a slot; its tokens stay in the cache."""
        for slot in self.slots:
            if slot.request == request:
                slot.request, slot.pending = None, []

    def step(self) -> dict[str, list[int]]:
        """Decode a token of every running sequence, then fill the batch with prompt tokens."""
        running = [(i, slot) for i, slot in enumerate(self.slots) if slot.pending]
        running.sort(key=lambda each: len(each[1].pending) > 1)
        batch, used, outputs = self.batch, 0, []
        for i, slot in running:
            tokens = slot.pending[: BATCH - used]
            for token in tokens:
                batch.token[used], batch.pos[used] = token, len(slot.held)
                batch.n_seq_id[used], batch.seq_id[used][0] = 1, i
                batch.logits[used] = 0
                slot.held.append(token)
                used += 1
            slot.pending = slot.pending[len(tokens) :]
            if tokens and not slot.pending:
                batch.logits[used - 1] = 1
                outputs.append((slot, used - 1))
        batch.n_tokens = used
        if used and (status := llama.llama_decode(self.handle, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return dict(self._drawn(outputs))

    def _drawn(self, outputs: list[tuple[Sequence, int]]) -> Iterable[tuple[str, list[int]]]:
        for slot, row in outputs:
            logits = llama.llama_get_logits_ith(self.handle, row)
            token = int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())
            slot.pending = [token]
            assert slot.request is not None
            yield slot.request, [token]


class Llama:
    """See `work.Engine`.  Keeps the last few contexts, one for each workload and setting."""

    KEPT = 3

    def __init__(self, path: Path, threads: int) -> None:
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self.threads = threads
        self.contexts: dict[tuple[int, int, str], Context] = {}
        self.current: Context | None = None

    def ways(self, work: Work) -> list[str]:
        each = ["flash", "plain"]
        return each if work.sequences == 1 else [*each, "flash, unified", "plain, unified"]

    def prepare(self, work: Work, way: str) -> None:
        key = work.sequences, work.length, way
        if key not in self.contexts:
            while len(self.contexts) >= self.KEPT:
                oldest = self.contexts.pop(next(iter(self.contexts)))
                llama.llama_batch_free(oldest.batch)
                llama.llama_free(oldest.handle)
            flash, unified = way.startswith("flash"), way.endswith("unified")
            self.contexts[key] = Context(
                self.model, work.sequences, work.length, flash, unified, self.threads
            )
        self.current = self.contexts[key]

    def start(self, name: str, prompt: list[int], new_tokens: int) -> None:
        assert self.current is not None
        self.current.start(name, prompt)

    def step(self) -> dict[str, list[int]]:
        assert self.current is not None
        return self.current.step()

    def stop(self, name: str) -> None:
        assert self.current is not None
        self.current.stop(name)


@llama.llama_log_callback
def _errors(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Prints errors only: llama.cpp logs hundreds of lines per model."""
    if level == ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def load(setup: Setup) -> Llama:
    """Load the engine."""
    path = setup.gguf()
    llama.llama_log_set(_errors, ctypes.c_void_p(0))
    return Llama(path, setup.threads)
