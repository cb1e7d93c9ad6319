"""Prompts of the serving benchmark: random words of a given length, or recorded prompts."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from torch_armllm.benchmark.prompt_files import read_prompt_file
from torch_armllm.benchmark.serving.records import Question

# Words that are one token, with the space before them, in the vocabularies of most models.
_WORDS = re.findall(
    r"\w+",
    """
    the of and to in is that for it as was with be by on not he his but at are this have from or had an
    they which one you were all her she there would their we him been has when who will no more if out so
    up said what its about than into them can only other time new some could these two may first then do
    any like my now over such our man me even most made after also did many off before must well back
    through years much where your way down should because long each just state those people too mr how
    little good world make very year still see own work men day get here old life both between under last
    never know us great
    """,
)


class RandomQuestions:
    """Prompts of random words.

    Args:
        input_len: tokens of a prompt: as the tokenizer counts them, or approximate without a tokenizer.
        output_len: max_tokens of each request.
        tokenizer: a folder or a hub name; None: every word counts as a token.
    """

    def __init__(self, input_len: int, output_len: int, tokenizer: str | None = None) -> None:
        self._input_len = input_len
        self._output_len = output_len
        self._cut = _cutter(tokenizer) if tokenizer else None

    def draw(self, count: int, seed: str) -> list[Question]:
        """Returns random questions; equal seeds return equal questions."""
        source = random.Random(seed)
        return [Question(self._text(source), self._output_len) for _ in range(count)]

    def _text(self, source: random.Random) -> str:
        text = " ".join(source.choices(_WORDS, k=self._input_len))
        return self._cut(text, self._input_len) if self._cut else text


class RecordedQuestions:
    """Prompts of a file, repeated from its beginning if it has fewer than requested.

    Args:
        file: see ``read_prompt_file``.
        output_len: max_tokens of each request.
        texts_only: True to refuse conversations of more than a single question.

    Raises:
        ValueError: the file holds no prompt, or a line of another form.
        OSError: the file cannot be read.
    """

    def __init__(self, file: Path, output_len: int, texts_only: bool = False) -> None:
        self._prompts = read_prompt_file(file)
        self._output_len = output_len
        if not texts_only:
            return
        for index, prompt in enumerate(self._prompts):
            if isinstance(prompt, str):
                continue
            if len(prompt) != 1 or not isinstance(prompt[0].get("content"), str):
                raise ValueError(f"{file} holds conversations; they need --endpoint chat")
            self._prompts[index] = prompt[0]["content"]

    def __len__(self) -> int:
        return len(self._prompts)

    def draw(self, count: int, seed: str) -> list[Question]:
        """Returns the first prompts of the file; the seed has no effect."""
        return [
            Question(self._prompts[index % len(self._prompts)], self._output_len) for index in range(count)
        ]


def _cutter(name: str) -> Callable[[str, int], str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)

    def cut(text: str, length: int) -> str:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return str(tokenizer.decode(tokens[:length]))

    return cut
