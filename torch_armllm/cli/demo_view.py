"""The demo: a dense and a Mixture-of-Experts model, each in bfloat16 and in INT4, side by side.

The dense one comes as a 4-bit file, whose integers its INT4 side keeps; the Mixture-of-Experts, which is made
of bfloat16 weights, is quantized.
"""

from __future__ import annotations

import copy
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from torch_armllm._version import __version__
from torch_armllm.benchmark.latency import weight_bytes
from torch_armllm.checkpoint.load import load_model, load_tokenizer
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.checkpoint.source_name import DENSE, MOE
from torch_armllm.cli.side_by_side import SideBySide
from torch_armllm.cli.timed_completion import Completion, TimedStreamer
from torch_armllm.evaluation.distributions import compare_logits
from torch_armllm.patching.patch import patch
from torch_armllm.system.progress import progress_bar

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Give me three tips for healthy eating.",
    "What is machine learning?",
)


def run_demo(
    source: str | None = None,
    prompts: Sequence[str] = PROMPTS,
    max_new_tokens: int = 48,
    quantization: str = "auto",
) -> None:
    """Compares models before and after patching; by default the bundled model, dense and upcycled to MoE.

    Args:
        source: a checkpoint's folder or a hub name; see `torch_armllm.checkpoint.load.load_model`.
        prompts: user messages.
        max_new_tokens: most tokens per reply.
        quantization: see `torch_armllm.LLM`.
    """
    machine = f"{torch.get_num_threads()} threads, kernels {_variant()}"
    print(f"torch_armllm {__version__}: {machine}")
    for name in [source] if source else [DENSE, MOE]:
        compare(name, prompts, max_new_tokens, quantization)


def compare(source: str, prompts: Sequence[str], max_new_tokens: int, quantization: str) -> None:
    """Generates with one model in bfloat16, then in INT4, and prints the replies next to each other."""
    _headline(source)
    start = time.perf_counter()
    model = load_model(source, progress=True)
    tokenizer = load_tokenizer(source)
    dtype, size = f"{model.dtype}".removeprefix("torch."), weight_bytes(model)
    seconds = time.perf_counter() - start
    print(f"{_parameters(model)} in {dtype}, {size / 1e6:.0f} MB, loaded in {seconds:.1f} s")
    before = []
    for prompt in progress_bar(prompts, desc="Generating with transformers, unpatched", unit="prompt"):
        before.append(_generate(model, tokenizer, prompt, max_new_tokens, lambda text: None))
    logits = [reply_logits(model, reply) for reply in before]

    model, name = _quantized(model, source, quantization)
    width = max(24, (min(shutil.get_terminal_size((120, 24)).columns, 160) - 5) // 2)
    after = []
    for prompt, old in zip(prompts, before, strict=True):
        print(f"\n> {prompt}\n  {f'transformers {dtype}':<{width}} │ {name}")
        columns = SideBySide(old.text, width)
        after.append(_generate(model, tokenizer, prompt, max_new_tokens, columns.put))
        columns.end()
        speeds = [f"{completion.tokens_per_second:.1f} tokens/s" for completion in (old, after[-1])]
        print(f"  {speeds[0]:<{width}} │ {speeds[1]}")
    fast, slow = (_speed(completions) for completions in (after, before))
    ratio = f": {fast / slow:.1f} times as fast" if slow > 0 else ""
    print(
        f"\n{source}: {slow:.1f} -> {fast:.1f} tokens/s{ratio}; "
        f"{size / 1e6:.0f} -> {weight_bytes(model) / 1e6:.0f} MB of weights"
    )
    divergences, same = compare_logits(
        torch.cat(logits), torch.cat([reply_logits(model, reply) for reply in before])
    )
    print(
        f"on the {len(same)} tokens of the {dtype} replies: KL divergence {float(divergences.mean()):.4f} "
        f"nats, {float(same.float().mean()):.1%} with the same most probable token",
        flush=True,
    )


def _quantized(model: PreTrainedModel, source: str, quantization: str) -> tuple[PreTrainedModel, str]:
    """Returns the model in INT4 and the name of what it computes from, and prints its report."""
    request = ModelRequest(source, quantization=quantization).resolved()
    start = time.perf_counter()
    if request.source != source:
        model = load_model(request.source, model.dtype)
        report, done = model.hf_quantizer.report, f"the 4-bit integers of {source}'s own file, loaded"
        name = "patched, the file's own INT4"
    else:
        scheme = str(request.quantization)
        report, done, name = patch(model, scheme), "patched", f"patched, {scheme.upper()}"
    seconds = time.perf_counter() - start
    print(f"\n{done} in {seconds:.1f} s:\n{textwrap.indent(str(report), '  ')}")
    return model, name


@torch.no_grad()
def reply_logits(model: PreTrainedModel, reply: Completion) -> Tensor:
    """Returns the logits ``(tokens, vocab_size)`` from which each token of a reply is predicted."""
    if not reply.tokens:
        return torch.empty(0, model.config.get_text_config().vocab_size)
    logits: Tensor = model(reply.ids[:, :-1]).logits[0, -reply.tokens :]
    return logits


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
    ids = model.generate(**inputs, generation_config=config, streamer=streamer)
    return streamer.completion(ids)


def _speed(completions: Sequence[Completion]) -> float:
    """Returns the tokens per second over all completions."""
    rated = [completion for completion in completions if completion.tokens_per_second > 0]
    spent = sum((completion.tokens - 1) / completion.tokens_per_second for completion in rated)
    return sum(completion.tokens - 1 for completion in rated) / spent if spent > 0 else 0.0


def _parameters(model: PreTrainedModel) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters"


def _variant() -> str:
    from torch_armllm.ops import variants

    return variants.machine().compiled


def _headline(text: str) -> None:
    print(f"\n{'─' * 4} {text} {'─' * max(4, 72 - len(text))}")
    sys.stdout.flush()
