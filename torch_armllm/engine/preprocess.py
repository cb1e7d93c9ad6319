"""How what a user submits becomes a request."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_armllm.engine.outputs import RequestMetrics
from torch_armllm.engine.request import Request
from torch_armllm.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its tokens, ``{"prompt": text}`` or ``{"prompt_token_ids": tokens}``."""

_SEEDS = 2**63


class Preprocessor:
    """Makes requests of prompts, and refuses what cannot be served.

    Args:
        tokenizer: of the model; None where all prompts are tokens.
        max_model_len: most tokens of a prompt and its answer.
        check: raises ValueError for parameters and prompts that do not fit the model; see `Sampler.check`.
        seed: from which requests without a seed of their own get one; None: from the system.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        max_model_len: int,
        check: Callable[[SamplingParams, list[int]], None],
        seed: int | None,
    ) -> None:
        self.tokenizer = tokenizer
        self._check_params = check
        self.max_model_len = max_model_len
        self._seeds = random.Random(seed)

    def build_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> Request:
        """A new request.

        Raises:
            ValueError: the prompt is empty, too long, holds unknown tokens, or the parameters do not fit.
        """
        text, tokens = self._tokens(prompt)
        self._check_length(tokens)
        self._check_params(params, tokens)
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

    def _check_length(self, tokens: list[int]) -> None:
        if not tokens:
            raise ValueError("the prompt holds no token")
        if len(tokens) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, but max_model_len is {self.max_model_len}, the answer "
                "included: shorten the prompt, or raise max_model_len if the model allows it"
            )
