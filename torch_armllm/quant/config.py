"""How a model is to be quantized, or was: what transformers' ``quantization_config`` holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_armllm.hf.names import METHOD, TIED
from torch_armllm.kv_cache.dtypes import check_kv_cache_dtype
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.schemes.registry import scheme_named

FORMAT = 1


class ArmInt4Config(QuantizationConfigMixin):
    """Quantizes a model to INT4 while it is loaded, and patches it.

        AutoModelForCausalLM.from_pretrained(name, quantization_config=ArmInt4Config())

    Attributes:
        scheme, head, ignore, overrides, method, allow_outliers, kv_cache: as `torch_armllm.patch` takes them.
        importance: quantizes with regard to what each input channel carries, as ``patch`` does by default.
            Off unless asked for, as it needs the whole float model, which is loaded first.  Without, each
            layer is quantized as soon as it is read, and the peak memory is that of the quantized model and
            one layer; the report says so.
        fuse: patches the model when it is loaded; else its quantized modules run until ``patch`` is called.
        modules: of a saved model: the name of each packed module, its scheme and its round-trip error.
        format: version of the saved layout.
        source: what quantized the weights, such as ``gptq``, where it was not this package; see
            `torch_armllm.load`.
    """

    def __init__(
        self,
        scheme: str = "g32i",
        head: str | None = "int8",
        ignore: Sequence[str] = (),
        kv_cache: str | None = None,
        importance: bool = False,
        fuse: bool = True,
        modules: dict[str, dict[str, Any]] | None = None,
        format: int = FORMAT,
        quant_method: str = METHOD,
        overrides: Mapping[str, str | None] | None = None,
        method: str = "mse",
        source: str | None = None,
        allow_outliers: bool = False,
        **unknown: Any,
    ) -> None:
        """See the class.

        Raises:
            ValueError: there is no such scheme, method, cache or option, or the format is a newer one.
        """
        if unknown:
            raise ValueError(
                f"quantization_config of {METHOD!r} has no option {', '.join(map(repr, unknown))}"
            )
        if quant_method != METHOD:
            raise ValueError(f"quant_method must be {METHOD!r}, not {quant_method!r}")
        if format != FORMAT:
            raise ValueError(
                f"the model was saved in format {format!r} and this torch_armllm reads format {FORMAT}: "
                "upgrade torch_armllm, or quantize the original model again"
            )
        check_kv_cache_dtype(kv_cache)
        recipe = Recipe(scheme, head, ignore, overrides or {}, method, allow_outliers)
        for saved in (modules or {}).values():
            if (name := saved.get("scheme")) is not None and name != TIED:
                scheme_named(name)
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers' enumeration has its own only
        self.scheme = recipe.scheme
        self.head = recipe.head
        self.ignore = list(recipe.ignore)
        self.overrides = dict(recipe.overrides)
        self.method = recipe.method
        self.allow_outliers = recipe.allow_outliers
        self.kv_cache = kv_cache
        self.importance = importance
        self.fuse = fuse
        self.modules = modules
        self.format = format
        self.source = source

    @property
    def recipe(self) -> Recipe:
        """What becomes of which layer."""
        return Recipe(self.scheme, self.head, self.ignore, self.overrides, self.method, self.allow_outliers)
