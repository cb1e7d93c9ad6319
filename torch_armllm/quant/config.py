"""The ``quantization_config`` of a model: settings for quantizing it, or those it was quantized with."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_armllm.hf.names import FORMAT, METHOD, TIED, WIDE
from torch_armllm.kv_cache.dtypes import full_kv_cache_dtype
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.schemes.registry import scheme_named

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
        modules: of a saved model: scheme and round-trip error of each packed module, by name; and the norms
            that keep float32 weights.
        stored: headers of the tensors of a third-party checkpoint while it is loaded; not saved.
        whole: the configuration of that checkpoint, where the model is a part of it; not saved.
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
        modules_to_not_convert: Sequence[str] | None = None,
        **saved: Any,
    ) -> None:
        """Creates a configuration; ``saved`` holds further fields of a saved one: see `to_dict`.

        Args:
            quantization: scheme or recipe.
            kv_cache_dtype: see `torch_armllm.patch`.
            fuse: patch the model after loading.
            modules: of a saved model: its packed modules.
            source: of a saved model: the tool that quantized it.
            modules_to_not_convert: names of modules that stay unquantized with all that they contain, as
                other configurations of transformers take them, such as ``model.layers.0``, ``down_proj`` or
                ``lm_head``.  They join the recipe's ``ignore``.
            saved: fields of the recipe, ``kv_cache``, ``quant_method`` and ``format``.

        Raises:
            ValueError: a scheme, method, cache type or field is unknown, or the format is newer.
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
        kv_cache_dtype = full_kv_cache_dtype(kv_cache_dtype)
        _check_modules(modules)
        if not isinstance(fuse, bool):
            raise ValueError(f"fuse must be true or false, not {fuse!r}")
        if source is not None and not isinstance(source, str):
            raise ValueError(f"source must be the name of a tool, or null, not {source!r}")
        if "importance" in recipe:
            recipe["importance"] = recipe["importance"] or None
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers' enumeration has its own only
        self.recipe = replace(Recipe.of(quantization), **recipe)
        if modules_to_not_convert is not None:
            kept = (*self.recipe.ignore, *_names(modules_to_not_convert))
            self.recipe = replace(self.recipe, ignore=kept)
        self.kv_cache_dtype = kv_cache_dtype
        self.fuse = fuse
        self.modules = modules
        self.source = source
        self.stored: Mapping[str, Any] | None = None
        self.whole: Any = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields of the saved ``quantization_config``; the recipe's are on the top level."""
        return {
            "quant_method": self.quant_method,
            "format": FORMAT,
            **self.recipe.to_dict(),
            "kv_cache": self.kv_cache_dtype,
            "fuse": self.fuse,
            "modules": copy.deepcopy(self.modules),
            "source": self.source,
        }


def _names(given: Any) -> tuple[str, ...]:
    """Returns names of modules; raises ValueError for another type."""
    if (
        isinstance(given, str)
        or not isinstance(given, Sequence)
        or not all(isinstance(n, str) for n in given)
    ):
        raise ValueError(f"modules_to_not_convert must be a list of names of modules, not {given!r}")
    return tuple(given)


def _check_modules(modules: Any) -> None:
    """Raises ValueError unless packed modules are described as `describe_modules` does it."""
    if modules is None:
        return
    if not isinstance(modules, Mapping):
        raise ValueError(f"modules must be an object with an entry for each packed module, not {modules!r}")
    for name, module in modules.items():
        if not isinstance(module, Mapping) or not isinstance(module.get("scheme"), str):
            raise ValueError(f"modules[{name!r}] must be an object with a scheme, not {module!r}")
        if module["scheme"] not in (TIED, WIDE):
            scheme_named(module["scheme"])
        error = module.get("error")
        if isinstance(error, bool) or not (error is None or isinstance(error, (int, float))):
            raise ValueError(f"the error of modules[{name!r}] must be a number or null, not {error!r}")
