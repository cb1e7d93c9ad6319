"""What `LLM` and `AsyncLLM` answer with."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from torch_armllm.engine.load import (
    Loaded,
    default_params,
    engine_config,
    load_engine,
    load_patched,
    make_recipe,
    take_options,
)
from torch_armllm.engine.load_kept import load_or_find
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.stored.model import StoredModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LoadedModel:
    """An engine with its tokenizer, and its model for those who ask for it.

    Of a folder of packed weights that was loaded before, there is no model until somebody asks.

    Args:
        model: see `torch_armllm.LLM`, as for all other arguments.
        tokenizer: see there.
        dtype: see there.
        quantization: see there.
        skip_tokenizer_init: see there.
        progress: see there.
        settings: see there.

    Attributes:
        engine: what computes the answers.
        tokenizer_or_none: of prompts and answers; None: they are tokens.

    Raises:
        ValueError: a setting is unknown, or does not fit the model or the memory.
        OSError: there is no such checkpoint.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        tokenizer: str | PreTrainedTokenizerBase | None,
        *,
        dtype: str | torch.dtype,
        quantization: str | None,
        skip_tokenizer_init: bool,
        progress: bool,
        settings: dict[str, Any],
    ) -> None:
        options = take_options(settings)
        config = engine_config(settings)

        def load() -> Loaded:
            return load_engine(
                model,
                tokenizer,
                dtype=dtype,
                quantization=make_recipe(quantization, options),
                skip_tokenizer_init=skip_tokenizer_init,
                progress=progress,
                config=config,
            )

        def load_model() -> PreTrainedModel:
            recipe = make_recipe(quantization, options)
            return load_patched(model, dtype, recipe, progress, config.kv_cache_dtype)

        asked = {"dtype": dtype, "quantization": quantization, **options}
        loaded = load_or_find(model, tokenizer, config, asked, skip_tokenizer_init, load)
        self.engine, self._model, self.tokenizer_or_none = loaded
        self._load_model = load_model
        self._one_at_a_time = threading.Lock()

    @property
    def model(self) -> PreTrainedModel:
        """The patched model."""
        with self._one_at_a_time:
            if not self.has_model:
                self._model = self._load_model()
            return self._model

    @property
    def has_model(self) -> bool:
        """Whether the model is there, or only an engine."""
        return not isinstance(self._model, StoredModel)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of prompts and answers.

        Raises:
            ValueError: the model runs without one.
        """
        if self.tokenizer_or_none is None:
            raise ValueError("there is no tokenizer")
        return self.tokenizer_or_none

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        if isinstance(self._model, StoredModel):
            return self._model.forward.vocabulary
        return int(self._model.get_input_embeddings().num_embeddings)

    @property
    def default_params(self) -> SamplingParams:
        """What the model's generation config recommends."""
        return default_params(getattr(self._model, "generation_config", None))
