"""Texts to calibrate with: a file's, or the model's own."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from torch_armllm.checkpoint.load import checkpoint_folder, load_tokenizer
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.hf.base_model import position_limit

SEQUENCES = 12
LENGTH = 512
_AT_ONCE = 12
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


def calibration_tokens(source: str, file: Path | None) -> Tensor:
    """Token ids to calibrate a checkpoint with: of a file, or else such as the model writes itself.

    Raises:
        ValueError: see `read_tokens`.
    """
    limit = position_limit(AutoConfig.from_pretrained(checkpoint_folder(source)))
    length = LENGTH if limit is None else min(LENGTH, limit)
    if file is None:
        return own_tokens(source, SEQUENCES, length)
    return read_tokens(file, load_tokenizer(source), SEQUENCES, length)


@functools.cache
def own_tokens(source: str, sequences: int, length: int, seed: int = 0) -> Tensor:
    """Texts that a checkpoint's model writes itself in INT4, drawn at temperature 1 behind its first token.

    Data-free calibration (LLM-QAT, arXiv 2305.17888): what a model is likely to say is what it will read.

    Returns:
        Token ids, int64 (sequences, length).
    """
    from torch_armllm.llm.llm import LLM

    llm = LLM(source, skip_tokenizer_init=True, max_model_len=length, max_num_seqs=_AT_ONCE)
    start = llm.model.generation_config.bos_token_id
    start = llm.model.config.get_text_config().bos_token_id if start is None else start
    first = [start or 0] if not isinstance(start, list) else start[:1]
    params = [
        SamplingParams(max_tokens=length - 1, ignore_eos=True, seed=seed + index)
        for index in range(sequences)
    ]
    found = llm.generate([{"prompt_token_ids": first}] * sequences, params)
    return torch.tensor([[*first, *output.outputs[0].token_ids] for output in found])


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
