"""Prefix-cache hits and time to first token of every turn of a long conversation.

    python -m bench.engine_conversation [--model smollm2] [--turns 30] [--answer 40] [--threads N]

Holds the same conversation twice, with the prefix cache and without.  Prints for each turn
its prompt tokens, its cached prompt tokens, and the TTFT of both conversations in milliseconds.
"""

from __future__ import annotations

import argparse
from typing import Any

from torch_armllm import LLM, SamplingParams

QUESTIONS = (
    "What is the capital of France?",
    "Tell me one thing about it.",
    "And its river?",
    "Why do people visit it?",
    "How would I get there from London?",
    "What should I eat there?",
)


def main() -> None:
    """Runs both conversations and prints them side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--answer", type=int, default=40, help="most tokens of an answer")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    cached, uncached = (converse(options, caching) for caching in (True, False))
    print("turn  prompt  cached   hit rate   first token, ms: cached / not")
    for number, (one, other) in enumerate(zip(cached, uncached, strict=True), 1):
        rate = one["cached"] / one["prompt"]
        print(
            f"{number:4d}  {one['prompt']:6d}  {one['cached']:6d}   {rate:7.1%}   "
            f"{one['ms']:10.1f} / {other['ms']:.1f}"
        )
    prompt_tokens = sum(turn["prompt"] for turn in cached)
    print(
        f"of {prompt_tokens} prompt tokens, "
        f"{sum(turn['cached'] for turn in cached) / prompt_tokens:.1%} were cached"
    )


def converse(options: argparse.Namespace, caching: bool) -> list[dict[str, Any]]:
    """Hold a conversation; return prompt tokens, cached tokens and TTFT of each turn."""
    llm = LLM(
        options.model,
        quantization="int4",
        enable_prefix_caching=caching,
        disable_log_stats=True,
        speculative_config=None,
        progress=False,
        threads=options.threads,
    )
    params = SamplingParams(temperature=0, max_tokens=options.answer)
    messages: list[dict[str, Any]] = []
    turns = []
    for turn in range(options.turns):
        messages.append({"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]})
        (output,) = llm.chat(messages, params, use_tqdm=False)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        metrics = output.metrics
        assert metrics.first_token_time is not None
        turns.append(
            {
                "prompt": len(output.prompt_token_ids),
                "cached": output.num_cached_tokens,
                "ms": 1e3 * (metrics.first_token_time - metrics.arrival_time),
            }
        )
    return turns


if __name__ == "__main__":
    main()
