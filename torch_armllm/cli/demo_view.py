"""The demo: a dense and a Mixture-of-Experts model, each in bfloat16 and in INT4, side by side."""

from __future__ import annotations

import copy
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from torch_armllm._version import __version__
from torch_armllm.benchmark.latency import weight_bytes
from torch_armllm.checkpoint.load import DENSE, MOE, load_model, load_tokenizer
from torch_armllm.patching.patch import patch
from torch_armllm.system.progress import progress_bar

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Give me three tips for healthy eating.",
    "What is machine learning?",
)


@dataclass(frozen=True)
class Completion:
    """A generated text and its decode rate."""

    text: str
    tokens: int
    tokens_per_second: float


class TimedStreamer(TextStreamer):
    """Streams finished pieces of text to a callback and records when tokens arrived."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.text = ""
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Receives the prompt first, then each token."""
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Receives each piece of text that no later token can change."""
        self.text += text
        self.on_text(text)

    def completion(self) -> Completion:
        """Returns the completion; its rate is that of decoding, without the first token."""
        steps = len(self.times) - 2
        spent = self.times[-1] - self.times[1] if steps > 0 else 0.0
        return Completion(self.text, max(len(self.times) - 1, 0), steps / spent if spent > 0 else 0.0)


class SideBySide:
    """Prints a finished text on the left and a streamed text on the right."""

    def __init__(self, left: str, width: int) -> None:
        self.width = width
        self.left = _wrap(left, width)
        self.right = ""
        self.printed = 0

    def put(self, text: str) -> None:
        """Adds a piece to the right text and prints its complete lines."""
        self.right += text
        self._print(_wrap(self.right, self.width)[:-1])

    def end(self) -> None:
        """Prints the rest of both texts."""
        lines = _wrap(self.right, self.width)
        self._print(lines + [""] * (len(self.left) - len(lines)))

    def _print(self, lines: list[str]) -> None:
        for index in range(self.printed, len(lines)):
            left = self.left[index] if index < len(self.left) else ""
            print(f"  {left:<{self.width}} │ {lines[index]}", flush=True)
            self.printed += 1


def run_demo(
    source: str | None = None,
    prompts: Sequence[str] = PROMPTS,
    max_new_tokens: int = 48,
    quantization: str = "int4",
) -> None:
    """Compares models before and after patching; by default the bundled model, dense and upcycled to MoE.

    Args:
        source: a checkpoint's folder or a hub name; see `torch_armllm.checkpoint.load.load_model`.
        prompts: user messages.
        max_new_tokens: most tokens per reply.
        quantization: see `torch_armllm.patch`.
    """
    machine = f"{torch.get_num_threads()} threads, kernels {_variant()}"
    print(f"torch_armllm {__version__}: {machine}")
    for name in [source] if source else [DENSE, MOE]:
        compare(name, prompts, max_new_tokens, quantization)


def compare(source: str, prompts: Sequence[str], max_new_tokens: int, quantization: str) -> None:
    """Generates with one model, patches it, and prints its new replies next to the first ones."""
    _headline(source)
    start = time.perf_counter()
    model = load_model(source, progress=True)
    tokenizer = load_tokenizer(source)
    size = weight_bytes(model)
    seconds = time.perf_counter() - start
    print(f"{_parameters(model)} in {model.dtype}, {size / 1e6:.0f} MB, loaded in {seconds:.1f} s")
    before = []
    for prompt in progress_bar(prompts, desc="Generating with transformers, unpatched", unit="prompt"):
        before.append(_generate(model, tokenizer, prompt, max_new_tokens, lambda text: None))

    start = time.perf_counter()
    report = patch(model, quantization)
    print(f"\npatched in {time.perf_counter() - start:.1f} s:\n{textwrap.indent(str(report), '  ')}")

    width = max(24, (min(shutil.get_terminal_size((120, 24)).columns, 160) - 5) // 2)
    names = (f"transformers {model.dtype}".replace("torch.", ""), f"patched, {quantization.upper()}")
    after = []
    for prompt, old in zip(prompts, before, strict=True):
        print(f"\n> {prompt}\n  {names[0]:<{width}} │ {names[1]}")
        columns = SideBySide(old.text, width)
        after.append(_generate(model, tokenizer, prompt, max_new_tokens, columns.put))
        columns.end()
        speeds = [f"{completion.tokens_per_second:.1f} tokens/s" for completion in (old, after[-1])]
        print(f"  {speeds[0]:<{width}} │ {speeds[1]}")
    fast, slow = (_speed(completions) for completions in (after, before))
    ratio = f": {fast / slow:.1f} times as fast" if slow > 0 else ""
    print(
        f"\n{source}: {slow:.1f} -> {fast:.1f} tokens/s{ratio}; "
        f"{size / 1e6:.0f} -> {weight_bytes(model) / 1e6:.0f} MB of weights",
        flush=True,
    )


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int,
    on_text: Callable[[str], None],
) -> Completion:
    if tokenizer.chat_template:
        message = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    streamer = TimedStreamer(tokenizer, on_text)
    config = copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=max_new_tokens, do_sample=False, temperature=None, top_p=None, top_k=None)
    model.generate(**inputs, generation_config=config, streamer=streamer)
    return streamer.completion()


def _speed(completions: Sequence[Completion]) -> float:
    """Returns the tokens per second over all completions."""
    rated = [completion for completion in completions if completion.tokens_per_second > 0]
    spent = sum((completion.tokens - 1) / completion.tokens_per_second for completion in rated)
    return sum(completion.tokens - 1 for completion in rated) / spent if spent > 0 else 0.0


def _wrap(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for paragraph in text.split("\n"):
        lines += textwrap.wrap(paragraph, width) or [""]
    return lines


def _parameters(model: PreTrainedModel) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters"


def _variant() -> str:
    from torch_armllm.ops import variants

    return variants.machine().selected


def _headline(text: str) -> None:
    print(f"\n{'─' * 4} {text} {'─' * max(4, 72 - len(text))}")
    sys.stdout.flush()
