"""Thinking budgets: the end of reasoning is forced after as many tokens."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.engine.sampling.test_sampler import VOCAB, Words, ids, sampler, sequence, some_logits
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.sampling.thinking_budget import ReasoningTokens, ThinkingBudget, find_reasoning
from torch_armllm.engine.text.reasoning_tags import PARSER_NAMES

BEGIN, END = 7, 8
ONE = ReasoningTokens((BEGIN,), (END,), (END,))
LONG = ReasoningTokens((BEGIN, 9), (11, END), (12, 11, END))


def forced(
    tags: ReasoningTokens,
    budget: int,
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    split: int | None = None,
) -> int | None:
    """Returns the forced token; the output's tokens from ``split`` on are draft tokens."""
    keeper = ThinkingBudget(budget, tags, prompt)
    made = sequence(prompt=prompt, output=output[:split])
    assert split is None or keeper.forced(made, ()) == forced(tags, budget, prompt, output[:split])
    return keeper.forced(made, () if split is None else output[split:])


@pytest.mark.parametrize(
    ("tags", "budget", "prompt", "output", "expected"),
    [
        (ONE, 3, (1, BEGIN), (5, 5), None),
        (ONE, 3, (1, BEGIN), (5, 5, 5), END),
        (ONE, 0, (1, BEGIN), (), END),
        (ONE, 3, (1, BEGIN, 5, 5), (5,), END),  # reasoning in the prompt counts
        (ONE, 3, (1, BEGIN, 5, END), (5, 5, 5, 5), None),  # the prompt has ended it
        (ONE, 3, (1,), (5, 5, 5, 5), None),  # no reasoning
        (ONE, 2, (1,), (BEGIN, 5), None),
        (ONE, 2, (1,), (BEGIN, 5, 5), END),
        (ONE, 2, (1,), (BEGIN, 5, 5, END), None),
        (ONE, 2, (1,), (BEGIN, 5, END, 5, 5, 5), None),  # ended by itself
        (ONE, 2, (1,), (BEGIN, 5, 5, END, BEGIN, 5), None),  # the next has the whole budget
        (ONE, 2, (1,), (BEGIN, 5, 5, END, BEGIN, 5, 5), END),
        (LONG, 2, (BEGIN, 9), (5, 5), 12),
        (LONG, 2, (BEGIN, 9), (5, 5, 12), 11),
        (LONG, 2, (BEGIN, 9), (5, 5, 12, 11), END),
        (LONG, 2, (BEGIN, 9), (5, 5, 12, 11, END), None),
        (LONG, 2, (BEGIN, 9), (5, 12), 11),  # the model has begun it
        (LONG, 3, (BEGIN, 9), (5, 11, END), None),
        (LONG, 2, (BEGIN, 5, 5, 5, 5), (5,), None),  # half a tag
        (ReasoningTokens((BEGIN,), (END,), (END,), True), 2, (1, 1, 1, 1), (5, 5), END),
        (ReasoningTokens((BEGIN,), (END,), (END,), True), 2, (1, END, 6), (5, 5), None),
        (ReasoningTokens((BEGIN,), (END,), (END,), True), 2, (END, 1, 1, 1), (5, 5), END),
    ],
)
def test_end_is_forced_after_the_budget(
    tags: ReasoningTokens, budget: int, prompt: tuple[int, ...], output: tuple[int, ...], expected: int | None
) -> None:
    assert forced(tags, budget, prompt, output) == expected
    for split in range(len(output) + 1):
        assert forced(tags, budget, prompt, output, split) == expected


def test_forced_token_overrides_the_other_settings() -> None:
    draw = Sampler(VOCAB, (2,), Words(), ONE)
    settings: dict[str, Any] = {
        "thinking_token_budget": 1,
        "logit_bias": {END: -100.0},
        "allowed_token_ids": [5, 6],
        "min_p": 0.9,
        "repetition_penalty": 2.0,
        "logprobs": 0,
    }
    for temperature in (0.0, 1.0):
        made = sequence(prompt=(3, BEGIN), output=(5,), temperature=temperature, **settings)
        (drawn,) = draw(some_logits(1), [made])
        assert drawn.token_id == END
        assert drawn.logprobs is not None and -20 < drawn.logprobs[END].logprob < 0  # the model's own
        made.token_ids.append(END)
        assert draw(some_logits(1), [made])[0].token_id in (5, 6)


def test_drafts_are_verified_with_the_budget() -> None:
    draw = Sampler(VOCAB, (2,), Words(), ONE)
    made = sequence(prompt=(3, BEGIN), output=(), temperature=0.0, thinking_token_budget=2)
    logits = some_logits(4)
    best = logits.argmax(-1).tolist()
    made.draft = [best[0], best[1], END]
    assert ids(draw.verify(logits, made)) == [best[0], best[1], END, best[3]]
    made.draft = best[:3]
    assert ids(draw.verify(logits, made)) == [best[0], best[1], END]


def test_budget_needs_known_reasoning() -> None:
    params = sequence(thinking_token_budget=5).params
    with pytest.raises(ValueError) as refused:
        sampler().check(params)
    assert str(refused.value) == (
        "thinking_token_budget is 5, but it is not known how this model marks its reasoning: give the engine "
        'reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}'
    )
    assert sequence(thinking_token_budget=-1).params.thinking_token_budget is None


class Tagged(Words):
    """A tokenizer with the tags of two families, and other texts as their letters."""

    chat_template = "{{ '[THINK]' }}"

    def get_vocab(self) -> dict[str, int]:
        return {"[THINK]": BEGIN, "[/THINK]": END}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(re.sub("[^a-z ]", "", text.lower()), add_special_tokens)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, ((BEGIN,), (END,), (END,))),
        ({"reasoning_parser": "none"}, None),
        ({"reasoning_parser": "identity"}, None),
        ({"reasoning_parser": "openai_gptoss"}, ((BEGIN,), (END,), (END,))),  # the tokenizer tells
        ({"reasoning_end_str": "ab[/THINK]"}, ((BEGIN,), (END,), (10, 11, *Words().encode("think", False)))),
        ({"reasoning_start_str": "a", "reasoning_end_str": "b"}, ((10,), (11,), (11,))),
    ],
)
def test_tokens_of_the_reasoning(settings: dict[str, str] | None, expected: Any) -> None:
    found = find_reasoning(settings, Tagged())
    assert (found and (found.begin, found.end, found.forced)) == expected
    assert find_reasoning(settings, None) is None


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"reasoning_start_str": "a"},
            "reasoning_config = {'reasoning_start_str': 'a'}: give both reasoning_start_str and "
            "reasoning_end_str, or a reasoning_parser",
        ),
        (
            {"reasoning_start_str": "a", "reasoning_end_str": "_"},
            "reasoning_config: the tokenizer has no tokens for '_'; give another text",
        ),
    ],
)
def test_texts_that_cannot_be_forced(settings: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        find_reasoning(settings, Tagged())


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        (
            {"start": "a"},
            TypeError,
            "reasoning_config = {'start': 'a'}: give a dict of reasoning_start_str, reasoning_end_str, "
            "reasoning_parser",
        ),
        (
            {"reasoning_end_str": ""},
            TypeError,
            "reasoning_config: reasoning_end_str is ''; give a text",
        ),
        (
            {"reasoning_parser": "mine"},
            ValueError,
            f"reasoning_config: reasoning_parser is 'mine'; give {', '.join(PARSER_NAMES)}",
        ),
    ],
)
def test_wrong_settings(settings: dict[str, str], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(told)}$"):
        EngineConfig(reasoning_config=settings)
