"""Choice between generating and pooling, for a model that may do either."""

from __future__ import annotations

from typing import Any, Literal

from torch_armllm.pooling.model_files import has_files, read_object
from torch_armllm.pooling.pooled_class import pools
from torch_armllm.pooling.sentence_files import has_pooling


def choose_runner(model: Any, runner: str = "auto") -> Literal["generate", "pooling"]:
    """Returns what a model is loaded for: the user's choice, or what its files say.

    A folder with a pooling module of sentence-transformers pools, whatever its class.

    Args:
        model: a folder, a file, a hub name, or a model.
        runner: the user's choice.

    Raises:
        ValueError: the choice is unknown.
    """
    if runner == "generate":
        return "generate"
    if runner == "pooling":
        return "pooling"
    if runner != "auto":
        raise ValueError(f"runner is {runner!r}; give auto, generate or pooling")
    if not isinstance(model, str):
        return "pooling" if pools(type(model).__name__) else "generate"
    if not has_files(model):
        return "generate"
    if has_pooling(model):
        return "pooling"
    names = read_object(model, "config.json").get("architectures") or [""]
    return "pooling" if isinstance(names, list) and pools(str(names[0])) else "generate"
