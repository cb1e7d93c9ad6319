"""Workloads of the comparison, and the interface through which engines run them.

Peers' processes import this module too, so it imports the standard library alone.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Protocol, runtime_checkable

AFTER = 128  # tokens before a decode step, unless the work says otherwise
STEPS = 64  # of one run of decoding
QUESTION, FOLLOWING, ANSWER, TURNS = 192, 48, 48, 2
"""Tokens of a chat's first question, of later ones and of answers, and the number of questions."""
VOCABULARY = 49_000


@dataclass(frozen=True)
class Work:
    """A workload.

    Attributes:
        kind: ``prefill``, ``decode`` or ``chats``.
        size: tokens of the prompt, or number of concurrent sequences.
        context: tokens before the first decode step.
        busy: True if a busy loop runs in another process meanwhile.
    """

    kind: str
    size: int
    context: int = AFTER
    busy: bool = False

    @property
    def name(self) -> str:
        """Name on the command line: ``prefill-512``, ``decode-1@4096``, ``decode-1+busy``, ``chats-8``."""
        at = f"@{self.context}" if self.context != AFTER else ""
        return f"{self.kind}-{self.size}{at}{'+busy' if self.busy else ''}"

    @property
    def length(self) -> int:
        """Maximum tokens of a sequence."""
        if self.kind == "prefill":
            return self.size + 1
        if self.kind == "decode":
            return self.context + STEPS + 2
        return QUESTION + FOLLOWING * (TURNS - 1) + ANSWER * TURNS + 1

    @property
    def sequences(self) -> int:
        """Number of concurrent sequences."""
        return 1 if self.kind == "prefill" else self.size

    @staticmethod
    def named(name: str) -> Work:
        """Return the workload of a name.

        Raises:
            ValueError: no workload has this name.
        """
        match = re.fullmatch(r"(prefill|decode|chats)-(\d+)(?:@(\d+))?(\+busy)?", name)
        if match is None or int(match[2]) < 1:
            raise ValueError(
                f"no such work: {name!r}; it is prefill-TOKENS, decode-BATCH[@CONTEXT][+busy] or chats-NUMBER"
            )
        return Work(match[1], int(match[2]), int(match[3] or AFTER), bool(match[4]))


ALL = (
    *(Work("prefill", tokens) for tokens in (512, 2048)),
    *(Work("decode", batch) for batch in (1, 4, 8, 16)),
    Work("decode", 1, context=4096),
    Work("decode", 1, busy=True),
    Work("chats", 8),
)


class Engine(Protocol):
    """Continuous batching with greedy sampling, step by step."""

    def ways(self, work: Work) -> list[str]:
        """Return the names of the settings that may be the best for a workload."""
        ...

    def prepare(self, work: Work, way: str) -> None:
        """Allocate the KV cache for the workload's sequences, with a setting."""
        ...

    def start(self, name: str, prompt: list[int], new_tokens: int) -> None:
        """Submit a request whose output does not end early."""
        ...

    def step(self) -> dict[str, list[int]]:
        """Compute a step; return the new tokens by request."""
        ...

    def stop(self, name: str) -> None:
        """End a request."""
        ...


@runtime_checkable
class Programs(Protocol):
    """An engine that measures whole workloads with programs of its own."""

    def ways(self, work: Work) -> list[str]:
        """Return the names of the settings that may be the best for a workload."""
        ...

    def measure(self, work: Work, way: str, least: float) -> dict[str, float]:
        """Run a workload and return its figures."""
        ...


_names = count()
_seeds = count()


@contextmanager
def _requests(engine: Engine, prompts: list[list[int]], new_tokens: int) -> Iterator[list[str]]:
    """Run requests for the length of a block, and abort them after it."""
    names = [f"request-{next(_names)}" for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        engine.start(name, prompt, new_tokens)
    try:
        yield names
    finally:
        for name in names:
            engine.stop(name)


def random_tokens(count: int, vocabulary: int = VOCABULARY, seed: object = 0) -> list[int]:
    """Return the tokens of a prompt."""
    random = Random(str(seed))
    return [random.randrange(10, vocabulary) for _ in range(count)]


def shared(some: list[int], others: list[int]) -> int:
    """Return the number of tokens with which two prompts begin alike."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(some), len(others)))


def prefill(engine: Engine, tokens: int, least: float) -> dict[str, float]:
    """Return prompt tokens a second, up to the first output token; every prompt is new."""
    done, spent = 0, 0.0
    while spent < least:
        prompt = random_tokens(tokens, seed=f"prefill {time.time_ns()} {next(_seeds)}")
        began = time.perf_counter()
        with _requests(engine, [prompt], 2):
            while not engine.step():
                pass
            spent += time.perf_counter() - began
        done += tokens
    return {"tok_s": done / spent}


def decode(engine: Engine, batch: int, context: int, least: float) -> dict[str, float]:
    """Return tokens a second of all sequences together, after prompts that the prefix cache may hold."""
    done, spent = 0, 0.0
    while spent < least:
        prompts = [random_tokens(context, seed=f"decode {context} {i}") for i in range(batch)]
        with _requests(engine, prompts, STEPS + 2) as names:
            reading = set(names)
            while reading:
                reading -= engine.step().keys()
            began = time.perf_counter()
            for _ in range(STEPS if batch == 1 else STEPS // 2):
                done += sum(map(len, engine.step().values()))
            spent += time.perf_counter() - began
    return {"tok_s": done / spent}


def chats(engine: Engine, number: int) -> dict[str, float]:
    """Run ``number`` concurrent conversations; each question immediately follows the answer before it.

    Returns:
        ``ttft_ms`` and ``tpot_ms``, means over questions, and ``tok_s``, generated tokens a second.
    """
    texts = [random_tokens(QUESTION, seed=f"chat {i} {time.time_ns()}") for i in range(number)]
    turns = [0] * number
    submitted: dict[str, tuple[int, float]] = {}
    times: dict[str, list[float]] = {}

    def ask(chat: int) -> None:
        name = f"request-{next(_names)}"
        submitted[name] = chat, time.perf_counter()
        times[name] = []
        engine.start(name, list(texts[chat]), ANSWER)

    began = time.perf_counter()
    for chat in range(number):
        ask(chat)
    waiting = set(submitted)
    while waiting:
        for name, tokens in engine.step().items():
            chat, _ = submitted[name]
            texts[chat] += tokens
            times[name] += [time.perf_counter()] * len(tokens)
            if len(times[name]) < ANSWER:
                continue
            engine.stop(name)
            waiting.remove(name)
            turns[chat] += 1
            if turns[chat] < TURNS:
                texts[chat] += random_tokens(FOLLOWING, seed=f"{chat} {turns[chat]}")
                ask(chat)
                waiting.add(next(reversed(submitted)))
    spent = time.perf_counter() - began
    firsts = [times[name][0] - at for name, (_, at) in submitted.items()]
    gaps = [(t[-1] - t[0]) / (len(t) - 1) for t in times.values()]
    return {
        "ttft_ms": 1e3 * statistics.mean(firsts),
        "tpot_ms": 1e3 * statistics.mean(gaps),
        "tok_s": sum(map(len, times.values())) / spent,
    }


def do(engine: Engine, work: Work, least: float) -> dict[str, float]:
    """Run a workload for at least ``least`` seconds and return its figures."""
    if work.kind == "prefill":
        return prefill(engine, work.size, least)
    if work.kind == "decode":
        return decode(engine, work.size, work.context, least)
    return chats(engine, work.size)
