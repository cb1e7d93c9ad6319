"""Model variants by name: ``bf16``, ``int4``, ``int4-row+rtn``, ``4.5+gptq``, ``mine=FOLDER``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from torch_armllm.kv_cache.dtype_names import KvCacheDtype
from torch_armllm.kv_cache.dtypes import full_kv_cache_dtype
from torch_armllm.quant.methods.base import CALIBRATED, check_method
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.schemes.registry import DEFAULT, SCHEMES
from torch_armllm.system.files import parse_bytes

FLOATS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
SAVED = "saved"
_FUSED = "-fused"
_WIDE = re.compile(r"a16(?:=(.+))?")
_CACHE = re.compile(r"\+kv=(\w+)$")
_EXAMPLES = (
    "bf16, f32, bf16-fused, int4, int4-g32, int4-row, int8, int4+gptq, 4.5+gptq, 0.9GB+gptq, int4+gptq+a16, "
    "saved, NAME=FOLDER"
)


@dataclass(frozen=True)
class Variant:
    """A dtype or quantization of a model, and whether fused ops run it.

    Attributes:
        name: the user's spelling.
        dtype: dtype of the loaded weights; None: the comparison's.
        quantization: the scheme of `torch_armllm.patch`; None: weights are not quantized.
        method: the rounding method; None: the default.
        bits: see `Recipe.bits`; None: all layers have one scheme.
        int16_activations: see `Recipe.int16_activations`.
        patched: True if the fused ops run, False for transformers' own forward.
        folder: a quantized checkpoint of the same model; None: the compared model is loaded.
        kv_cache_dtype: see `torch_armllm.patch`; None: the model's own.
    """

    name: str
    dtype: str | None = None
    quantization: str | None = None
    method: str | None = None
    bits: float | str | None = None
    int16_activations: tuple[str, ...] = ()
    patched: bool = True
    folder: Path | None = None
    kv_cache_dtype: KvCacheDtype | None = None

    @classmethod
    def parse(cls, text: str, method: str | None = None) -> Variant:
        """Parses a variant's name.

        Args:
            text: ``bf16``, ``f16`` or ``f32``: transformers' own forward; ``…-fused``: the same weights by
                fused ops; ``saved``: a quantized checkpoint unchanged; a scheme of `torch_armllm.patch`, with
                or without the prefix ``int4-``, and with or without the suffix ``+method``; ``4.5``,
                ``int4+0.1`` or ``0.9GB``: bits a weight, more than INT4 has, or the size of all files, with
                or without that suffix.  Last suffixes ``+a16``: INT16 activations in all linear layers, or
                ``+a16=PATTERN``: in some, see `Recipe.int16_activations`.  ``NAME=FOLDER``: a quantized
                checkpoint unchanged, under that name.  At the end of all of them but transformers' own
                forward, ``+kv=int8``: keys and values of that type.
            method: the method, unless the text names one.

        Raises:
            ValueError: there is no such scheme, method or folder.
        """
        name = text.strip()
        if (match := _CACHE.search(name)) is not None:
            cache = full_kv_cache_dtype(match[1])
            return cls.parse(name[: match.start()], method)._with_cache(cast(KvCacheDtype, cache))
        before, equals, _ = name.partition("=")
        if equals and not before.endswith("+a16"):
            return cls._of_folder(name)
        if name in FLOATS:
            return cls(name, FLOATS[name], patched=False)
        if name.removesuffix(_FUSED) in FLOATS and name.endswith(_FUSED):
            return cls(name, FLOATS[name.removesuffix(_FUSED)])
        if name == SAVED:
            return cls(name)
        stem, *suffixes = name.split("+")
        wide: list[str] = []
        while suffixes and (pattern := int16_layers(suffixes[-1])) is not None:
            wide.insert(0, pattern)
            suffixes.pop()
        quantization = DEFAULT if stem == "int4" else stem.removeprefix("int4-")
        bits: float | str | None = None
        if parse_bytes(quantization) is not None:
            quantization, bits = DEFAULT, quantization
        elif _is_number(quantization):
            quantization, bits = DEFAULT, float(quantization)
        elif quantization == DEFAULT and suffixes and _is_number(suffixes[0]):
            bits = f"+{suffixes.pop(0)}"
        if quantization not in SCHEMES or len(suffixes) > 1 or "" in suffixes:
            raise ValueError(f"unknown scheme {text!r}: there are {_EXAMPLES}, and {', '.join(SCHEMES)}")
        chosen = suffixes[0] if suffixes else method
        if chosen is not None:
            try:
                check_method(chosen)
            except ValueError as error:
                raise ValueError(f"{text}: {error}") from None
        return cls(name, quantization=quantization, method=chosen, bits=bits, int16_activations=tuple(wide))

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the quantization; None: weights are not quantized."""
        if self.quantization is None:
            return None
        return Recipe(
            self.quantization,
            method=self.method or "mse",
            bits=self.bits,
            int16_activations=self.int16_activations,
        )

    @classmethod
    def _of_folder(cls, text: str) -> Variant:
        name, folder = (part.strip() for part in text.split("=", 1))
        if not name or not Path(folder).is_dir():
            raise ValueError(f"{text!r}: NAME=FOLDER takes a name and the folder of a quantized checkpoint")
        return cls(name, folder=Path(folder))

    def _with_cache(self, dtype: KvCacheDtype) -> Variant:
        if not self.patched:
            raise ValueError(
                f"{self.name} is transformers' own forward, which has no {dtype} cache: write "
                f"{self.name}{_FUSED}+kv={dtype}"
            )
        return replace(self, name=f"{self.name}+kv={dtype}", kv_cache_dtype=dtype)

    @property
    def saved(self) -> bool:
        """True if a quantized checkpoint stays unchanged."""
        return self.name.partition("+")[0] == SAVED or self.folder is not None

    @property
    def calibrated(self) -> bool:
        """True if the method calibrates, or bits are measured."""
        return self.method in CALIBRATED or self.bits is not None


def int16_layers(suffix: str) -> str | None:
    """Returns the layers that ``a16`` (all) or ``a16=PATTERN`` names; None: another suffix."""
    match = _WIDE.fullmatch(suffix)
    return None if match is None else match[1] or "*"


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None


def parse_variants(text: str, method: str | None = None) -> list[Variant]:
    """Parses names separated by commas.

    Raises:
        ValueError: there is no name, a name is unknown, or a name occurs twice.
    """
    variants = [Variant.parse(part, method) for part in text.split(",") if part.strip()]
    names = [variant.name for variant in variants]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"--quantization takes different names separated by commas, got {text!r}")
    return variants
