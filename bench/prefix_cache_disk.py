r"""First token of a long conversation after a restart, with and without a prefix cache on disk.

    python -m bench.prefix_cache_disk [--model smollm2] [--tokens 8000] [--ranks 1] [--stages 1] \
        [--only first,decode]

``first``: a process computes a conversation and ends. Further processes load the model and continue it by 20
tokens: without the folder, with it, and with it after its files were dropped from the system's page cache.
Rows have the seconds from the request, two seconds after the model is loaded, to the first token.

``decode``: a sequence decodes while the blocks of a conversation that has just ended are written. Rows have
the time of a token with and without a folder, in several rounds.

``--model`` is ``smollm2``, a folder, or a shape of `torch_armllm.benchmark.model_shapes` such as
``llama-3.2-1b``, which gets random weights.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from bench.case import Row, in_process, in_rounds, run
from bench.engine_steps import QUIET, greedy, timed
from bench.peers.work import random_tokens
from torch_armllm import LLM
from torch_armllm.benchmark.model_shapes import SHAPES, shape_of
from torch_armllm.benchmark.random_model import save_random_model
from torch_armllm.engine.text.preprocess import NewRequest

_TURN = 20
"""Tokens by which a conversation goes on."""
_PAUSE = 2.0
"""Seconds between the start of an engine and its first request."""
_ROUNDS = 5
_PAIRS = 9
_WINDOW = 2.0
"""Seconds of decoding after a conversation has ended."""
_VOCABULARY = 40_000


@dataclass(frozen=True)
class Conversation:
    """A conversation of so many tokens with a model, on so many ranks and stages."""

    model: str
    tokens: int
    ranks: int
    stages: int

    def llm(self, folder: Path | None) -> LLM:
        """Returns the engine, whose blocks are kept in a folder; None: in memory alone."""
        settings: dict[str, Any] = {} if folder is None else {"prefix_cache_dir": folder}
        return LLM(
            self.model,
            max_num_seqs=4,
            tensor_parallel_size=self.ranks,
            pipeline_parallel_size=self.stages,
            **settings,
            **QUIET,
        )

    def answer(self, folder: Path | None, continues: bool) -> Row:
        """Times the first token of the conversation, or of its next turn."""
        llm = self.llm(folder)
        tokens = random_tokens(self.tokens, _VOCABULARY)
        if continues:
            tokens += random_tokens(_TURN, _VOCABULARY, 1)
        time.sleep(_PAUSE)
        began = time.perf_counter()
        (output,) = llm.generate([tokens], greedy(1), use_tqdm=False)
        first, disk = time.perf_counter() - began, llm.llm_engine.disk
        flushed = timed(disk.flush) if disk is not None else 0.0
        answer = list(output.outputs[0].token_ids)
        return {"first_s": first, "flush_s": flushed, "cached": output.num_cached_tokens, "answer": answer}

    def in_process(self, folder: Path | None, continues: bool) -> Row:
        """Does so in a process of its own."""
        return in_process("prefix_cache_disk", child=True, dir=folder, continues=continues, **vars(self))


def first(talk: Conversation, folder: Path) -> Iterator[Row]:
    """Yields first tokens after a restart."""
    begun = talk.in_process(folder, False)
    kept = list(folder.rglob("*.safetensors"))
    size = sum(path.stat().st_size for path in kept) / 1e6
    yield {"computed": talk.tokens, "first_s": begun["first_s"]}
    yield {"files": len(kept), "megabytes": size, "written_after_the_answer_s": begun["flush_s"]}
    without = talk.in_process(None, True)
    yield {"restart": "without the folder", "first_s": without["first_s"]}
    for way in ("with the folder", "page cache dropped"):
        times = []
        for _ in range(_ROUNDS):
            if way == "page cache dropped":
                _drop(kept)
            found = talk.in_process(folder, True)
            assert found["answer"] == without["answer"]
            times.append(found["first_s"])
        sooner = without["first_s"] / median(times)
        row = {"restart": way, "first_s": median(times), "each_s": times}
        yield {**row, "cached": found["cached"], "times_sooner": sooner}


def _drop(paths: list[Path]) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def decode(talk: Conversation, folder: Path) -> Iterator[Row]:
    """Yields the time of decoded tokens while blocks are written."""
    engines = {"without": talk.llm(None), "with": talk.llm(folder / "decode")}
    tokens = min(2000, talk.tokens)
    sides = {name: lambda number, llm=llm: _decode(llm, tokens, number) for name, llm in engines.items()}
    times = in_rounds(sides, _PAIRS)
    disk = engines["with"].llm_engine.disk
    assert disk is not None
    disk.flush()
    for name, each in times.items():
        yield {"folder": name, "token_ms": 1e3 * median(each), "each_ms": [1e3 * one for one in each]}
    longer = 100 * (median(times["with"]) / median(times["without"]) - 1)
    yield {"percent_longer": longer, "megabytes": disk.counts().bytes_written / 1e6}


def _decode(llm: LLM, tokens: int, seed: int) -> float:
    """Returns the seconds of a token from the end of a conversation's prompt on."""
    engine = llm.llm_engine
    engine.add_request(NewRequest("decodes", random_tokens(100, _VOCABULARY, 100 + seed), greedy(1000)))
    engine.add_request(NewRequest("ends", random_tokens(tokens, _VOCABULARY, 200 + seed), greedy(1)))
    while not any(output.finished for output in engine.step()):
        pass
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < _WINDOW:
        engine.step()
        steps += 1
    spent = time.perf_counter() - began
    engine.abort_request("decodes")
    if engine.disk is not None:
        engine.disk.flush()  # not in the time of the next round
    return spent / steps


def prefix_cache_disk(
    *,
    model: str = "smollm2",
    tokens: int = 8000,
    ranks: Annotated[int, "tensor_parallel_size, for first and decode"] = 1,
    stages: Annotated[int, "pipeline_parallel_size, likewise"] = 1,
    dir: Annotated[Path | None, "folder of the cache; default: a temporary one"] = None,  # noqa: A002
    only: tuple[str, ...] = ("first", "decode"),
    child: Annotated[bool, argparse.SUPPRESS] = False,
    continues: Annotated[bool, argparse.SUPPRESS] = False,
) -> Iterator[Row]:
    talk = Conversation(model, tokens, ranks, stages)
    if child:
        yield talk.answer(dir, continues)
        return
    with tempfile.TemporaryDirectory() as scratch:
        if model in SHAPES:
            save_random_model(shape_of(model), Path(scratch) / model)
            talk = replace(talk, model=str(Path(scratch) / model))
        for name in only:
            yield from {"first": first, "decode": decode}[name](talk, dir or Path(scratch) / "cache")


if __name__ == "__main__":
    run(prefix_cache_disk)
