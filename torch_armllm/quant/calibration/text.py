"""Texts to calibrate with: a file's, or the model's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

SEQUENCES = 128
LENGTH = 512
_OWN = 32
"""Texts that a model writes at once."""


def read_tokens(
    file: Path, tokenizer: PreTrainedTokenizerBase, sequences: int = SEQUENCES, length: int = LENGTH
) -> Tensor:
    """Cuts a file's text into sequences of tokens, spread evenly over it.

    Args:
        file: plain text, or ``.jsonl`` with a text in each line: see `read_text`.
        tokenizer: of the model.
        sequences: how many; fewer where the file has not as many.
        length: tokens of each.

    Returns:
        Token ids, int64 (sequences, length).

    Raises:
        ValueError: the file holds fewer than ``length`` tokens.
    """
    ids = torch.tensor(tokenizer(read_text(file), add_special_tokens=False).input_ids, dtype=torch.int64)
    if len(ids) < length:
        raise ValueError(
            f"{file} holds {len(ids)} tokens, and calibration takes sequences of {length}: give it more text"
        )
    pieces = ids[: len(ids) // length * length].view(-1, length)
    chosen = torch.linspace(0, len(pieces) - 1, min(sequences, len(pieces))).long()
    return pieces[chosen]


def read_text(file: Path) -> str:
    """The text of a file; of each line of a ``.jsonl`` file all strings that are values of its object.

    Raises:
        ValueError: a line is not JSON.
    """
    if file.suffix != ".jsonl":
        return file.read_text(encoding="utf-8")
    parts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            parts.append("\n".join(_strings(json.loads(line))))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {file} is not JSON: {error}") from error
    return "\n\n".join(parts)


def own_tokens(model: Any, sequences: int = SEQUENCES, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Texts that the model writes itself, drawn at temperature 1 behind its first token.

    Data-free calibration (LLM-QAT, arXiv 2305.17888): what a model is likely to say is what it will read.

    Returns:
        Token ids, int64 (sequences, length).
    """
    start = model.generation_config.bos_token_id
    start = model.config.get_text_config().bos_token_id if start is None else start
    first = (
        torch.zeros(sequences, 1, dtype=torch.int64) if start is None else torch.full((sequences, 1), start)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.cat([_write(model, part, length) for part in first.split(_OWN)])


def _write(model: Any, first: Tensor, length: int) -> Tensor:
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    found = model.generate(first, max_length=length, min_length=length, pad_token_id=0, **options)
    assert isinstance(found, Tensor)
    return found


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
