"""The ``quantization_config`` of a model: how transformers is to quantize it, or how it was quantized."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_armllm.hf.names import METHOD, TIED
from torch_armllm.kv_cache.dtypes import check_kv_cache_dtype
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.schemes.registry import scheme_named

FORMAT = 1
_RECIPE_FIELDS = tuple(field.name for field in fields(Recipe))


class ArmInt4Config(QuantizationConfigMixin):
    """Quantizes a model while transformers loads it, and patches it.

        AutoModelForCausalLM.from_pretrained(name, quantization_config=ArmInt4Config())

    By default each layer is quantized as soon as it is read: the peak memory is that of the quantized model
    and one layer, and rounding errors are not weighted by input channel (the report says so).  With
    ``Recipe(importance=True)`` they are, as `torch_armllm.patch` does by default; the whole float model is
    loaded first.

    Attributes:
        recipe: schemes and method of the weights.
        kv_cache_dtype: see `torch_armllm.patch`.
        fuse: patch the model after loading; False leaves that to a later call of ``patch``.
        modules: of a saved model: scheme and round-trip error of each packed module, by name.
        source: the tool that quantized the weights, such as ``gptq``, if not this package; see
            `torch_armllm.load`.
    """

    def __init__(
        self,
        quantization: str | Recipe = "int4",
        *,
        kv_cache_dtype: str | None = None,
        fuse: bool = True,
        modules: dict[str, dict[str, Any]] | None = None,
        source: str | None = None,
        **saved: Any,
    ) -> None:
        """Makes a configuration; ``saved`` are the further fields of a saved one: see `to_dict`.

        Raises:
            ValueError: a scheme, method, cache type or field is unknown, or the format is a newer one.
        """
        method = saved.pop("quant_method", METHOD)
        if method != METHOD:
            raise ValueError(f"quant_method must be {METHOD!r}, not {method!r}")
        version = saved.pop("format", FORMAT)
        if version != FORMAT:
            raise ValueError(
                f"the model was saved in format {version!r} and this torch_armllm reads format {FORMAT}: "
                "upgrade torch_armllm, or quantize the original model again"
            )
        kv_cache_dtype = saved.pop("kv_cache", kv_cache_dtype)
        recipe = {name: saved.pop(name) for name in _RECIPE_FIELDS if name in saved}
        if saved:
            raise ValueError(f"quantization_config of {METHOD!r} has no option {', '.join(map(repr, saved))}")
        check_kv_cache_dtype(kv_cache_dtype)
        for module in (modules or {}).values():
            if (name := module.get("scheme")) is not None and name != TIED:
                scheme_named(name)
        if "importance" in recipe:
            recipe["importance"] = recipe["importance"] or None
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers' enumeration has its own only
        self.recipe = replace(Recipe.of(quantization), **recipe)
        self.kv_cache_dtype = kv_cache_dtype
        self.fuse = fuse
        self.modules = modules
        self.source = source

    def to_dict(self) -> dict[str, Any]:
        """The fields of the saved ``quantization_config``: the recipe's lie flat beside the others."""
        return {
            "quant_method": self.quant_method,
            "format": FORMAT,
            **self.recipe.to_dict(),
            "kv_cache": self.kv_cache_dtype,
            "fuse": self.fuse,
            "modules": copy.deepcopy(self.modules),
            "source": self.source,
        }
