"""Requests of a model: the model, its tokenizer, and how to read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch_armllm.checkpoint.bundled_model import with_own_integers
from torch_armllm.quant.auto import resolve_auto

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from torch_armllm.quant.recipe import Recipe


@dataclass(frozen=True)
class ModelRequest:
    """A model that is to be loaded, with its tokenizer.

    Attributes:
        model: ``smollm2``, a checkpoint's folder, a name on the model hub, or a model, patched or not.
        tokenizer: a tokenizer, its folder or name; None: the model's own.
        dtype: of the loaded weights; ``auto``: the checkpoint's own.
        quantization: ``auto``, the name of a scheme, a `Recipe`, or None to keep the weights as they are;
            ignored if the model is quantized or patched already.
        skip_tokenizer_init: runs without a tokenizer: prompts and outputs are token ids.
        progress: shows progress bars.
        hf_overrides: fields to replace in config.json.
    """

    model: str | PreTrainedModel
    tokenizer: str | PreTrainedTokenizerBase | None = None
    dtype: str | torch.dtype = "auto"
    quantization: str | Recipe | None = "auto"
    skip_tokenizer_init: bool = False
    progress: bool = True
    hf_overrides: Mapping[str, Any] | None = None

    @property
    def source(self) -> str:
        """The folder or the name of the model; empty if it comes from nowhere."""
        return self.model if isinstance(self.model, str) else str(self.model.name_or_path or "")

    @property
    def weight_options(self) -> dict[str, Any]:
        """The options that change the weights of a folder, by name."""
        overrides = {"hf_overrides": dict(self.hf_overrides)} if self.hf_overrides else {}
        return {"dtype": self.dtype, "quantization": self.quantization, **overrides}

    def resolved(self) -> ModelRequest:
        """Returns the request with what ``auto`` stands for in models that predict tokens.

        The embedded model keeps its 4-bit integers, which rounding to another scheme would change once more.

        Raises:
            FileNotFoundError: the embedded model is not installed.
        """
        if self.quantization != "auto":
            return self
        model = with_own_integers(self.model) if isinstance(self.model, str) else self.model
        return replace(self, model=model, quantization=resolve_auto(self.quantization))

    def check_overrides(self) -> None:
        """Raises ValueError where fields are to be replaced of a model that is loaded already."""
        if self.hf_overrides and not isinstance(self.model, str):
            raise ValueError("hf_overrides are for a model that is yet to be loaded: give its folder")
