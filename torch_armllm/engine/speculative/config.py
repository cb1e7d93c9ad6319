"""Settings of speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Method = Literal["ngram", "draft_model", "mtp", "eagle3"]
_METHODS = get_args(Method)
_NEED_MODEL = ("draft_model", "eagle3")


@dataclass(frozen=True)
class SpeculativeConfig:
    """`EngineConfig.speculative_config`, checked; names are vLLM's.

    Attributes:
        method: ``ngram`` drafts what followed the last occurrence of the current n-gram in the context;
            ``draft_model`` lets a smaller model with the same vocabulary draft; ``mtp`` the layers for
            multi-token prediction that the checkpoint carries; ``eagle3`` an EAGLE-3 draft.
        num_speculative_tokens: most tokens of a draft.
        prompt_lookup_max: for ``ngram``, the number of last tokens that are looked up first, then fewer.
        prompt_lookup_min: for ``ngram``, the fewest tokens that are looked up.
        model: for ``draft_model``, a folder, a name on the hub, or a model, patched or not; for ``eagle3``,
            the draft's folder or name on the hub; for ``mtp``, those of a checkpoint with the layer, if the
            model's own folder lacks it.
        draft_sampling: for all but ``ngram`` at temperatures above 0. ``coupled`` samples drafts with the
            sequence's own random numbers; the output equals that without drafts. ``rejection`` samples them
            with independent ones and accepts by rejection sampling; more tokens are accepted, and the output
            keeps its distribution.

    Raises:
        ValueError: a setting is out of range, or the method does not have it.
    """

    method: Method
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    model: str | PreTrainedModel | None = None
    draft_sampling: Literal["coupled", "rejection"] = "coupled"

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            raise ValueError(f"speculative method {self.method!r} is none of {', '.join(_METHODS)}")
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; give a whole number from 1 on")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, which is more than prompt_lookup_max = "
                f"{self.prompt_lookup_max}"
            )
        if self.method in _NEED_MODEL and self.model is None:
            raise ValueError(f"{self.method} needs 'model', a folder or a name on the hub")
        if self.method == "ngram" and self.model is not None:
            raise ValueError(f"method {self.method} has no model, but 'model' is given")
        if self.method in ("mtp", "eagle3") and not isinstance(self.model, str | None):
            raise ValueError(
                f"method {self.method} reads a folder or a name on the hub, and 'model' is a "
                f"{type(self.model).__name__}: give a string"
            )
        if self.draft_sampling not in ("coupled", "rejection"):
            raise ValueError(f"draft_sampling is {self.draft_sampling!r}; it may be coupled or rejection")

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> SpeculativeConfig:
        """Returns the configuration that ``{"method": …, …}`` describes."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown or "method" not in settings:
            problem = f"has unknown settings {', '.join(unknown)}" if unknown else "has no 'method'"
            raise ValueError(f"speculative_config {problem}; known settings: {', '.join(sorted(known))}")
        values = dict(settings)
        most = values.get("prompt_lookup_max")
        if isinstance(most, int) and "prompt_lookup_min" not in values:
            values["prompt_lookup_min"] = max(1, min(cls.prompt_lookup_min, most))
        least = values.get("prompt_lookup_min")
        if isinstance(least, int) and "prompt_lookup_max" not in values:
            values["prompt_lookup_max"] = max(cls.prompt_lookup_max, least)
        return cls(**values)
