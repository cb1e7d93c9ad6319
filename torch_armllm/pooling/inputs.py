"""From texts and pairs of texts to the token ids of a pooling model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_armllm.engine.text.preprocess import Prompt, check_fields
from torch_armllm.engine.text.prompt_limit import PromptLimit
from torch_armllm.pooling.loaded_pooling import LoadedPooling
from torch_armllm.pooling.pooling_model import PoolingInput
from torch_armllm.pooling.pooling_params import PoolingParams, PoolingTask
from torch_armllm.system.panics import PANICS_AS_ERRORS


class InputBuilder:
    """Tokenizes, cuts and checks the inputs of a pooling model.

    Args:
        loaded: the model and its tokenizer.
        max_model_len: most tokens of an input.
    """

    def __init__(self, loaded: LoadedPooling, max_model_len: int) -> None:
        self._model = loaded.model
        self._files = loaded.files
        self._template = loaded.template
        self._tokenizer: Any = loaded.tokenizer
        self.max_model_len = max_model_len
        self._vocab_size = loaded.model.kind.vocab_size
        self._limit = None if self._tokenizer is None else PromptLimit(self._tokenizer, max_model_len)
        self._skips: dict[str, int] = {}

    def build(
        self,
        prompt: Prompt,
        task: PoolingTask,
        params: PoolingParams,
        prompt_name: str | None = None,
        add_special_tokens: bool = True,
    ) -> PoolingInput:
        """Builds the input of a text.

        Args:
            prompt: a text, tokens, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``.
            task: what to compute.
            params: parameters of the request.
            prompt_name: name of the text to put before it, of the model's files; None: their default.
            add_special_tokens: False leaves out the tokens that the tokenizer puts around a text.

        Raises:
            ValueError: the input is empty, too long or has unknown tokens, or a parameter does not fit.
        """
        self._model.check(task, params)
        check_fields(prompt, ("prompt", "prompt_token_ids"))
        if isinstance(prompt, Mapping):
            if not {"prompt", "prompt_token_ids"} & set(prompt):
                raise ValueError(
                    f"a prompt needs 'prompt' or 'prompt_token_ids'; it has {', '.join(prompt) or 'nothing'}"
                )
            content: Any = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        else:
            content = prompt
        most = self._most(params)
        before = self._prompt(prompt_name)
        if not isinstance(content, str):
            if prompt_name is not None:
                raise ValueError(f"prompt_name is {prompt_name!r}, and the input is token ids: give a text")
            ids: list[int] = list(content)
            return self._checked(PoolingInput(ids if most is None else ids[:most], task, params))
        text = before + content
        ids = list(self._tokens(text, most, add_special_tokens=add_special_tokens)["input_ids"])
        return self._checked(PoolingInput(ids, task, params, None, self._skip(before)))

    def build_pair(self, query: str, document: str, params: PoolingParams) -> PoolingInput:
        """Builds the input of a query and a document, for a model that reads both.

        Raises:
            ValueError: see `build`.
        """
        self._model.check("score", params)
        most = self._most(params)
        if self._template is not None:
            text, end = self._template.join(query, document)
            tail = list(self._tokens(end, None, add_special_tokens=False)["input_ids"])
            room = None if most is None else max(1, most - len(tail))
            ids = list(self._tokens(text, room, add_special_tokens=False)["input_ids"])
            return self._checked(PoolingInput(ids + tail, "score", params))
        encoded = self._tokens(query, most, document)
        types = encoded.get("token_type_ids")
        types = list(types) if types is not None and any(types) else None
        return self._checked(PoolingInput(list(encoded["input_ids"]), "score", params, types))

    def _most(self, params: PoolingParams) -> int | None:
        most = params.truncate_prompt_tokens
        if most is not None and most > self.max_model_len:
            raise ValueError(
                f"truncate_prompt_tokens is {most}, and the model takes {self.max_model_len} tokens: give at "
                "most that, or -1"
            )
        return self.max_model_len if most == -1 else most

    def _prompt(self, name: str | None) -> str:
        prompts = self._files.prompts
        if name is not None and name not in prompts:
            known = ", ".join(prompts) or "none"
            raise ValueError(f"prompt_name is {name!r}; this model has {known}")
        chosen = self._files.default_prompt if name is None else name
        return "" if chosen is None else prompts.get(chosen, "")

    def _skip(self, before: str) -> int:
        """Returns the number of tokens of a prompt that is left out of the pooled ones."""
        if not before or self._files.include_prompt:
            return 0
        if before not in self._skips:
            ids = list(self._tokens(before, None)["input_ids"])
            ends = (self._tokenizer.eos_token_id, self._tokenizer.sep_token_id)
            self._skips[before] = len(ids) - (bool(ids) and ids[-1] in ends)
        return self._skips[before]

    def _tokens(self, text: str, most: int | None, pair: str | None = None, **options: Any) -> Any:
        if self._tokenizer is None or self._limit is None:
            raise ValueError("there is no tokenizer; give token ids")
        if most is None:
            self._limit.check(len(text) + len(pair or ""))
        else:
            text, pair = self._cut(text, most), None if pair is None else self._cut(pair, most)
            options |= {"truncation": True, "max_length": most}
        if self._files.lower_case:
            text, pair = text.lower(), None if pair is None else pair.lower()
        with PANICS_AS_ERRORS:
            return self._tokenizer(text, pair, **options)

    def _cut(self, text: str, tokens: int) -> str:
        """Cuts what is surely past the tokens, so that it is not tokenized in vain."""
        assert self._limit is not None
        most = self._limit.max_characters
        return text if most is None else text[: most // self.max_model_len * (tokens + 1)]

    def _checked(self, one: PoolingInput) -> PoolingInput:
        ids = one.token_ids
        if not ids:
            raise ValueError("this input has no tokens; give a text that is not empty")
        if len(ids) > self.max_model_len:
            raise ValueError(
                f"this input has {len(ids)} tokens, and the model takes {self.max_model_len} "
                "(max_model_len): shorten it, or cut it with truncate_prompt_tokens=-1"
            )
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise ValueError("token ids must be integers")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(
                f"token id {wrong} is out of range: the model's ids end at {self._vocab_size - 1}"
            )
        return one


def by_length(inputs: Sequence[PoolingInput]) -> list[int]:
    """Returns the indices of inputs, the longest first: a batch of like lengths has little padding."""
    return sorted(range(len(inputs)), key=lambda index: -len(inputs[index].token_ids))
