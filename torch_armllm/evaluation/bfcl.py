"""Tasks ``bfcl`` and ``bfcl_CATEGORY`` for lm-eval's harness: the right calls of a chat model's answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_armllm.evaluation.bfcl_checker import is_right, require_checker
from torch_armllm.evaluation.bfcl_rows import CATEGORIES, BfclRow, read_rows
from torch_armllm.evaluation.tool_chat import ToolChat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUP = "bfcl"
_MAX_TOKENS = 512
"""Most tokens of an answer: the longest right one has eight calls."""


def bfcl_categories(name: str) -> tuple[str, ...]:
    """Returns the categories that a task's name stands for; none for a task of another kind."""
    if name == GROUP:
        return CATEGORIES
    return tuple(category for category in CATEGORIES if name == f"{GROUP}_{category}")


def load_bfcl(
    categories: Sequence[str], tokenizer: PreTrainedTokenizerBase, folders: Sequence[Path] = ()
) -> dict[str, Any]:
    """Makes the tasks of categories.

    Args:
        categories: some of `CATEGORIES`.
        tokenizer: of the model, whose chat template renders the questions.
        folders: see `read_rows`.

    Returns:
        lm-eval's tasks by name.

    Raises:
        ImportError: a category needs BFCL's checker, which is not installed.
        ValueError: there are no rows, or the model's chat template takes no tools.
    """
    if any(category != "irrelevance" for category in categories):
        require_checker()
    chat = ToolChat(tokenizer)
    return {f"{GROUP}_{category}": _task(category, chat, folders) for category in categories}


def _task(category: str, chat: ToolChat, folders: Sequence[Path]) -> Any:
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    rows = read_rows(category, folders)
    questions = [
        {"prompt": chat.prompt(row.messages, row.tools), "row": json.dumps(asdict(row))} for row in rows
    ]

    def score(doc: dict[str, Any], answers: list[str]) -> dict[str, float]:
        row = BfclRow(**json.loads(doc["row"]))
        calls = chat.calls(doc["prompt"], answers[0], row.tools)
        return {"acc": float(calls is not None and is_right(category, row, calls))}

    class BfclTask(ConfigurableTask):  # type: ignore[misc]
        is_rendered = True

        def download(self, *_: Any, **__: Any) -> None:
            self.dataset = {"test": Dataset.from_list(questions)}

    end = chat.format.turn_end
    return BfclTask(
        config={
            "task": f"{GROUP}_{category}",
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": lambda doc: doc["prompt"],
            "doc_to_target": lambda _: "",
            "process_results": score,
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
            "generation_kwargs": {
                "until": [end] if end else [],
                "max_gen_toks": _MAX_TOKENS,
                "do_sample": False,
            },
            "num_fewshot": 0,
        }
    )


def is_rendered(task: Any) -> bool:
    """True if a task's prompts are rendered by the chat template, and its answers keep special tokens."""
    return bool(getattr(task, "is_rendered", False))
