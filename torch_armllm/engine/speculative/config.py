"""How tokens are guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_METHODS = ("ngram", "draft_model")


@dataclass(frozen=True)
class SpeculativeConfig:
    """`EngineConfig.speculative_config`, checked; names are vLLM's.

    Attributes:
        method: ``ngram`` looks up in the text itself how it went on where it last said the same;
            ``draft_model`` lets a smaller model of the same vocabulary sequence prefix.
        num_speculative_tokens: most tokens of a draft.
        prompt_lookup_max: of ``ngram``: so many last tokens are looked up first, then fewer.
        prompt_lookup_min: of ``ngram``: the fewest that are looked up.
        model: of ``draft_model``: a folder, a name on the hub, or a model, patched or not.
        draft_sampling: of ``draft_model``, where the temperature is above 0: ``coupled`` draws guesses with
            the random numbers of the sequence itself, whose tokens are then those that it gets without
            drafts; ``rejection`` draws them with others and takes as many as it may (rejection sampling), so
            that more are accepted, and the sequence has the same distribution.

    Raises:
        ValueError: a setting is out of its range, or the method has no such setting.
    """

    method: Literal["ngram", "draft_model"]
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
        if (self.method == "draft_model") != (self.model is not None):
            raise ValueError(
                "draft_model needs 'model', a folder or a name on the hub"
                if self.model is None
                else f"method {self.method} takes no model, but 'model' is given"
            )
        if self.draft_sampling not in ("coupled", "rejection"):
            raise ValueError(f"draft_sampling is {self.draft_sampling!r}; it may be coupled or rejection")

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> SpeculativeConfig:
        """The configuration that ``{"method": …, …}`` describes."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown or "method" not in settings:
            told = f"has unknown settings {', '.join(unknown)}" if unknown else "has no 'method'"
            raise ValueError(f"speculative_config {told}; there are {', '.join(sorted(known))}")
        given = dict(settings)
        most = given.get("prompt_lookup_max")
        if isinstance(most, int) and "prompt_lookup_min" not in given:
            given["prompt_lookup_min"] = max(1, min(cls.prompt_lookup_min, most))
        least = given.get("prompt_lookup_min")
        if isinstance(least, int) and "prompt_lookup_max" not in given:
            given["prompt_lookup_max"] = max(cls.prompt_lookup_max, least)
        return cls(**given)
