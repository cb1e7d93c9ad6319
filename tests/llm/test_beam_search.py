"""Beam search beside transformers' own, and its ends, scores and errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.tiny_server import checkpoint
from torch_armllm import BeamSearchParams
from torch_armllm.llm.llm import LLM

PROMPTS = [[5, 6, 7, 8], [100, 3, 20]]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = str(checkpoint(tmp_path_factory.mktemp("tiny")))
    return LLM(folder, dtype="float32", quantization=None, progress=False, max_num_seqs=8)


@pytest.mark.parametrize("width", [1, 3, 4])
def test_the_beams_are_those_of_transformers(llm: LLM, width: int) -> None:
    params = BeamSearchParams(width, max_tokens=6, ignore_eos=True, length_penalty=0.0)
    found = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    for prompt, output in zip(PROMPTS, found, strict=True):
        expected = llm.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=6,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            length_penalty=0.0,
            eos_token_id=None,
        )
        assert [beam.tokens for beam in output.sequences] == expected.tolist()
        assert {beam.finish_reason for beam in output.sequences} == {"length"}
        scores = [beam.cum_logprob for beam in output.sequences]
        assert scores == sorted(scores, reverse=True)
        assert all(beam.text == llm.get_tokenizer().decode(beam.tokens) for beam in output.sequences)


def test_scores_are_sums_of_log_probabilities(llm: LLM) -> None:
    (output,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(2, max_tokens=5, ignore_eos=True))
    for beam in output.sequences:
        with torch.no_grad():
            logprobs = llm.model(torch.tensor([beam.tokens])).logits[0].float().log_softmax(-1)
        begin = len(PROMPTS[0])
        each = [logprobs[at - 1, beam.tokens[at]] for at in range(begin, len(beam.tokens))]
        assert beam.cum_logprob == pytest.approx(float(sum(each)), abs=1e-3)


def test_beams_end_at_the_eos_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (free,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(3, max_tokens=4, ignore_eos=True))
    end = free.sequences[0].tokens[len(PROMPTS[0]) + 1]  # the second token of the best beam
    monkeypatch.setattr("torch_armllm.llm.loading.engine_facts.find_eos_token_ids", lambda *_: (end,))
    for keeps in (False, True):
        params = BeamSearchParams(3, max_tokens=4, include_stop_str_in_output=keeps)
        (output,) = llm.beam_search([PROMPTS[0]], params)
        stopped = [beam for beam in output.sequences if beam.finish_reason == "stop"]
        assert stopped and all((beam.tokens[-1] == end) == keeps for beam in stopped)
        for beam in output.sequences:
            assert end not in beam.tokens[len(PROMPTS[0]) : len(beam.tokens) - keeps]


def test_invalid_searches(llm: LLM) -> None:
    with pytest.raises(ValueError, match="^beam_width = 0: give at least 1$"):
        BeamSearchParams(0, 1)
    with pytest.raises(ValueError, match="^max_tokens = 0: give at least 1$"):
        BeamSearchParams(1, 0)
    with pytest.raises(ValueError, match="^temperature = 0.5: beams are ranked by the model's own"):
        BeamSearchParams(1, 1, temperature=0.5)
    with pytest.raises(ValueError, match="prompt 1"):
        llm.beam_search([PROMPTS[0], []], BeamSearchParams(2, 2))
    assert llm.beam_search([], BeamSearchParams(2, 2)) == []


def test_replicas_say_at_which_tokens_beams_end() -> None:
    apart = LLM.__new__(LLM)
    apart._find_facts = lambda _: SimpleNamespace(eos_token_ids=(7,))  # type: ignore[assignment, return-value]
    assert apart.eos_token_ids == (7,)
