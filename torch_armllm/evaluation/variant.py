"""What a comparison calls a way to run a model: ``bf16``, ``int4-g32i``, ``int4-row+rtn``."""

from __future__ import annotations

from dataclasses import dataclass

FLOATS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
SAVED = "saved"
_FUSED = "-fused"
_EXAMPLES = "bf16, f32, bf16-fused, int4-g32i, int4-g32, int4-row, int8, int4-g32i+gptq, saved"


@dataclass(frozen=True)
class Scheme:
    """A way to run a model.

    Attributes:
        name: as the user wrote it.
        dtype: of the weights that are loaded; None: the comparison's.
        quantization: the scheme of `torch_armllm.patch`; None: weights stay as they are.
        method: how weights are rounded; None: the default.
        patched: whether the fused ops run; otherwise transformers does.
    """

    name: str
    dtype: str | None = None
    quantization: str | None = None
    method: str | None = None
    patched: bool = True

    @classmethod
    def parse(cls, text: str, method: str | None = None) -> Scheme:
        """Reads a scheme's name.

        Args:
            text: ``bf16``, ``f16`` or ``f32``, by transformers' own forward; ``…-fused``, the same weights by
                fused ops; ``saved``, a quantized checkpoint as it is; a scheme of `torch_armllm.patch`, with
                or without ``int4-`` before it, and ``+method`` behind it.
            method: where the text names none.

        Raises:
            ValueError: there is no such scheme or method.
        """
        from torch_armllm.quant.methods.base import check_method
        from torch_armllm.quant.schemes.registry import SCHEMES

        name = text.strip()
        if name in FLOATS:
            return cls(name, FLOATS[name], patched=False)
        if name.removesuffix(_FUSED) in FLOATS and name.endswith(_FUSED):
            return cls(name, FLOATS[name.removesuffix(_FUSED)])
        if name == SAVED:
            return cls(name)
        stem, plus, own = name.partition("+")
        quantization = "g32i" if stem == "int4" else stem.removeprefix("int4-")
        if quantization not in SCHEMES or (plus and not own):
            raise ValueError(f"unknown scheme {text!r}: there are {_EXAMPLES}, and {', '.join(SCHEMES)}")
        chosen = own or method
        if chosen is not None:
            try:
                check_method(chosen)
            except ValueError as error:
                raise ValueError(f"{text}: {error}") from None
        return cls(name, quantization=quantization, method=chosen)

    @property
    def saved(self) -> bool:
        """Whether a quantized checkpoint is to stay as it is."""
        return self.name == SAVED

    @property
    def calibrated(self) -> bool:
        """Whether the method needs a text."""
        from torch_armllm.quant.methods.base import CALIBRATED

        return self.method in CALIBRATED


def parse_schemes(text: str, method: str | None = None) -> list[Scheme]:
    """Reads names separated by commas.

    Raises:
        ValueError: there is none, one is unknown, or one is named twice.
    """
    schemes = [Scheme.parse(part, method) for part in text.split(",") if part.strip()]
    names = [scheme.name for scheme in schemes]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"--quantization takes different names separated by commas, got {text!r}")
    return schemes
