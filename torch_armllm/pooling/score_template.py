"""Templates by which rerankers made of language models read a query and a document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_QWEN3_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN3_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class ScoreTemplate:
    """Joins a query and a document to the text that a model reads.

    Attributes:
        begin: text before all; a query that begins with it is joined as it is.
        query: of the query, with ``{}`` in its place.
        document: of the document, likewise.
        end: text after all, which is never cut off.
    """

    begin: str
    query: str
    document: str
    end: str

    def join(self, query: str, document: str) -> tuple[str, str]:
        """Returns the text, and its end."""
        if query.startswith(self.begin):
            return query + document.removesuffix(self.end), self.end
        return self.begin + self.query.replace("{}", query) + self.document.replace("{}", document), self.end


def score_template_of(config: Any) -> ScoreTemplate | None:
    """Returns the template of a model whose configuration asks for one; None: it has none."""
    if not getattr(config, "is_original_qwen3_reranker", False):
        return None
    instruction = f"<Instruct>: {_QWEN3_INSTRUCTION}\n"
    return ScoreTemplate(_QWEN3_BEGIN, instruction + "<Query>: {}\n", "<Document>: {}", _QWEN3_END)
