"""OpenVINO GenAI on an INT4 export of the model by optimum-intel: its two pipelines, step by step."""

from __future__ import annotations

import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import openvino_genai as genai
from openvino import Tensor

from bench.peers.setup import Setup
from bench.peers.shapes import Shape
from bench.peers.work import Work

TOKENS = 2048  # of a step
CACHE = 1  # GB


def exported(shape: Shape, cache: Path) -> Path:
    """Return the folder of the model in INT4; the first call exports it, with random weights.

    The recipe is `optimum-cli`'s for ``int4``: asymmetric groups of 128, embedding and head in INT8.  Rows
    that 128 does not divide have the largest groups that fit.
    """
    folder = cache / shape.name / "openvino-int4"
    if not folder.exists():
        floats, scratch = folder.with_suffix(".float"), folder.with_suffix(".new")
        for old in (floats, scratch):
            shutil.rmtree(old, ignore_errors=True)
        _write_floats(shape, floats)
        command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        model = ["--model", str(floats), "--task", "text-generation-with-past"]
        recipe = ["--weight-format", "int4", "--group-size-fallback", "adjust"]
        # Its memory goes back to the machine with its process.
        subprocess.run([*command, *model, *recipe, str(scratch)], check=True)
        shutil.rmtree(floats)
        scratch.rename(folder)
    return folder


def _write_floats(shape: Shape, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape.config)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def _ids(prompt: list[int]) -> Tensor:
    return Tensor(np.array([prompt], dtype=np.int64))


def _greedy(new_tokens: int) -> Any:
    return genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)


class Paged:
    """Continuous batching over a paged KV cache with prefix caching."""

    def __init__(self, folder: Path, properties: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = TOKENS
        scheduler.max_num_seqs = 16
        scheduler.cache_size = CACHE
        scheduler.enable_prefix_caching = True
        self.pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self.numbers = count()
        self.handles: dict[str, Any] = {}

    def start(self, name: str, prompt: list[int], new_tokens: int) -> None:
        """Submit a request."""
        self.handles[name] = self.pipeline.add_request(next(self.numbers), _ids(prompt), _greedy(new_tokens))

    def step(self) -> dict[str, list[int]]:
        """Compute a step; return the new tokens by request."""
        self.pipeline.step()
        ready = {name: handle for name, handle in self.handles.items() if handle.can_read()}
        return {
            name: [token for output in handle.read().values() for token in output.generated_ids]
            for name, handle in ready.items()
        }

    def stop(self, name: str) -> None:
        """End a request."""
        self.handles.pop(name).cancel()
        if not self.handles and self.pipeline.has_non_finished_requests():
            self.pipeline.step()  # drops canceled requests


class _Stream(genai.StreamerBase):
    """Queue of the tokens of one request, and of the exception that ended it."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: SimpleQueue[list[int] | Exception] = SimpleQueue()
        self.stopped = False

    def write(self, tokens: int | list[int]) -> Any:
        self.queue.put(tokens if isinstance(tokens, list) else [tokens])
        return genai.StreamingStatus.CANCEL if self.stopped else genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class Stateful:
    """The pipeline of one sequence, whose KV cache is the model's state.

    It has no steps: a thread generates, and a step waits for the thread's next token.
    """

    def __init__(self, folder: Path, properties: dict[str, Any]) -> None:
        self.pipeline = genai.LLMPipeline(str(folder), "CPU", ATTENTION_BACKEND="SDPA", **properties)
        self.running: tuple[str, _Stream, Thread] | None = None

    def start(self, name: str, prompt: list[int], new_tokens: int) -> None:
        """Start a request.

        Raises:
            RuntimeError: another request runs.
        """
        if self.running is not None:
            raise RuntimeError("the stateful pipeline runs one request at a time")
        stream = _Stream()
        thread = Thread(target=self._generate, args=(_ids(prompt), _greedy(new_tokens), stream), daemon=True)
        self.running = name, stream, thread
        thread.start()

    def _generate(self, ids: Tensor, config: Any, stream: _Stream) -> None:
        try:
            self.pipeline.generate(ids, config, stream)
            stream.queue.put(RuntimeError("the request has no more tokens"))
        except Exception as error:
            stream.queue.put(error)

    def step(self) -> dict[str, list[int]]:
        """Wait for the next token."""
        assert self.running is not None
        name, stream, _ = self.running
        tokens = stream.queue.get()
        if isinstance(tokens, Exception):
            raise tokens
        return {name: tokens}

    def stop(self, name: str) -> None:
        """End the request."""
        assert self.running is not None
        _, stream, thread = self.running
        stream.stopped = True
        thread.join()
        self.running = None


class OpenVino:
    """See `work.Engine`.  Keeps the last few pipelines, one for each setting."""

    KEPT = 2

    def __init__(self, folder: Path, threads: int) -> None:
        self.folder, self.threads = folder, threads
        self.pipelines: dict[str, Paged | Stateful] = {}
        self.current: Paged | Stateful | None = None

    def ways(self, work: Work) -> list[str]:
        kinds = ["stateful", "paged"] if work.sequences == 1 else ["paged", "paged, throughput"]
        return [way for kind in kinds for way in (kind, f"{kind}, groups of 128")]

    def prepare(self, work: Work, way: str) -> None:
        if way not in self.pipelines:
            while len(self.pipelines) >= self.KEPT:
                self.current = None
                del self.pipelines[next(iter(self.pipelines))]
            self.pipelines[way] = self._pipeline(way)
        self.current = self.pipelines[way]

    def _pipeline(self, way: str) -> Paged | Stateful:
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": self.threads,
            "PERFORMANCE_HINT": "THROUGHPUT" if "throughput" in way else "LATENCY",
        }
        if "groups of 128" in way:  # of activations, as of weights; the default is 32
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 128
        return (Stateful if way.startswith("stateful") else Paged)(self.folder, properties)

    def start(self, name: str, prompt: list[int], new_tokens: int) -> None:
        assert self.current is not None
        self.current.start(name, prompt, new_tokens)

    def step(self) -> dict[str, list[int]]:
        assert self.current is not None
        return self.current.step()

    def stop(self, name: str) -> None:
        assert self.current is not None
        self.current.stop(name)


def load(setup: Setup) -> OpenVino:
    """Load the engine."""
    return OpenVino(exported(setup.shape, setup.cache), setup.threads)
