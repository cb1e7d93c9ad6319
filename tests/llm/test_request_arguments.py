"""Thinking budgets and logit processors in a whole engine, with and without draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support.tiny_server import checkpoint, tokenizer
from torch_armllm import LLM, AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, SamplingParams

CONFIG = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
DRAFTS = [None, {"method": "ngram", "num_speculative_tokens": 3}]


class Repeat(AdapterLogitsProcessor):
    """Makes the token that is ``extra_args["period"]`` tokens back very likely."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., Tensor] | None:
        period = (params.extra_args or {}).get("period")
        if period is None:
            return None

        def repeat(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
            logits[[*prompt, *output][-period]] += 1000.0
            return logits

        return repeat


class RepeatRows(LogitsProcessor):
    """The same for all rows of a step together."""

    def __init__(self, config: Any, device: Any, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[int, list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row, params, prompt, output in batch_update.added:
            self.rows[row] = ((params.extra_args or {}).get("period", 0), prompt, output)
        for row in batch_update.removed:
            self.rows.pop(row)
        for old, new, _ in batch_update.moved:
            self.rows[new] = self.rows.pop(old)

    def apply(self, logits: Tensor) -> Tensor:
        for row, (period, prompt, output) in self.rows.items():
            if period:
                logits[row, [*prompt, *output][-period]] += 1000.0
        return logits


@pytest.fixture(scope="module", params=DRAFTS, ids=["no drafts", "drafts"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(
        str(checkpoint(tmp_path_factory.mktemp("tiny"))),
        reasoning_config=CONFIG,
        logits_processors=[Repeat],
        speculative_config=request.param,
        progress=False,
    )


def outputs(llm: LLM, prompt: str, **settings: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=30, ignore_eos=True, **settings)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return [completion.token_ids for completion in output.outputs]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"n": 3, "seed": 5}], ids=["greedy", "sampled"])
def test_reasoning_ends_after_its_budget(llm: LLM, settings: dict[str, Any]) -> None:
    end = tokenizer()("</think>")["input_ids"]
    free = outputs(llm, "why? <think>", **settings)
    for limited, unlimited in zip(
        outputs(llm, "why? <think>", thinking_token_budget=6, **settings), free, strict=True
    ):
        assert limited[:6] == unlimited[:6]
        assert limited[6 : 6 + len(end)] == end
        assert len(limited) == 30
    assert outputs(llm, "why?", thinking_token_budget=6, **settings) == outputs(llm, "why?", **settings)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_processors_change_outputs(llm: LLM, temperature: float) -> None:
    (output,) = outputs(llm, "abc", temperature=temperature, extra_args={"period": 3})
    assert bytes(tokenizer().decode(output), "utf-8") == b"abc" * 10
    if llm.llm_engine.speculative_decoder is not None:
        assert llm.stats.totals.accepted_tokens > 0


def test_pooling_models_take_no_logit_processors(tmp_path: Path) -> None:
    folder = str(checkpoint(tmp_path))
    with pytest.raises(ValueError) as refused:
        LLM(folder, runner="pooling", logits_processors=[Repeat], progress=False)
    assert str(refused.value) == "logits_processors are for models that generate, and this one pools"


def test_processors_of_batches_change_outputs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, llm: LLM
) -> None:
    """Requests that come and go in one engine have the outputs of an engine that they have to themselves."""
    folder = str(checkpoint(tmp_path))
    caplog.set_level("INFO", logger="torch_armllm")
    batched = LLM(folder, logits_processors=[RepeatRows], max_num_seqs=3, progress=False)
    assert "no draft tokens: the logits processor RepeatRows sees one row for each sequence" in caplog.text
    prompts = ["abc", "abcd", "ab", "why?", "abcde"]
    params = [
        SamplingParams(
            max_tokens=20 + 3 * i,
            ignore_eos=True,
            seed=i,
            temperature=i % 2 * 1.0,
            n=1 + i % 2,
            extra_args={"period": len(prompt)} if prompt.startswith("a") else None,
        )
        for i, prompt in enumerate(prompts)
    ]
    together = batched.generate(prompts, params, use_tqdm=False)
    for prompt, settings, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate(prompt, settings, use_tqdm=False)
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in alone.outputs]
    assert bytes(tokenizer().decode(together[0].outputs[0].token_ids), "utf-8") == (b"abc" * 10)[:20]
    with pytest.raises(ValueError) as refused:
        LLM(folder, logits_processors=[RepeatRows], speculative_config=DRAFTS[1], progress=False)
    assert str(refused.value) == (
        "speculative_config is set, but the logits processor RepeatRows sees one row for each sequence of a "
        "batch, and draft tokens give a sequence several rows: leave it out, or give a subclass of "
        "AdapterLogitsProcessor"
    )
