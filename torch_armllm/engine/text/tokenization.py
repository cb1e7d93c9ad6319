"""Options with which a request tokenizes its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KNOWN = ("add_special_tokens", "truncate_prompt_tokens", "truncation", "max_length", "truncation_side")


@dataclass(frozen=True)
class Tokenization:
    """Options of a prompt's tokenization; names are vLLM's.

    Attributes:
        add_special_tokens: False leaves out the tokens that the tokenizer puts around a text.
        truncate_prompt_tokens: most tokens of the prompt, of which the last are kept; -1: as many as fit
            before the output. None: a longer prompt is an error.
        truncation_side: the side that is cut, ``left`` or ``right``.

    Raises:
        ValueError: an option is out of its bounds.
    """

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"

    def __post_init__(self) -> None:
        most = self.truncate_prompt_tokens
        if most is not None and (
            isinstance(most, bool) or not isinstance(most, int) or most < -1 or not most
        ):
            raise ValueError(
                f"truncate_prompt_tokens is {most!r}; give at least 1, or -1 for as many as the model takes"
            )
        if self.truncation_side not in ("left", "right"):
            raise ValueError(f"truncation_side is {self.truncation_side!r}; give left or right")

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Tokenization:
        """Reads vLLM's ``tokenization_kwargs``.

        Raises:
            ValueError: an option is unknown, or its value is no good.
        """
        options = dict(options or {})
        if unknown := sorted(set(options) - set(_KNOWN)):
            raise ValueError(f"tokenization_kwargs sets {', '.join(unknown)}; it has {', '.join(_KNOWN)}")
        most = options.pop("max_length", None)
        if options.pop("truncation", False):
            if most is None:
                raise ValueError("tokenization_kwargs sets truncation without max_length: give both")
            options.setdefault("truncate_prompt_tokens", most)
        elif most is not None:
            raise ValueError(f"max_length={most} has no effect without truncation=True: give both")
        return cls(**options)

    @property
    def is_plain(self) -> bool:
        """True if no option changes anything."""
        return self.add_special_tokens and self.truncate_prompt_tokens is None

    def most_tokens(self, max_model_len: int, max_tokens: int | None) -> int | None:
        """Returns the number of tokens to which a prompt is cut; None: it is not.

        Args:
            max_model_len: most tokens of prompt and output.
            max_tokens: most tokens of the output; None: as many as fit.

        Raises:
            ValueError: the model takes fewer tokens than are to be kept.
        """
        most = self.truncate_prompt_tokens
        if most == -1:
            return max(1, max_model_len - (max_tokens or 1))
        if most is not None and most >= max_model_len:
            raise ValueError(
                f"truncate_prompt_tokens is {most}, but max_model_len is {max_model_len}, the output "
                "included: give less, or -1 for as many as fit"
            )
        return most

    def ids(self, tokenizer: PreTrainedTokenizerBase, text: str, most: int | None) -> list[int]:
        """Returns the tokens of a text, of which those that the tokenizer puts around it stay."""
        if most is None:
            return list(tokenizer(text, add_special_tokens=self.add_special_tokens)["input_ids"])
        encoded = tokenizer(text, add_special_tokens=self.add_special_tokens, return_special_tokens_mask=True)
        ids, added = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
        before = next((at for at, one in enumerate(added) if not one), 0)
        after = next((at for at, one in enumerate(reversed(added)) if not one), 0)
        end = len(ids) - after
        if before + after >= most:
            return self.cut(ids, most)
        return [*ids[:before], *self.cut(ids[before:end], most - before - after), *ids[end:]]

    def cut(self, tokens: Sequence[int], most: int | None) -> list[int]:
        """Returns tokens of which no more are left than are allowed."""
        if most is None or len(tokens) <= most:
            return list(tokens)
        return list(tokens[-most:] if self.truncation_side == "left" else tokens[:most])
