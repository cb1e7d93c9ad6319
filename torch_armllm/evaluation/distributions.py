"""Divergence of a model's next-token distributions from a baseline's, over the tokens of a text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_armllm.evaluation.spans import log_probabilities
from torch_armllm.system.dtypes import dtype_name


def compare_logits(base: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Compares next-token distributions with those of a baseline.

    Args:
        base: the baseline's logits ``(R, vocab_size)``.
        other: the logits to compare, of the same shape.

    Returns:
        For each position ``(R,)`` the KL divergence from the baseline in nats, and whether the most probable
        token is the same.
    """
    base, other = log_probabilities(base), log_probabilities(other)
    return (base.exp() * (base - other)).sum(-1), base.argmax(-1) == other.argmax(-1)


class BaselineLogits:
    """Stores a baseline's logits of a text's first positions in a file, in their own dtype.

    Args:
        file: the file to write.
        most: most positions that are stored.
    """

    def __init__(self, file: Path, most: int) -> None:
        self._file = file.open("wb")
        self._most = most
        self._tokens = 0
        self._dtype = ""

    def add(self, logits: Tensor) -> None:
        """Stores the logits of the next positions ``(R, vocab_size)``."""
        rows = logits[: self._most - self._tokens].contiguous()
        if len(rows):
            self._file.write(rows.view(torch.uint8).numpy().data)
            self._tokens += len(rows)
            self._dtype = dtype_name(rows.dtype)

    def result(self) -> dict[str, Any]:
        """Closes the file, and returns the number of tokens and the dtype."""
        self._file.close()
        return {"tokens": self._tokens, "dtype": self._dtype}


class LogitComparison:
    """Compares a model's logits with those that `BaselineLogits` stored, in the same order.

    Args:
        file: the baseline's file.
        dtype: dtype of its logits.
    """

    def __init__(self, file: Path, dtype: str) -> None:
        self._file = file.open("rb")
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._divergences: list[float] = []
        self._same = 0

    def add(self, logits: Tensor) -> None:
        """Compares the next positions ``(R, vocab_size)``; positions beyond the file's end are ignored."""
        width = logits.shape[-1] * self._dtype.itemsize
        data = np.fromfile(self._file, np.uint8, len(logits) * width)
        if not data.size:
            return
        base = torch.from_numpy(data).view(self._dtype).view(-1, logits.shape[-1])
        divergences, same = compare_logits(base, logits[: len(base)])
        self._divergences += divergences.tolist()
        self._same += int(same.sum())

    def result(self) -> dict[str, Any]:
        """Returns tokens, mean KL divergence from the baseline (nats), its standard error and agreement."""
        self._file.close()
        divergences = np.array(self._divergences)
        count = len(divergences)
        if not count:
            return {"tokens": 0}
        return {
            "tokens": count,
            "kl": float(divergences.mean()),
            "kl_stderr": float(divergences.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan,
            "agreement": self._same / count,
        }
