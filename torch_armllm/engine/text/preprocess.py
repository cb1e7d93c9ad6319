"""Preprocessing: from a submitted prompt to a request."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_armllm.engine.images.reader import PictureReader
from torch_armllm.engine.outputs import RequestMetrics
from torch_armllm.engine.request import Request
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.text.prompt_limit import PromptLimit
from torch_armllm.engine.text.tokenization import Tokenization
from torch_armllm.lora.adapter_table import PreparedAdapter
from torch_armllm.lora.request import LoRARequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its tokens, ``{"prompt": text}`` or ``{"prompt_token_ids": tokens}``.  A text with images,
sound or videos is ``{"prompt": text, "multi_modal_data": {"image": image or images, "audio": …}}``."""

_NUM_SEEDS = 2**63
_FIELDS = ("prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs")
_REFUSED = {
    "prompt_embeds": "prompts are texts or tokens",
    "cache_salt": "the prefix cache is shared by all prompts, and a salt would part them",
    "encoder_prompt": "encoder-decoder models run with generate of the patched model",
    "decoder_prompt": "encoder-decoder models run with generate of the patched model",
    "multi_modal_uuids": "images, sound and videos are known by their contents",
}
"""Fields of a prompt, and reasons for which vLLM's others do not exist."""


class NewRequest(NamedTuple):
    """A request as it is submitted to an engine.

    Attributes:
        request_id: unique among unfinished requests.
        prompt: a text or token ids; see `Prompt`.
        params: sampling parameters.
        priority: smaller values are served first.
        lora_request: the adapter that computes it; None: the model alone.
        prepared: the adapter as `LLMEngine.prepare_lora` has read it; None: it is read when the request is
            added, unless it is loaded.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    lora_request: LoRARequest | None = None
    prepared: PreparedAdapter | None = None

    def check_id(self, running: Container[str]) -> None:
        """Raises ValueError if the id is that of a running request."""
        if self.request_id in running:
            raise ValueError(
                f"request {self.request_id!r} is running already; give each request an id of its own"
            )


class Preprocessor:
    """Tokenizes and checks prompts, and builds requests.

    Args:
        tokenizer: of the model; None: all prompts are token ids.
        max_model_len: most tokens of prompt and output.
        check: raises ValueError for parameters or prompts that the model cannot serve; see `Sampler.check`.
        seed: source of the seeds of requests without their own; None: system entropy.
        pictures: reads prompts with pictures; or the reason why the model takes none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        max_model_len: int,
        check: Callable[[SamplingParams, list[int]], None],
        seed: int | None,
        pictures: PictureReader | str = "this engine takes no pictures",
    ) -> None:
        self.tokenizer = tokenizer
        self._check_params = check
        self.max_model_len = max_model_len
        self.prompt_limit = None if tokenizer is None else PromptLimit(tokenizer, max_model_len)
        self._seeds = random.Random(seed)
        self.pictures = pictures

    def build_request(self, new: NewRequest) -> Request:
        """Builds a request.

        Raises:
            ValueError: the prompt is empty, too long or holds unknown tokens, or a parameter is invalid.
        """
        rows, prompt, params = None, new.prompt, new.params
        check_fields(prompt)
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
            tokens, rows = self.picture_reader().read(prompt, self._check_length)
            text = prompt["prompt"]
        else:
            text, tokens = self._tokens(prompt)
        self._check_length(tokens)
        self._check_params(params, tokens)
        seed = params.seed if params.seed is not None else self._seeds.randrange(_NUM_SEEDS)
        arrival = RequestMetrics(arrival_time=time.monotonic())
        return Request(new.request_id, tokens, params, seed, text, new.priority, arrival, pictures=rows)

    def picture_reader(self) -> PictureReader:
        """Returns what reads prompts with pictures.

        Raises:
            ValueError: the model takes no pictures.
        """
        if isinstance(self.pictures, str):
            raise ValueError(self.pictures)
        return self.pictures

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if prompt.get("multi_modal_data"):
                raise ValueError(
                    "a prompt with images, sound or videos can only be generated from: its tokens are not "
                    "all of it"
                )
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
        return prompt, self.tokenize(prompt)

    def tokenized(self, prompt: Prompt, how: Tokenization, max_tokens: int | None) -> Prompt:
        """Returns a prompt as tokens.

        Args:
            prompt: text or tokens, without media.
            how: options.
            max_tokens: most tokens of the output; None: as many as fit.

        Raises:
            ValueError: the prompt holds media, or its text is too long, or there is no tokenizer.
        """
        check_fields(prompt)
        most = how.most_tokens(self.max_model_len, max_tokens)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(prompt, Mapping) and (prompt.get("multi_modal_data") or "prompt_token_ids" in prompt):
            text = None
        if not isinstance(text, str) or self.tokenizer is None:
            text, tokens = self._tokens(prompt)
            return {"prompt": text, "prompt_token_ids": how.cut(tokens, most)}
        assert self.prompt_limit is not None
        self.prompt_limit.check(len(text))
        return {"prompt": text, "prompt_token_ids": how.ids(self.tokenizer, text, most)}

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Returns the tokens of a prompt.

        Raises:
            ValueError: it is empty, or is text and there is no tokenizer, or its text is too long.
        """
        tokens = self._tokens(prompt)[1]
        if not tokens:
            raise ValueError("the prompt holds no token")
        return tokens

    def tokenize(self, text: str) -> list[int]:
        """Returns the tokens of a text; raises ValueError if it is too long to be tokenized."""
        assert self.tokenizer is not None and self.prompt_limit is not None
        self.prompt_limit.check(len(text))
        return list(self.tokenizer(text)["input_ids"])

    def _check_length(self, tokens: list[int]) -> None:
        if not tokens:
            raise ValueError("the prompt holds no token")
        if len(tokens) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, but max_model_len is {self.max_model_len}, the output "
                "included: shorten the prompt, or raise max_model_len if the model allows it"
            )


def check_fields(prompt: Prompt, known: Sequence[str] = _FIELDS) -> None:
    """Raises ValueError if a prompt has a field that nobody reads, beside those that are read."""
    if not isinstance(prompt, Mapping) or not {"prompt", "prompt_token_ids"} & set(prompt):
        return
    for name, value in prompt.items():
        if name in known or value is None:
            continue
        reason = _REFUSED.get(name, f"it has {', '.join(known)}")
        raise ValueError(f"a prompt has no {name!r} here: {reason}; leave it out")
