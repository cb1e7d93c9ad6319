"""Tokenizers of words, with the special tokens that a processor asks for."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ("what", "is", "this", "a", "cat", "dog", "red", "blue", ":", "user", "assistant", "says")
NUMBERED = 81
"""Words ``w0``, ``w1`` and so on."""
SPARE = 16
"""Special tokens without a meaning, for ids of a configuration that no token stands for."""
_NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_LITERAL = re.compile(r"<[^<>\s{}%]{1,40}>|\[[A-Z_]{2,20}\]|\|[A-Z]{2,20}\|")
"""The form of special tokens in the code of processors."""


class WishingTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A tokenizer that notes the special tokens which a processor asks it for.

    Args:
        names: attributes of special tokens that it has, beside those of all tokenizers.

    Attributes:
        wishes: tokens by the attribute that names them, or by themselves where their text is asked for.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__(tokenizer_object=_words(()), **_NAMED)
        self.__dict__["wishes"] = {name: f"<{name.removesuffix('_token')}>" for name in names}

    def __getattr__(self, key: str) -> Any:
        stem = key.removesuffix("_ids").removesuffix("_id")
        if stem in self.__dict__.get("wishes", ()):
            return self.wishes[stem] if stem == key else 1
        return super().__getattr__(key)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Notes tokens that are named by their text."""
        for token in [tokens] if isinstance(tokens, str) else tokens or ():
            if "wishes" in self.__dict__ and str(token) not in _NAMED.values():
                self.wishes.setdefault(str(token), str(token))
        return 1 if isinstance(tokens, str) else [1] * len(tokens or ())

    def get_vocab(self) -> dict[str, int]:
        """Returns a vocabulary that has every token."""
        return _Everything(self.wishes) if "wishes" in self.__dict__ else super().get_vocab()


class _Everything(dict[str, int]):
    def __init__(self, wishes: dict[str, str]) -> None:
        super().__init__()
        self._wishes = wishes

    def __missing__(self, token: str) -> int:
        self._wishes.setdefault(token, token)
        return 1


def _words(special: Iterable[str]) -> Tokenizer:
    vocabulary = [*_NAMED.values(), *WORDS, *(f"w{number}" for number in range(NUMBERED)), *special]
    ids = {word: number for number, word in enumerate(dict.fromkeys(vocabulary))}
    words = Tokenizer(models.WordLevel(ids, unk_token=_NAMED["unk_token"]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return words


def tiny_tokenizer(wishes: dict[str, str], literals: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of words.

    Args:
        wishes: special tokens, as in `WishingTokenizer`.
        literals: further special tokens.
    """
    spare = [f"<spare_{number}>" for number in range(SPARE)]
    special = list(dict.fromkeys([*wishes.values(), *literals, *spare]))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_words(special),
        extra_special_tokens={name: token for name, token in wishes.items() if name.endswith("_token")},
        **_NAMED,
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def literal_tokens(kind: Any) -> list[str]:
    """Returns the special tokens that the code of a processor names.

    Args:
        kind: its class.
    """
    values: list[str] = []
    for each in kind.__mro__:
        if each.__module__.startswith("transformers.models"):
            values += [
                value for value in vars(importlib.import_module(each.__module__)).values() if _is(value)
            ]
            for value in vars(each).values():
                values += _strings_of(getattr(value, "__wrapped__", value))
    found = [token for value in values if len(value) < 400 for token in _LITERAL.findall(value)]
    return list(dict.fromkeys(found))


def _is(value: Any) -> bool:
    return isinstance(value, str)


def _strings_of(value: Any) -> list[str]:
    if isinstance(value, FunctionType):
        return [*_constants(value.__code__), *filter(_is, value.__defaults__ or ())]
    return [value] if _is(value) else []


def _constants(code: CodeType) -> list[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [c for c in code.co_consts if _is(c)] + [text for each in inner for text in _constants(each)]
