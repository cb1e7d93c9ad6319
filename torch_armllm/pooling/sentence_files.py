"""The files of sentence-transformers in a model's folder: pooling, projections, prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.checkpoint.incoming import Incoming, check_incoming
from torch_armllm.checkpoint.tensor_headers import read_headers, read_tensor
from torch_armllm.pooling.model_files import check_inner, find_file, read_json, read_object

MODULES = "modules.json"

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags of the pooling configuration, in the order in which their vectors are joined."""
_ACTIVATIONS = {
    "Identity": nn.Identity,
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
}


@dataclass(frozen=True)
class Projection:
    """A linear layer after pooling.

    Attributes:
        weight: float32 ``(out, in)``.
        bias: float32 ``(out,)``, or None.
        activation: of its result.
    """

    weight: Tensor
    bias: Tensor | None
    activation: nn.Module

    def __call__(self, vectors: Tensor) -> Tensor:
        """Returns the projected vectors ``(…, out)``."""
        result: Tensor = self.activation(nn.functional.linear(vectors, self.weight, self.bias))
        return result


@dataclass(frozen=True)
class SentenceFiles:
    """The content of the files.

    Attributes:
        modes: pooling modes whose vectors are joined; empty: the files do not say.
        include_prompt: False leaves the tokens of a prompt out of the pooled ones.
        projections: linear layers after pooling.
        normalize: True scales vectors to length one; None: the files do not say.
        prompts: texts to put before a text, by name.
        default_prompt: name of the one that is used where none is named.
        max_tokens: most tokens of a text; None: the files do not say.
        lower_case: True makes texts lower case first.
        dimensions: dimensions of the vectors, where the files cut them.
    """

    modes: tuple[str, ...] = ()
    include_prompt: bool = True
    projections: tuple[Projection, ...] = ()
    normalize: bool | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None
    lower_case: bool = False
    dimensions: int | None = None


def has_pooling(source: str) -> bool:
    """True if a folder or hub name has a pooling module of sentence-transformers."""
    modules = read_json(source, MODULES)
    return isinstance(modules, list) and any(
        isinstance(module, dict) and _kind(module) == "Pooling" for module in modules
    )


def read_sentence_files(source: str) -> SentenceFiles:
    """Reads the files of sentence-transformers; an empty description if there are none.

    Raises:
        ValueError: a file is damaged, or says something that is not supported.
    """
    modules = read_json(source, MODULES)
    settings = read_object(source, "config_sentence_transformers.json")
    limits = read_object(source, "sentence_bert_config.json")
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ValueError(f"prompts of {source} (config_sentence_transformers.json) are not texts by name")
    if "message" in (limits.get("modality_config") or {}):
        raise ValueError(
            f"sentence_bert_config.json of {source} makes texts messages of its chat template, which is not "
            "supported: use sentence-transformers itself, with patch(model[0].auto_model)"
        )
    most = limits.get("max_seq_length")
    common: dict[str, Any] = {
        "prompts": prompts,
        "default_prompt": settings.get("default_prompt_name"),
        "max_tokens": most if isinstance(most, int) and most > 0 else None,
        "lower_case": bool(limits.get("do_lower_case", False)),
        "dimensions": settings.get("truncate_dim"),
    }
    if modules is None:
        return SentenceFiles(**common)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{MODULES} of {source} is damaged: a list of modules is expected")
    pooling: dict[str, Any] = {}
    projections: list[Projection] = []
    normalize = False
    for module in modules:
        kind, folder = _kind(module), check_inner(source, module.get("path", ""), MODULES)
        for file in ("config.json", "model.safetensors") if folder else ():
            check_inner(source, f"{folder}/{file}", MODULES)
        if kind == "Pooling":
            pooling = read_object(source, f"{folder}/config.json")
            if not pooling:
                raise ValueError(
                    f"{MODULES} of {source} names {folder}, and its config.json is absent or empty"
                )
        elif kind == "Dense":
            if normalize:
                raise ValueError(f"{MODULES} of {source}: a Dense after a Normalize is not supported")
            projections.append(_projection(source, folder))
        elif kind == "Normalize":
            normalize = True
        elif kind not in ("Transformer", "Dropout"):
            raise ValueError(
                f"{MODULES} of {source} has a module {kind!r}; Transformer, Pooling, Dense and Normalize are "
                "supported: use sentence-transformers itself, with patch(model[0].auto_model)"
            )
    return SentenceFiles(
        modes=_modes(source, pooling),
        include_prompt=bool(pooling.get("include_prompt", True)),
        projections=tuple(projections),
        normalize=normalize,
        **common,
    )


def _kind(module: Mapping[str, Any]) -> str:
    return str(module.get("type", "")).rpartition(".")[2]


def _modes(source: str, pooling: Mapping[str, Any]) -> tuple[str, ...]:
    named = pooling.get("pooling_mode")
    if named is None:
        flagged = tuple(mode for flag, mode in _MODES.items() if pooling.get(flag))
        return flagged or (("mean",) if pooling else ())
    modes = (named,) if isinstance(named, str) else tuple(named)
    if unknown := [mode for mode in modes if mode not in _MODES.values()]:
        raise ValueError(
            f"pooling_mode of {source} is {unknown[0]!r}; {', '.join(_MODES.values())} are supported"
        )
    return modes


def _projection(source: str, folder: str) -> Projection:
    from safetensors.torch import load_file

    config = read_object(source, f"{folder}/config.json")
    name = str(config.get("activation_function") or "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"activation_function of {folder} of {source} is {name!r}; supported are "
            + ", ".join(_ACTIVATIONS)
        )
    if config.get("use_residual") or config.get("module_input_name") not in (None, "sentence_embedding"):
        raise ValueError(
            f"{folder} of {source} is no plain layer after pooling (use_residual, module_input_name), "
            "which is not supported"
        )
    path = find_file(source, f"{folder}/model.safetensors")
    if path is None:
        raise ValueError(
            f"{folder} of {source} has no model.safetensors: save the model again with a current version of "
            "sentence-transformers"
        )
    expected = {"linear.weight"} | ({"linear.bias"} if config.get("bias", True) else set())
    headers = read_headers([path])
    found = headers.keys()
    check_incoming(
        Incoming(
            f"{folder} of {source}",
            "a Dense module",
            missing=expected - found,
            unread=found - expected,
            plain=headers,
            stored=headers,
            read=lambda name: read_tensor(headers[name], name),
        )
    )
    tensors = {key: value.float() for key, value in load_file(path).items() if key in expected}
    weight = tensors["linear.weight"]
    if weight.dim() != 2:
        raise ValueError(f"{path} has no linear.weight of two dimensions")
    return Projection(weight, tensors.get("linear.bias"), _ACTIVATIONS[name]())


def pool(hidden: Tensor, mode: str, skip: int = 0) -> Tensor:
    """Pools the hidden states of a text's tokens.

    Args:
        hidden: float32 ``(tokens, hidden)``.
        mode: one of sentence-transformers' modes.
        skip: leading tokens that are left out; weights of ``weightedmean`` still count them.

    Returns:
        float32 ``(hidden,)``
    """
    if skip >= len(hidden):  # the text is empty
        skip = 0
    kept = hidden[skip:]
    if mode == "lasttoken":
        return kept[-1]
    if mode == "cls":
        return kept[0]
    if mode == "max":
        return kept.max(0).values
    if mode == "weightedmean":
        weights = torch.arange(skip + 1, len(hidden) + 1, dtype=torch.float32)
        return weights @ kept / weights.sum()
    return kept.sum(0) / (len(kept) if mode == "mean" else len(kept) ** 0.5)
