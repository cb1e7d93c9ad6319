"""A loaded pooling model with its tokenizer and files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_armllm.pooling.pooling_model import PoolingModel
from torch_armllm.pooling.score_template import ScoreTemplate
from torch_armllm.pooling.sentence_files import SentenceFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedPooling:
    """A pooling model with what its texts need.

    Attributes:
        model: the model.
        tokenizer: its tokenizer; None: texts are token ids.
        files: the files of sentence-transformers.
        max_tokens: most tokens of a text that the model takes; None: no limit.
        template: of pairs of texts; None: the tokenizer joins them.
    """

    model: PoolingModel
    tokenizer: PreTrainedTokenizerBase | None
    files: SentenceFiles
    max_tokens: int | None
    template: ScoreTemplate | None = None
