"""How what a user submits becomes a request."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from torch_armllm.engine.outputs import RequestMetrics
from torch_armllm.engine.request import Request
from torch_armllm.engine.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its tokens, ``{"prompt": text}`` or ``{"prompt_token_ids": tokens}``."""

_SEEDS = 2**63


class Intake:
    """Makes requests of prompts, and refuses what cannot be served.

    Args:
        tokenizer: of the model; None where all prompts are tokens.
        vocabulary: token ids that the model knows.
        max_model_len: most tokens of a prompt and its answer.
        seed: from which requests without a seed of their own get one; None: from the system.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocabulary: int,
        max_model_len: int,
        seed: int | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.max_model_len = max_model_len
        self._seeds = random.Random(seed)

    def request(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0) -> Request:
        """A new request.

        Raises:
            ValueError: the prompt is empty, too long, holds unknown tokens, or the parameters do not fit.
        """
        text, tokens = self._tokens(prompt)
        self._check(tokens)
        params.check_for(self.vocabulary)
        seed = params.seed if params.seed is not None else self._seeds.randrange(_SEEDS)
        arrival = RequestMetrics(arrival_time=time.monotonic())
        return Request(request_id, tokens, params, seed, text, priority, arrival)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise ValueError(
                    f"a prompt needs 'prompt' or 'prompt_token_ids'; it has {', '.join(prompt) or 'nothing'}"
                )
            prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            return None, list(prompt)  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer; give the prompt as prompt_token_ids")
        return prompt, list(self.tokenizer(prompt)["input_ids"])

    def _check(self, tokens: list[int]) -> None:
        if not tokens:
            raise ValueError("the prompt holds no token")
        if len(tokens) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, but max_model_len is {self.max_model_len} with the answer: "
                "shorten the prompt, or raise max_model_len if the model allows it"
            )
        wrong = next((t for t in tokens if not isinstance(t, int) or not 0 <= t < self.vocabulary), None)
        if wrong is not None:
            raise ValueError(
                f"token ids must be integers in 0 … {self.vocabulary - 1}; the prompt has {wrong!r}"
            )
