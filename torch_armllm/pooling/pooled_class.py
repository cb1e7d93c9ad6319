"""Classes of transformers whose models pool: how one is loaded, and what it makes of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PooledClass:
    """A kind of class.

    Attributes:
        endings: of the names of its classes.
        loader: name of the class of transformers that loads them.
        makes: vectors (``embed``), probabilities of a text's classes (``classify``) or those of its tokens
            (``token_classify``).
    """

    endings: tuple[str, ...]
    loader: str
    makes: Literal["embed", "classify", "token_classify"]


_BARE = PooledClass(("ForMaskedLM", "ForTextEncoding", "Model"), "AutoModel", "embed")
_CLASSES = (
    PooledClass(("ForSequenceClassification",), "AutoModelForSequenceClassification", "classify"),
    PooledClass(("ForTokenClassification",), "AutoModelForTokenClassification", "token_classify"),
    _BARE,
)
_GENERATING = ("LMHeadModel", "DoubleHeadsModel")
"""Endings of the names of classes that generate, though they end as others that pool."""


def pools(name: str) -> bool:
    """True if the models of a class do not generate."""
    endings = tuple(ending for each in _CLASSES for ending in each.endings)
    return name.endswith(endings) and not name.endswith(_GENERATING)


def pooled_class(name: str) -> PooledClass:
    """Returns the kind of a class by its name; one that generates pools without its head."""
    return next((each for each in _CLASSES if name.endswith(each.endings)), _BARE)
