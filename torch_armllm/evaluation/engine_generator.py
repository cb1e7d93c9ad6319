"""Generation tasks by the engine: batched whatever their lengths, common prefixes computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.models.utils import normalize_gen_kwargs

from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.llm.llm import LLM

_SERVED = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p", "seed"}
"""lm-eval's settings that the engine has, too; requests with others are left to `HFLM`."""


class EngineGenerator:
    """Answers requests by an engine.

    Args:
        model: a patched model with a plan.
        tokenizer: of the model.
        max_length: most tokens of a prompt and its answer.
    """

    def __init__(self, model: Any, tokenizer: Any, max_length: int) -> None:
        self._llm = LLM(
            model, tokenizer, runner="generate", max_model_len=max_length, threads=torch.get_num_threads()
        )
        self._tokenizer = tokenizer
        self.max_length = self._llm.max_model_len

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], progress: bool
    ) -> list[str]:
        """Returns the answers to prompts of token ids, in order, without the stop strings."""
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        return [output.outputs[0].text for output in self._llm.generate(asked, params, progress)]

    def params(self, settings: Mapping[str, Any], default_max_tokens: int) -> SamplingParams:
        """Returns the sampling parameters for lm-eval's settings.

        Raises:
            ValueError: an engine lacks a setting; the message names it.
        """
        known: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), default_max_tokens))
        if lacking := sorted(known.keys() - _SERVED):
            raise ValueError(f"an engine lacks {', '.join(lacking)}")
        drawn = {name: known[name] for name in ("top_p", "top_k", "min_p", "seed") if name in known}
        until = [text for text in known["until"] if text]
        special = self._tokenizer.get_added_vocab()
        return SamplingParams(
            temperature=known.get("temperature", 0.0) if known["do_sample"] else 0.0,
            max_tokens=known["max_gen_toks"],
            stop=until,
            # special tokens are no part of the text that is searched for stop strings
            stop_token_ids=[special[text] for text in until if text in special],
            **(drawn if known["do_sample"] else {}),
        )
