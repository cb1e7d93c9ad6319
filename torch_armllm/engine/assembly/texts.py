"""The output texts of an engine."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from typing import TYPE_CHECKING

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.text.detokenizer import TokenPieces
from torch_armllm.engine.text.stopping import OutputText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def output_texts(
    tokenizer: PreTrainedTokenizerBase | None, ends: GenericSequence[int], max_model_len: int
) -> Callable[[Sequence], OutputText]:
    """Returns a function that begins the output text of a sequence; see `OutputText`."""
    pieces = None if tokenizer is None else (TokenPieces(tokenizer, False), TokenPieces(tokenizer, True))

    def begin(sequence: Sequence) -> OutputText:
        prompt = sequence.request.prompt_token_ids
        return OutputText(tokenizer, sequence.params, prompt, ends, max_model_len, pieces)

    return begin
