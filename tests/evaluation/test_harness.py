"""Packed scoring with shared prefixes equals lm-eval's own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torch_armllm.checkpoint.load import load_tokenizer
from torch_armllm.evaluation.harness import ArmLM
from torch_armllm.evaluation.loading import load_variant
from torch_armllm.evaluation.module_scorer import ModuleScorer
from torch_armllm.evaluation.plan_scorer import PlanScorer
from torch_armllm.evaluation.variant import Variant

_CONTEXT = list(range(20, 60))
_REQUESTS = [
    *((_CONTEXT, [70, 71 + n, 72]) for n in range(4)),  # one question, four answers
    *((_CONTEXT[:33], [n]) for n in range(40, 44)),  # answers of one token
    *(([5 + n, *_CONTEXT[: 7 * n]], [80] * (n + 1)) for n in range(6)),  # nothing in common
    ([9] * 130, [9] * 3),  # cut on the left
    ([7], [8]),
]


def _harness(folder: Path, scheme: str, **options: Any) -> ArmLM:
    model, _ = load_variant(str(folder), Variant.parse(scheme), "float32")
    return ArmLM(model, tokenizer=load_tokenizer(str(folder)), max_length=128, batch_size=3, **options)


def _answers(harness: ArmLM) -> list[tuple[float, bool]]:
    requests = [((str(n), ""), *request) for n, request in enumerate(_REQUESTS)]
    return harness._loglikelihood_tokens(requests, disable_tqdm=True)


@pytest.mark.parametrize("scheme", ["int4-g32i", "int4-row"])
def test_plan_scorer_equals_lm_eval_bitwise(tiny_folder: Path, scheme: str) -> None:
    packed = _harness(tiny_folder, scheme)
    assert isinstance(packed._scorer, PlanScorer)
    plain = ArmLM(packed.model, tokenizer=packed.tokenizer, max_length=128, batch_size=3, plain=True)
    answers = _answers(packed)
    assert answers == _answers(plain)
    assert len({value for value, _ in answers}) == len(_REQUESTS)


def test_exactly_one_token_is_greedy(tiny_folder: Path) -> None:
    harness = _harness(tiny_folder, "int4-g32i")
    asked = [(("", str(token)), _CONTEXT, [token]) for token in range(harness.tokenizer.vocab_size)]
    answers = harness._loglikelihood_tokens(asked, disable_tqdm=True)
    assert sum(greedy for _, greedy in answers) == 1 and max(answers)[1]


def test_small_steps_do_not_change_the_results(tiny_folder: Path) -> None:
    harness = _harness(tiny_folder, "int4-g32i")
    whole = _answers(harness)
    assert isinstance(harness._scorer, PlanScorer)
    harness._scorer._most = 16
    assert _answers(harness) == whole
    assert harness._scorer._pool.free == len(harness._scorer._pool)


def test_module_scorer_equals_lm_eval_to_rounding(tiny_folder: Path) -> None:
    shared = _harness(tiny_folder, "f32")
    assert isinstance(shared._scorer, ModuleScorer)
    plain = ArmLM(shared.model, tokenizer=shared.tokenizer, max_length=128, batch_size=3, plain=True)
    for (a, same), (b, expected) in zip(_answers(shared), _answers(plain), strict=True):
        assert a == pytest.approx(b, abs=1e-4) and same == expected


@pytest.mark.parametrize("scheme", ["int4-g32i", "f32"])
def test_texts_are_scored_in_windows(tiny_folder: Path, scheme: str) -> None:
    shared = _harness(tiny_folder, scheme)
    seen: list[torch.Tensor] = []
    shared.watch = seen.append
    plain = ArmLM(shared.model, tokenizer=shared.tokenizer, max_length=128, batch_size=3, plain=True)
    windows = [(None, [1], list(range(3, 131))), (None, list(range(3, 131))[-100:], list(range(28)))]
    ours, theirs = (
        h._loglikelihood_tokens(windows, disable_tqdm=True, override_bs=2) for h in (shared, plain)
    )
    for (a, _), (b, _) in zip(ours, theirs, strict=True):
        assert a == b if scheme != "f32" else a == pytest.approx(b, abs=1e-3)
    assert sum(len(rows) for rows in seen) == 128 + 127


def _generated(harness: ArmLM, contexts: list[str], **settings: Any) -> list[str]:
    from lm_eval.api.instance import Instance

    asked = [
        Instance("generate_until", {}, (context, {"until": ["\n"], "max_gen_toks": 12, **settings}), n)
        for n, context in enumerate(contexts)
    ]
    answers: list[str] = harness.generate_until(asked, disable_tqdm=True)
    return answers


def test_engine_generates_what_lm_eval_does(tiny_folder: Path) -> None:
    engine = _harness(tiny_folder, "int4-g32i")
    plain = ArmLM(engine.model, tokenizer=engine.tokenizer, max_length=128, batch_size=1, plain=True)
    contexts = ["the sea", "the sea " * 60, "a long way home", "house"]  # the second is cut on the left
    answers = _generated(engine, contexts)
    assert engine._generator is not None and plain._generator is None
    assert answers == _generated(plain, contexts) and all(answers)
    stop = answers[0][2:5]
    cut = _generated(engine, contexts[:1], until=[stop, "\n"])
    assert cut == [answers[0].split(stop)[0]] == _generated(plain, contexts[:1], until=[stop, "\n"])


def test_special_tokens_stop_the_engine(tiny_folder: Path) -> None:
    harness = _harness(tiny_folder, "int4-g32i")
    _generated(harness, ["the sea"])
    assert harness._generator is not None
    special, token = next(iter(harness.tokenizer.get_added_vocab().items()))
    params = harness._generator.params({"until": [special, "", "\n"], "temperature": 0.0}, 9)
    assert params.stop_token_ids == [token] and params.temperature == 0
    assert params.stop_strings == (special, "\n") and params.max_tokens == 9


def test_settings_that_the_engine_lacks_are_left_to_lm_eval(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harness = _harness(tiny_folder, "int4-g32i")
    with caplog.at_level("WARNING", "torch_armllm"):
        assert _generated(harness, ["the sea"], num_beams=2) != []
    assert "generated by transformers, which is slower: an engine lacks num_beams" in caplog.text
    assert harness._generator is not None
    with pytest.raises(ValueError, match="num_beams"):
        harness._generator.params({"num_beams": 2}, 9)
    assert harness._generator.params({"do_sample": True, "temperature": 0.7, "top_k": 5}, 9).top_k == 5


def test_lm_eval_knows_the_model_by_name(tiny_folder: Path) -> None:
    from lm_eval.api.registry import get_model

    made = get_model("armllm").create_from_arg_string(
        f"pretrained={tiny_folder},quantization=g32i,dtype=float32", {"batch_size": 2, "device": None}
    )
    assert isinstance(made._scorer, PlanScorer)
