"""Parameters of a pooling request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
"""The results of a pooling model: of a text, of a pair of texts (``score``), or of each token."""

TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)


@dataclass(frozen=True)
class PoolingParams:
    """Parameters of a pooling request; names are vLLM's.

    Attributes:
        dimensions: leading dimensions of an embedding to return, for models that were trained so
            (Matryoshka); it is scaled to length one after the cut. None: all.
        normalize: True scales an embedding to length one; None: as the model's files say, which is True
            without such files.
        use_activation: True returns probabilities, False logits; None: True. Of embeddings: as ``normalize``.
        truncate_prompt_tokens: most tokens of a text, which is cut at its end; -1: as many as the model
            takes. None: a longer text is an error.
        task: what to compute, where the call does not say it; None: what the model does.

    Raises:
        TypeError: a parameter is of another type.
        ValueError: a parameter is out of its bounds.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    task: PoolingTask | None = None

    def __post_init__(self) -> None:
        for name in ("normalize", "use_activation"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise TypeError(f"{name} is {value!r}; give True, False or None")
        for name, least in (("dimensions", 1), ("truncate_prompt_tokens", -1)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; give an integer or None")
            if value < least or value == 0:
                more = ", or -1 for as many as the model takes" if least < 0 else ""
                raise ValueError(f"{name} is {value}; give at least 1{more}")

    @property
    def scales(self) -> bool | None:
        """True if embeddings are to have length one, False if not, None if the model decides."""
        return self.use_activation if self.normalize is None else self.normalize

    @property
    def activates(self) -> bool:
        """True if logits become probabilities."""
        return self.use_activation is not False


def chosen_task(
    pooling_task: PoolingTask | None, several: Sequence[PoolingParams], known: Sequence[PoolingTask]
) -> PoolingTask:
    """Returns the task of a call.

    Args:
        pooling_task: of the call; None: the parameters say it, or it is the model's first.
        several: parameters of each text.
        known: tasks of the model.

    Raises:
        ValueError: there is no such task, or two are asked for.
    """
    asked = {params.task for params in several if params.task is not None}
    asked |= {pooling_task} if pooling_task is not None else set()
    if len(asked) > 1:
        raise ValueError(f"one call has one task, and this one has {' and '.join(sorted(asked))}: give one")
    task = next(iter(asked), known[0])
    if task not in TASKS:
        raise ValueError(f"pooling_task is {task!r}; give one of {', '.join(known)}")
    return task
