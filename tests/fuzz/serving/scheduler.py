"""Target: random requests through the engine of a tiny model, with few KV blocks and random aborts.

Every request that finishes has the tokens, log-probabilities, text and finish reason of the same request run
alone.  A request that is aborted, or whose step fails, leaves the others as they are.  At the end no block,
no slot and no text is held.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

import torch_armllm
from tests.support.models import tiny
from tests.support.tiny_server import tokenizer
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.errors import StepFailedError
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.outputs import CompletionOutput, RequestOutput
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from torch_armllm.engine.text.preprocess import NewRequest
from torch_armllm.kv_cache.dtype_names import StateDtype
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.patching.state import patched_forward

FAMILIES = ("llama", "llama", "mistral", "qwen3_moe", "qwen3_5_text", "lfm2")
"""Full attention twice, a sliding window, experts, and recurrent layers with large and small states."""
RECURRENT = ("qwen3_5_text", "lfm2")
MAX_MODEL_LEN = 160
VOCABULARY = 259
MAX_STEPS = 5000
PREFIXES = ([*range(3, 100)], [5, 6, 7] * 40)
"""Beginnings of prompts, so that requests share blocks; n-grams of the second one are drafted."""


class Finding(Exception):
    """An output that differs from the request's own, or something that the engine did not free."""


@dataclass
class Submitted:
    """A request, and what its outputs have contained so far.

    Attributes:
        prompt: token ids.
        params: as submitted.
        tokens: by completion.
        texts: by completion.
        reasons: finish and stop reason by completion.
        logprobs: by completion.
        prompt_logprobs: of the last output.
        finished: True after the last output.
    """

    prompt: list[int]
    params: SamplingParams
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, Any] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    prompt_logprobs: Any = None
    finished: bool = False

    def add(self, output: RequestOutput) -> None:
        """Adds an output of the engine; raises Finding if it takes back what an earlier output contained."""
        if self.finished:
            raise Finding(f"request {output.request_id} has outputs after its end")
        self.finished = output.finished
        self.prompt_logprobs = output.prompt_logprobs
        for completion in output.outputs:
            self._add_completion(completion)

    def _add_completion(self, new: CompletionOutput) -> None:
        index, delta = new.index, self.params.output_kind is RequestOutputKind.DELTA
        tokens, text = self.tokens.get(index, []), self.texts.get(index, "")
        logprobs = self.logprobs.get(index, [])
        if not delta and not (new.token_ids[: len(tokens)] == tokens and new.text.startswith(text)):
            raise Finding(f"completion {index} was {text!r}, {tokens}; it is {new.text!r}, {new.token_ids}")
        self.tokens[index] = tokens + new.token_ids if delta else list(new.token_ids)
        self.texts[index] = text + new.text if delta else new.text
        self.logprobs[index] = logprobs + (new.logprobs or []) if delta else list(new.logprobs or [])
        self.reasons[index] = (new.finish_reason, new.stop_reason)

    @property
    def result(self) -> list[Any]:
        """Everything that has to be equal."""
        return [self.tokens, self.texts, self.reasons, self.logprobs, self.prompt_logprobs]


@cache
def _model(family: str, seed: int = 0) -> Any:
    make = tiny_model if family in RECURRENT else tiny
    model = make(family, seed=seed, vocab_size=VOCABULARY, max_position_embeddings=512)
    torch_armllm.patch(model, progress=False)
    return model


@cache
def _alone(family: str, state_dtype: StateDtype) -> LLMEngine:
    settings = EngineConfig(
        kv_cache_memory=4 << 20,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
        state_dtype=state_dtype,
        threads=1,
    )
    return build_engine(_model(family), tokenizer(), settings)


def _memory(block: int, blocks: int, states: int, speculative: dict[str, Any] | None) -> int:
    """Returns bytes for so many blocks, states and, beside them, the cache of a draft model."""
    memory, model = block * blocks + states, (speculative or {}).get("model")
    if model is None:
        return memory
    forward = patched_forward(model)
    assert forward is not None
    own = forward.shape.block_size * forward.shape.bytes_per_token
    state = forward.shape.states.bytes_per_sequence
    memory = memory + own * blocks if block else memory * 4 // 3 + 4 * own
    return memory * 4 // 3 + 4 * state if state else memory


def _engine(draw: random.Random, family: str, state_dtype: StateDtype) -> LLMEngine:
    """Builds an engine with few blocks, and with or without each of its features."""
    forward = patched_forward(_model(family))
    assert forward is not None
    block = forward.shape.block_size * forward.shape.bytes_per_token
    least = -(-MAX_MODEL_LEN // forward.shape.block_size)
    chunked = draw.random() < 0.8
    speculative: dict[str, Any] | None = draw.choice([
        None,
        None,
        {"method": "ngram", "num_speculative_tokens": draw.randint(1, 5)},
        {"method": "draft_model", "model": _model("llama", 1), "num_speculative_tokens": draw.randint(1, 4)},
        {"method": "draft_model", "model": _model("lfm2", 1), "num_speculative_tokens": draw.randint(1, 4)},
    ])  # fmt: skip
    states = forward.shape.states.bytes_per_sequence * draw.choice([3, 4, 8, 20])
    settings = EngineConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=draw.choice([1, 2, 3, 5, 8]),
        max_num_batched_tokens=draw.choice([8, 11, 40, MAX_MODEL_LEN]) if chunked else MAX_MODEL_LEN,
        max_step_time=draw.choice([None, 0.2, 1e-6]),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=draw.random() < 0.7,
        kv_cache_memory=_memory(
            block, draw.choice([least, least + 1, least + 2, 2 * least]), states, speculative
        ),
        state_dtype=state_dtype,
        swap_space=block * draw.choice([0, 0, 2, 12]),
        speculative_config=speculative,
        threads=1,
    )
    return build_engine(_model(family), tokenizer(), settings)


def _prompt(draw: random.Random) -> list[int]:
    prefix = draw.choice(PREFIXES)[: draw.choice([0, 5, 31, 32, 33, 64, 70, 96])]
    own = [draw.randrange(3, VOCABULARY) for _ in range(draw.choice([0, 1, 2, 17, 40]))]
    return prefix + own or [draw.randrange(VOCABULARY)]


def _params(draw: random.Random, seed: int) -> SamplingParams:
    """Returns parameters that are valid alone; most settings keep their defaults."""
    settings: dict[str, Any] = {
        "seed": seed,
        "temperature": draw.choice([0.0, 0.0, 0.9, 3.0]),
        "max_tokens": draw.choice([1, 2, 5, 30, 60, None]),
        "ignore_eos": draw.random() < 0.5,
        "output_kind": draw.choice(list(RequestOutputKind)),
    }
    if settings["temperature"]:
        settings["n"] = draw.choice([1, 1, 2, 3])
        if draw.random() < 0.1:
            settings["best_of"] = settings["n"] + draw.randint(0, 2)
    characters = [chr(draw.choice([draw.randrange(33, 127), draw.randrange(161, 800)])) for _ in range(6)]
    ids = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 60))]
    rare: dict[str, Any] = {
        "logprobs": draw.choice([0, 1, 5, -1]),
        "prompt_logprobs": draw.choice([0, 2]),
        "stop": [*characters, "".join(characters[:2])],
        "include_stop_str_in_output": True,
        "stop_token_ids": ids[:9],
        "allowed_token_ids": ids,
        "logit_bias": {token: draw.uniform(-9, 9) for token in ids},
        "bad_words": characters,
        "top_k": draw.choice([1, 2, 50]),
        "top_p": draw.uniform(0.01, 1),
        "min_p": draw.random(),
        "presence_penalty": draw.uniform(-2, 2),
        "frequency_penalty": draw.uniform(-2, 2),
        "repetition_penalty": draw.choice([0.5, 1.3]),
        "skip_special_tokens": False,
        "structured_outputs": StructuredOutputsParams(
            **draw.choice([{"choice": ["yes", "no", "größer"]}, {"regex": "[a-z]{3}[0-9]*(yes|no)"}])
        ),
    }
    for name in draw.sample(list(rare), draw.choice([0, 0, 1, 2, 4])):
        settings[name] = rare[name]
    if draw.random() < 0.15:
        settings["min_tokens"] = draw.randint(0, settings["max_tokens"] or 20)
    return SamplingParams(**settings)


def _expected(family: str, state_dtype: StateDtype, request: Submitted) -> list[Any]:
    """Returns the result of a request that runs alone."""
    engine = _alone(family, state_dtype)
    alone = Submitted(request.prompt, request.params)
    engine.add_request(NewRequest("alone", request.prompt, request.params))
    while engine.has_unfinished_requests():
        for output in engine.step():
            alone.add(output)
    return alone.result


class Machine:
    """An engine under test, with the requests that were submitted to it.

    Args:
        draw: source of all choices.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.family = draw.choice(FAMILIES)
        self.state_dtype: StateDtype = draw.choice(["float32", "bfloat16"])
        self.engine = _engine(draw, self.family, self.state_dtype)
        self.fault_rate = draw.choice([0, 0, 0, 0.02])
        self.live: dict[str, Submitted] = {}
        self.finished: dict[str, Submitted] = {}
        self.aborted: dict[str, Submitted] = {}
        self.steps = 0

    def submit(self, number: int) -> None:
        """Submits a random request; one that no engine can serve is refused by ValueError."""
        request = Submitted(_prompt(self._draw), _params(self._draw, number))
        name, too_many = str(number), request.params.num_sequences > self.engine.scheduler.config.max_num_seqs
        try:
            self.engine.add_request(
                NewRequest(name, request.prompt, request.params, self._draw.choice([0, 0, 0, -1, 2]))
            )
        except ValueError:
            if not too_many and len(request.prompt) < MAX_MODEL_LEN:
                raise
            return
        self.live[name] = request

    def abort(self) -> None:
        """Aborts a random request, among them some that have ended."""
        name = self._draw.choice([*self.live, *self.finished, "unknown"])
        outputs = self.engine.abort_request(name)
        if name in self.live:
            request = self.aborted[name] = self.live.pop(name)
            for output in outputs:
                request.add(output)
            if not request.finished:
                raise Finding(f"request {name} was aborted, and has not finished")
        elif outputs:
            raise Finding(f"request {name} was not running, and aborting it returned {outputs}")

    def step(self) -> None:
        """Runs a step, which sometimes fails."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Finding(f"requests {list(self.live)} do not end")
        begin = self.engine.runner.begin
        runner: Any = self.engine.runner
        if self._draw.random() < self.fault_rate:
            runner.begin = _fail
        try:
            outputs = self.engine.step()
        except StepFailedError as failure:
            if not isinstance(failure.__cause__, _InjectedError):
                raise
            for name in failure.request_ids:
                del self.live[name]
            return
        finally:
            runner.begin = begin
        for output in outputs:
            request = self.live[output.request_id]
            request.add(output)
            if output.finished:
                self.finished[output.request_id] = self.live.pop(output.request_id)

    def drain(self) -> None:
        """Runs the engine until it is idle."""
        while self.engine.has_unfinished_requests():
            self.step()
        if self.live:
            raise Finding(f"the engine is idle, and requests {list(self.live)} have not finished")

    def check(self) -> None:
        """Compares the results with single runs, and looks for what is still held."""
        engine, blocks = self.engine, self.engine.scheduler.blocks
        scheduler: Any = engine.scheduler
        held = {
            "blocks": blocks.num_blocks - blocks.free,
            "references": sum(blocks._references),
            "swap blocks": blocks.swap_blocks - blocks.swap.free,
            "slots": scheduler._slots,
            "keys": len(scheduler._keys),
            "sequences": len(scheduler._running) + len(scheduler._waiting),
            "texts": len(engine._texts),
            "outputs": len(engine._output_builder._reported),
        }
        if blocks.states is not None:
            held["states"] = len(blocks.states) - blocks.states.free + blocks.states.saved
            held["swapped states"] = len(blocks.swapped_states) - blocks.swapped_states.free
        if any(held.values()):
            raise Finding(f"the idle engine holds {held}")
        for name, request in self.finished.items():
            expected = _expected(self.family, self.state_dtype, request)
            if request.result != expected:
                raise Finding(f"request {name}, {request.params}:\n{request.result}\nalone:\n{expected}")
        for name, request in self.aborted.items():
            if request.params.selects_best:
                continue
            tokens = _expected(self.family, self.state_dtype, request)[0]
            for index, found in request.tokens.items():
                if tokens[index][: len(found)] != found:
                    raise Finding(f"aborted request {name}, {request.params}: {found} of {tokens[index]}")


class _InjectedError(Exception):
    """A failure of the runner."""


def _fail(*arguments: Any) -> Any:
    raise _InjectedError


def run(seed: int) -> None:
    """Runs random operations on an engine until it is idle, and checks the results.

    Raises:
        Finding: a result differs from that of the request alone, or something is not freed.
        Exception: an error of the engine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # with several, torch's matrix products may depend on addresses
    try:
        _run(random.Random(f"scheduler {seed}"))
    finally:
        torch.set_num_threads(before)


def _run(draw: random.Random) -> None:
    machine = Machine(draw)
    for number in range(draw.randint(1, 9)):
        machine.submit(number)
        for _ in range(draw.choice([0, 0, 1, 3, 20])):
            machine.step()
        if draw.random() < 0.15:
            machine.abort()
    machine.drain()
    machine.check()
