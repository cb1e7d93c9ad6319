"""Facts found in long texts, by scheme of the weights and dtype of the KV cache.

    python -m bench.quality.needle --text FILE [--model smollm2] [--rows none,int4,int4:int8]
        [--lengths 1024,4096] [--texts 3] [--needles 8] [--json F]

Each text holds sentences such as "One of the special magic numbers for harbor is: 4718362." at even depths,
and a question for each of them follows it, as in RULER's ``niah_multikey_1``; the other sentences distract.
The engine continues "… mentioned in the provided text is" greedily, and a number is found if the answer holds
it.  All questions of a text share its prefill.

A row is a scheme (``none``: weights as they are) or the folder of a quantized checkpoint, with ``:int8`` for
another dtype of the KV cache.  Two tables show the share found, by length and by depth, with standard errors;
p is that of McNemar's exact test against the first row.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from bench.case import run
from torch_armllm import LLM, SamplingParams
from torch_armllm.checkpoint.load import load_tokenizer
from torch_armllm.evaluation.paired_tests import mcnemar, mean

KEYS = (
    *("harbor", "lantern", "meadow", "violin", "glacier", "pepper", "saddle", "thunder", "walnut", "canyon"),
    *("feather", "marble", "orchard", "pigeon", "rocket", "tunnel"),
)
_BEGIN = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
_NEEDLE = "One of the special magic numbers for {key} is: {number}."
_END = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)
_ANSWER = 16
"""Most tokens of an answer: seven digits and a few words."""
THIRDS = ("first third", "middle", "last third")


class Question(NamedTuple):
    """A question about a text; ``depth`` is the needle's place in it, 0 … 1."""

    prompt: str
    number: str
    length: int
    depth: float


class Haystack:
    """Sentences of a text with their lengths in tokens.

    Args:
        text: the text.
        tokenizer: counts tokens.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._sentences = re.split(r"(?<=[.!?])\s+", text.strip())
        encoded = tokenizer([" " + one for one in self._sentences], add_special_tokens=False).input_ids
        self._tokens = [len(ids) for ids in encoded]

    def questions(self, length: int, needles: int, part: int, parts: int) -> list[Question]:
        """Returns the questions of one text.

        Args:
            length: tokens of a prompt with its answer, at most.
            needles: facts in the text.
            part: which part of the haystack the text begins with, of ``parts`` of equal size.
            parts: number of parts.

        Raises:
            ValueError: the length leaves no room for sentences, or the haystack is too short.
        """
        draw = random.Random(f"{length} {part}")
        keys = draw.sample(KEYS, needles)
        numbers = [str(draw.randrange(1_000_000, 10_000_000)) for _ in keys]
        facts = [_NEEDLE.format(key=key, number=number) for key, number in zip(keys, numbers, strict=True)]
        ends = [_END.format(key=key) for key in keys]
        fixed = self._count(_BEGIN + " ".join(facts)) + max(self._count(end) for end in ends) + _ANSWER
        first = part * len(self._sentences) // parts
        last, tokens = first, 0
        # joined sentences can have a token or so more than their sum
        room = int((length - fixed) * 0.98)
        while last < len(self._sentences) and tokens + self._tokens[last] <= room:
            tokens += self._tokens[last]
            last += 1
        if last - first <= needles:
            raise ValueError(f"{length} tokens have no room for {needles} facts between sentences")
        if last == len(self._sentences):
            raise ValueError(f"part {part} of the text is shorter than {length} tokens: use a longer text")
        sentences = self._sentences[first:last]
        depths = [(index + 0.5) / needles for index in range(needles)]
        for fact, depth in reversed(list(zip(facts, depths, strict=True))):
            sentences.insert(int(depth * (last - first)), fact)
        body = _BEGIN + " ".join(sentences)
        return [
            Question(body + end, number, length, depth)
            for end, number, depth in zip(ends, numbers, depths, strict=True)
        ]

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False).input_ids)


def found(model: str, row: str, questions: Sequence[Question], max_num_seqs: int = 8) -> list[bool]:
    """Returns which numbers a row's engine finds."""
    scheme, _, cache = row.partition(":")
    folder = Path(scheme).is_dir()
    llm = LLM(
        scheme if folder else model,
        dtype="bfloat16",
        quantization="auto" if folder else None if scheme == "none" else scheme,
        kv_cache_dtype=cache or "auto",
        max_model_len=max(question.length for question in questions),
        max_num_seqs=max_num_seqs,
    )
    params = SamplingParams(temperature=0, max_tokens=_ANSWER)
    outputs = llm.generate([question.prompt for question in questions], params)
    return [
        question.number in output.outputs[0].text for question, output in zip(questions, outputs, strict=True)
    ]


def table(rows: dict[str, list[bool]], questions: Sequence[Question]) -> str:
    """Returns both tables as Markdown."""
    lengths = [str(length) for length in sorted({question.length for question in questions})]
    by_length = [str(question.length) for question in questions]
    by_depth = [THIRDS[min(2, int(3 * question.depth))] for question in questions]
    base = next(iter(rows.values()))
    lines = []
    for heads, groups in ((lengths, by_length), (THIRDS, by_depth)):
        lines += ["", f"| | {' | '.join(heads)} | all | p |", "|---" * (len(heads) + 3) + "|"]
        for name, hits in rows.items():
            cells = [
                _share([hit for hit, g in zip(hits, groups, strict=True) if g == head]) for head in heads
            ]
            p = "" if hits is base else f"{mcnemar(base, hits):.2f}"
            lines.append(f"| `{name}` | {' | '.join(cells)} | {_share(hits)} | {p} |")
    return "\n".join(lines[1:])


def _share(hits: Sequence[bool]) -> str:
    if not hits:
        return ""
    value, error = mean([float(hit) for hit in hits])
    return f"{100 * value:.0f} ± {100 * error:.0f} %"


def needle(
    *,
    text: Path,
    model: str = "smollm2",
    rows: tuple[str, ...] = ("none", "int4", "int4:int8"),
    lengths: tuple[int, ...] = (1024, 2048, 4096, 7168),
    texts: Annotated[int, "texts of each length"] = 3,
    needles: Annotated[int, "facts in each text"] = 8,
    json: Path | None = None,
) -> None:
    hay = Haystack(text.read_text(encoding="utf-8"), load_tokenizer(model))
    questions = [
        question
        for length in lengths
        for part in range(texts)
        for question in hay.questions(length, needles, part, texts)
    ]
    hits: dict[str, list[bool]] = {}
    for row in rows:
        hits[row] = found(model, row, questions)
        print(f"{row}: {sum(hits[row])} of {len(questions)}", flush=True)
        if json is not None:
            asked = [question._asdict() for question in questions]
            json.write_text(dumps({"questions": asked, "rows": hits}))
    print(table(hits, questions))


if __name__ == "__main__":
    run(needle)
