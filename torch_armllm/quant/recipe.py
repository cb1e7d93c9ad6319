"""The recipe of a quantization: schemes by layer, rounding method and other settings of the weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch_armllm.quant.methods.base import check_method
from torch_armllm.quant.schemes.registry import DEFAULT, FORMER_DEFAULTS, scheme_named
from torch_armllm.system.files import parse_bytes

if TYPE_CHECKING:  # `quant.layers` imports transformers, which takes seconds
    from torch_armllm.quant.layers import Layer
    from torch_armllm.quant.schemes.base import Scheme

KINDS = ("experts", "shared_experts", "attention", "mlp", "head", "vision")
"""Keys of ``overrides`` that match all layers of a kind, instead of a name pattern."""
LEFT = "left out on request"
_NAMES = (
    ("vision", re.compile(r"^(vision_\w+|embed_vision|visual|multi_modal_projector|connector)$")),
    ("shared_experts", re.compile(r"shared_(expert|mlp)")),
    ("attention", re.compile(r"attn|attention")),
    ("mlp", re.compile(r"mlp|ffn|feed_forward|(^|_)moe$|^fc\d?$|^fc_(in|out)$")),
)
"""Kinds by the names of modules; the first that fits."""


class _Default(str):
    """The name of the default scheme in a recipe that says ``int4``.

    It equals the name, but does not ask for that very scheme: see `Recipe.check_packed`.
    """

    __slots__ = ()


@dataclass(frozen=True)
class Recipe:
    """Settings of quantization: the scheme of each layer, and the method that rounds the weights.

    Attributes:
        scheme: scheme of the linear layers and the experts: ``int4`` (the exact scheme g32iz), ``int8``, or
            any other of `SCHEMES`, such as ``g32`` or ``row``.  With ``int4`` vision towers are INT8, unless
            the override ``{"vision": "int4"}`` asks for them too: they are small, and all of an answer rests
            on them.
        head: scheme of the output head; None leaves it unquantized.
        ignore: shell-style patterns of layer names that stay unquantized, such as ``*.down_proj``; or names
            of modules, whole or in part, that stay so with all they contain, such as ``layers.0``.
        overrides: scheme by layer-name pattern or by kind, one of `KINDS`; None leaves the layers
            unquantized.  The last entry that matches a layer wins over ``scheme`` and ``head``; ``ignore``
            wins over all of them.
        method: how integers are chosen: ``mse`` searches scales by squared error, ``rtn`` derives them from
            the largest values, ``gptq`` and ``awq`` calibrate; see `torch_armllm.quant.methods.base`.
        allow_outliers: accept layers whose round-trip error is out of line with their scheme: see
            `find_outliers`.
        importance: for ``mse``: run the decoder layers on random tokens, scale channels and weight squared
            errors by the energy of each input channel; see `torch_armllm.quant.methods.calibrated.smoothing`.
            None: do so, except where transformers' loader quantizes weights as it reads them; True loads the
            whole float model first there.
        bits: mean bits a weight of the quantized layers except heads, such as 4.5; or as many more than int4
            everywhere has, such as "+0.1"; or the size of all files of the model, at most, such as "0.9GB" or
            "850MiB".  The schemes of the layers that ``overrides`` do not name are chosen so that the model's
            predictions change least: see `torch_armllm.quant.mixed_bits`.  None: all have ``scheme``.
        int16_activations: patterns of layer names, or `KINDS`, whose activations are INT16 (two INT8 digits)
            instead of INT8.  Long steps, such as prompts, cost a second product there; short ones read the
            weights once all the same.
        rotate: multiply groups of 32 inputs of linear layers by a Hadamard matrix before they become INT8,
            and the weights by the same matrix, so that loud channels cost the others less: layers with the
            scheme ``int8``, and all that ``gptq`` calibrates.
    """

    scheme: str = "int4"
    head: str | None = "int8"
    ignore: Sequence[str] = ()
    overrides: Mapping[str, str | None] = field(default_factory=dict)
    method: str = "mse"
    allow_outliers: bool = False
    importance: bool | None = None
    bits: float | str | None = None
    int16_activations: Sequence[str] = ()
    rotate: bool = True

    @classmethod
    def of(cls, quantization: str | Recipe) -> Recipe:
        """Returns the recipe itself, or the default recipe with the scheme of that name.

        Raises:
            ValueError: there is no such scheme.
        """
        return quantization if isinstance(quantization, Recipe) else cls(quantization)

    def __post_init__(self) -> None:
        """Checks all names.

        Raises:
            ValueError: there is no such scheme or method, or something is of another type.
        """
        for field_name in ("ignore", "int16_activations"):
            _check_patterns(field_name, getattr(self, field_name))
        if not isinstance(self.overrides, Mapping) or not all(isinstance(x, str) for x in self.overrides):
            raise ValueError(f"overrides must be a dictionary of schemes by pattern, not {self.overrides!r}")
        for field_name in ("allow_outliers", "rotate"):
            if not isinstance(value := getattr(self, field_name), bool):
                raise ValueError(f"{field_name} must be true or false, not {value!r}")
        if not (self.importance is None or isinstance(self.importance, bool)):
            raise ValueError(f"importance must be true, false or null, not {self.importance!r}")
        _check_bits(self.bits)
        check_method(self.method)
        # `int4` is an alias
        by_alias = self.scheme == "int4" or isinstance(self.scheme, _Default)
        object.__setattr__(self, "scheme", _Default(DEFAULT) if by_alias else scheme_named(self.scheme).name)
        object.__setattr__(self, "head", _canonical(self.head))
        object.__setattr__(self, "ignore", tuple(self.ignore))
        object.__setattr__(self, "int16_activations", tuple(self.int16_activations))
        overrides = {pattern: _canonical(scheme) for pattern, scheme in self.overrides.items()}
        object.__setattr__(self, "overrides", overrides)
        if self.bits is not None and self.scheme != DEFAULT:
            raise ValueError(
                f"bits={self.bits} chooses the schemes of the layers: leave out the scheme {self.scheme!r}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as JSON types, as a saved ``quantization_config`` holds them."""
        return {
            **{one.name: getattr(self, one.name) for one in fields(self)},
            "scheme": str(self.scheme),
            "ignore": list(self.ignore),
            "overrides": dict(self.overrides),
            "importance": bool(self.importance),
            "int16_activations": list(self.int16_activations),
        }

    def assign(self, layers: Sequence[Layer]) -> tuple[list[Layer], dict[str, Scheme]]:
        """Assigns a scheme to each layer.

        Args:
            layers: layers of a model: see `find_layers`.

        Returns:
            The layers, unquantized ones with the reason, and the schemes of the others by name.

        Raises:
            ValueError: an override matches no layer, or no layer that can have its scheme.
        """
        for pattern, scheme in self.overrides.items():
            self._check_fits(pattern, scheme, layers)
        assigned = []
        schemes = {}
        for layer in layers:
            scheme = self._scheme_of(layer)
            if layer.reason is None and scheme is None:
                layer = replace(layer, reason=LEFT)
            if layer.reason is None and scheme is not None:
                schemes[layer.name] = scheme_named(scheme)
            assigned.append(layer)
        return assigned, schemes

    def check_packed(self, own: Recipe, source: str | None = None) -> None:
        """Raises ValueError if weights that were packed by the recipe ``own`` do not match this recipe.

        A scheme that ``int4`` named in earlier versions matches ``int4``, but not the name of another scheme.
        ``source`` names the tool that quantized them, if not this package.
        """
        if source is not None:
            raise ValueError(
                f"the weights are packed as {source} stored them; to use {self.scheme!r}, load the "
                "original model"
            )
        former = isinstance(self.scheme, _Default) and own.scheme in FORMER_DEFAULTS
        if self.scheme != own.scheme and not former:
            raise ValueError(
                f"the weights are packed as {own.scheme!r} already; to use {self.scheme!r}, load "
                "the original model"
            )
        if self.bits is not None and self.bits != own.bits:
            raise ValueError(
                f"the weights are packed already; to choose bits={self.bits}, load the original model"
            )
        if self.int16_activations and self.int16_activations != own.int16_activations:
            raise ValueError(
                f"the model is quantized already, with INT16 activations in {len(own.int16_activations)} "
                f"patterns; to choose {list(self.int16_activations)}, load the original model"
            )
        if self.overrides and dict(self.overrides) != dict(own.overrides):
            raise ValueError(
                f"the weights are packed already, with the overrides {dict(own.overrides)}; to use "
                f"{dict(self.overrides)}, load the original model"
            )

    def _scheme_of(self, layer: Layer) -> str | None:
        sees = kind_of(layer) == "vision" and isinstance(self.scheme, _Default) and self.bits is None
        scheme = self.head if layer.kind == "head" else "int8" if sees else self.scheme
        for pattern, other in self.overrides.items():
            if fits(layer, pattern):
                scheme = other
        # The ops of latent attention sum over both axes of this weight, and those of blocks multiply heads:
        # both support int8 alone.
        return "int8" if layer.kind in ("latent", "blocks") and scheme is not None else scheme

    def _check_fits(self, pattern: str, scheme: str | None, layers: Sequence[Layer]) -> None:
        fitting = [layer for layer in layers if fits(layer, pattern)]
        if not fitting:
            example = f"; layers are named like {layers[0].name!r}" if layers else ""
            raise ValueError(
                f"override {pattern!r} fits no layer of the model: it is neither one of {', '.join(KINDS)} "
                f"nor a pattern of a layer's name{example}"
            )
        if scheme is None:
            return
        refused = [layer.reason for layer in fitting if layer.reason is not None]
        if len(refused) == len(fitting):
            raise ValueError(
                f"override {pattern!r} asks for {scheme!r}, but {fitting[0].name} cannot be quantized: "
                f"{refused[0]}"
            )
        if scheme != "int8" and all(layer.kind in ("latent", "blocks") for layer in fitting):
            does = "expands latents" if fitting[0].kind == "latent" else "multiplies blocks"
            raise ValueError(
                f"override {pattern!r} asks for {scheme!r}, but {fitting[0].name} {does}: "
                "its scheme must be int8 or None (not quantized)"
            )


def fits(layer: Layer, pattern: str) -> bool:
    """True if a name pattern, or one of `KINDS`, matches a layer."""
    return pattern == kind_of(layer) if pattern in KINDS else fnmatchcase(layer.name, pattern)


def kind_of(layer: Layer) -> str | None:
    """Returns which of `KINDS` a layer is, by its own kind and the names of the modules around it."""
    if layer.kind in ("head", "experts"):
        return layer.kind
    if layer.kind == "router":
        return None
    parts = layer.name.split(".")
    for kind, names in _NAMES:
        if any(names.search(part) for part in parts):
            return kind
    return None


def _check_bits(bits: Any) -> None:
    text = isinstance(bits, str) and (re.fullmatch(r"\+\d+(\.\d+)?", bits) or parse_bytes(bits) is not None)
    number = isinstance(bits, (int, float)) and not isinstance(bits, bool)
    if not (bits is None or text or number):
        raise ValueError(
            'bits must be bits a weight, such as 4.5, or more than int4 has, such as "+0.1", or a size, such '
            f'as "0.9GB", not {bits!r}'
        )


def _check_patterns(name: str, patterns: Any) -> None:
    many = isinstance(patterns, Sequence) and not isinstance(patterns, str)
    if not many or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"{name} must be a list of patterns, not {patterns!r}")


def _canonical(scheme: str | None) -> str | None:
    return None if scheme is None else scheme_named(scheme).name
