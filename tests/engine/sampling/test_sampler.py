"""Sampling, each setting compared with a plain implementation."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_armllm.engine.request import Request, Sequence
from torch_armllm.engine.sampling.batch import sequence_seed
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.ops.sample import reference_probabilities, reference_sample
from torch_armllm.ops.sample.reference import penalized

VOCAB = 50
END = 2


class Words:
    """A tokenizer with the letters a … z as tokens 10 …, and a space as 40."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [40 if c == " " else ord(c) - ord("a") + 10 for c in text if c != "_"]

    def decode(self, token_ids: list[int], **options: object) -> str:
        return "".join(" " if i == 40 else chr(i - 10 + ord("a")) for i in token_ids)


def sequence(
    prompt: tuple[int, ...] = (3, 4, 5), output: tuple[int, ...] = (), seed: int = 0, **settings: Any
) -> Sequence:
    request = Request("r", list(prompt), SamplingParams(**settings), seed)
    (made,) = request.sequences
    made.token_ids += output
    return made


def sampler(vocab: int = VOCAB) -> Sampler:
    return Sampler(vocab, (END,), Words())


def some_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def ids(drawn: list[Any]) -> list[int]:
    return [d.token_id for d in drawn]


def likely(counts: Tensor, probabilities: Tensor) -> bool:
    """True if counts fit probabilities; a correct sampler fails once in a thousand cases."""
    possible = probabilities > 0
    if counts[~possible].sum() != 0:
        return False
    expected, found = probabilities[possible] * counts.sum(), counts[possible].double()
    rare = expected < 5  # pooled: the chi-square approximation needs larger expected counts
    if rare.any():
        expected, found = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (expected, found))
    statistic = float(((found - expected) ** 2 / expected).sum())
    freedom = max(expected.numel() - 1, 1)
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return normal < 3.1


def expected_probabilities(logits: Tensor, made: Sequence) -> Tensor:
    """Returns the distribution of one row, in plain torch."""
    p, row = made.params, logits.float().clone()
    for token, bias in (p.logit_bias or {}).items():
        row[token] += bias
    if p.allowed_token_ids is not None:
        row[[t for t in range(VOCAB) if t not in p.allowed_token_ids]] = -math.inf
    if made.output_length < p.min_tokens:
        row[[END, *(p.stop_token_ids or ())]] = -math.inf
    prompt, output = (torch.tensor(x, dtype=torch.int64) for x in (made.token_ids[:3], made.output_token_ids))
    penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    row = penalized(row, prompt, output, *penalties)
    return reference_probabilities(row, p.temperature, p.top_k, p.top_p, p.min_p)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6, "top_k": 7},
        {"top_p": 0.7},
        {"min_p": 0.1, "temperature": 1.4},
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.5, "frequency_penalty": 0.9},
        {"logit_bias": {7: 2.5, 8: -3.0}},
        {"allowed_token_ids": [1, 5, 9, 33]},
        {"min_tokens": 9, "stop_token_ids": [4, 6]},
        {"top_k": 12, "top_p": 0.8, "repetition_penalty": 1.2, "logit_bias": {30: 4.0}, "min_tokens": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_follow_the_reference_distribution(settings: dict[str, Any], dtype: torch.dtype) -> None:
    rows, rounds = 200, 10
    logits = some_logits(1).to(dtype)
    logits[0, [END, 4, 6]] = 2.0
    draw, counts = sampler(), torch.zeros(VOCAB, dtype=torch.float64)
    for r in range(rounds):
        sequences = [sequence(output=(6, 7, 6), seed=r * rows + i, **settings) for i in range(rows)]
        drawn = ids(draw(logits.repeat(rows, 1), sequences))
        counts += torch.bincount(torch.tensor(drawn), minlength=VOCAB)
    assert likely(counts, expected_probabilities(logits[0], sequences[0]))


def test_samples_equal_those_of_the_reference() -> None:
    """Seed and step of every row are those of its sequence, step by step."""
    sequences = [sequence(seed=s, top_k=20, temperature=0.9) for s in (5, 6, 2**63 + 9)]
    draw = sampler()
    for step in range(6):
        logits = some_logits(3, seed=step)
        drawn = ids(draw(logits, sequences))
        for row, made in enumerate(sequences):
            seed = sequence_seed(made.request.seed, 0)
            assert drawn[row] == reference_sample(logits[row], 0.9, 20, 1.0, 0.0, seed, step)
            made.token_ids.append(drawn[row])


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.8, "logprobs": 3},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
    {"bad_words": ["ab", "c"], "temperature": 1.5},
    {"logit_bias": {5: 3.0}, "temperature": 0.0},
    {"min_tokens": 4, "allowed_token_ids": [2, 20, 21, 22]},
]


def alone(index: int, dtype: torch.dtype, steps: int) -> list[int]:
    made, draw = sequence(seed=index, **MIXED[index]), sampler()
    for step in range(steps):
        logits = some_logits(len(MIXED), seed=step).to(dtype)[index : index + 1]
        made.token_ids.append(draw(logits, [made])[0].token_id)
    return made.output_token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    steps = 8
    sequences = [sequence(seed=i, **settings) for i, settings in enumerate(MIXED)]
    draw = sampler()
    order = list(range(len(MIXED)))
    for step in range(steps):
        order = order[1:] + order[:1] if step % 3 == 2 else order  # in other steps the batch is unchanged
        logits = some_logits(len(MIXED), seed=step).to(dtype)
        for row, drawn in zip(order, draw(logits[order], [sequences[i] for i in order]), strict=True):
            sequences[row].token_ids.append(drawn.token_id)
    for index, made in enumerate(sequences):
        assert made.output_token_ids == alone(index, dtype, steps)


def test_sequences_of_a_request_differ_and_are_reproducible() -> None:
    def texts() -> list[list[int]]:
        request = Request("r", [3], SamplingParams(n=4, temperature=2.0), 11)
        request.sequences += [Sequence(request, i, [3]) for i in range(1, 4)]
        draw = sampler()
        for step in range(5):
            drawn = draw(some_logits(1, seed=step).repeat(4, 1), request.sequences)
            for made, d in zip(request.sequences, drawn, strict=True):
                made.token_ids.append(d.token_id)
        return [a.output_token_ids for a in request.sequences]

    first = texts()
    assert first == texts()
    assert len({tuple(t) for t in first}) == 4


def test_sequence_seeds_differ() -> None:
    seeds = {sequence_seed(s, i) for s in range(50) for i in range(50)}
    assert len(seeds) == 2500
    assert all(-(2**63) <= s < 2**63 for s in seeds)
    assert sequence_seed(-1, 0) == -1 and sequence_seed(2**64 + 5, 0) == 5


def test_bad_words() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [10, 11, 12]] = torch.tensor([9.0, 8.0, 7.0])  # a, b, c
    draw = sampler()

    def best(output: tuple[int, ...], words: list[str], prompt: tuple[int, ...] = (3,)) -> int:
        made = sequence(prompt, output, temperature=0.0, bad_words=words)
        return draw(logits.clone(), [made])[0].token_id

    assert best((), ["a"]) == 11
    assert best((), ["ba"]) == 10
    assert best((11,), ["ba"]) == 11
    assert best((11,), ["ba", "bb"]) == 12
    assert best((11, 13), ["ba"]) == 10
    # after a space; the word begins in the prompt
    assert best((40, 11), ["ba"]) == 11
    assert best((), ["ba"], (3, 11)) == 10
    with pytest.raises(ValueError, match="'_'.*no tokens"):
        draw.check(SamplingParams(bad_words=["_"]))
    with pytest.raises(ValueError, match="need a tokenizer"):
        Sampler(VOCAB).check(SamplingParams(bad_words=["a"]))


def test_min_tokens_forbids_eos_until_it_is_reached() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [END, 7, 9]] = torch.tensor([9.0, 8.0, 5.0])
    made = sequence(temperature=0.0, min_tokens=3, stop_token_ids=[7])
    draw = sampler()
    for expected in (9, 9, 9, END):
        assert draw(logits.clone(), [made])[0].token_id == expected
        made.token_ids.append(expected)


def test_sequence_ends_where_no_token_is_allowed() -> None:
    draw = sampler()
    made = [sequence(allowed_token_ids=[10], bad_words=["a"]), sequence(temperature=0.0)]
    logits = some_logits(2)
    assert ids(draw(logits.clone(), made)) == [END, int(logits[1].argmax())]


def test_only_the_sequence_with_nan_logits_ends() -> None:
    logits = some_logits(3)
    logits[1] = math.nan
    logits[2, :40] = math.nan
    made = [sequence(temperature=0.0) for _ in range(3)]
    with pytest.warns(UserWarning, match="request 'r' hold no number"):
        drawn = ids(sampler()(logits, made))
    assert drawn == [int(logits[0].argmax()), END, 40 + int(logits[2, 40:].argmax())]


def test_ids_beyond_the_tokenizer_are_never_sampled() -> None:
    logits = some_logits(2, 64)
    logits[:, VOCAB:] = 50.0
    made = [sequence(temperature=0.0), sequence(logit_bias={1: 1.0}, temperature=0.0, logprobs=2)]
    drawn = sampler()(logits, made)
    assert drawn[0].token_id == int(logits[0, :VOCAB].argmax())
    assert all(token < VOCAB for d in drawn for token in [d.token_id, *(d.logprobs or {})])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_come_from_unprocessed_logits(dtype: torch.dtype) -> None:
    logits = some_logits(4).to(dtype)
    kept = logits.clone()
    made = [
        sequence(logprobs=0),
        sequence(temperature=0.0),
        sequence(logprobs=3, logit_bias={17: 50.0}, temperature=0.0),
        sequence(logprobs=-1, temperature=5.0),
    ]
    drawn = sampler()(logits, made)
    assert drawn[1].logprobs is None and drawn[2].token_id == 17
    for row, count in ((0, 0), (2, 3), (3, VOCAB)):
        found, token = drawn[row].logprobs, drawn[row].token_id
        assert found is not None
        expected = kept[row].float().log_softmax(-1)
        assert next(iter(found)) == token
        best = sorted((e.logprob for e in found.values()), reverse=True)[:count]
        assert best == pytest.approx(expected.topk(count).values.tolist(), abs=1e-5)
        assert count <= len(found) <= count + 1
        for t, entry in found.items():
            assert (expected > expected[t]).sum() < entry.rank <= (expected >= expected[t]).sum()
            assert entry.logprob == pytest.approx(float(expected[t]), abs=1e-5)


def test_prompt_logprobs() -> None:
    logits = some_logits(70)
    tokens = list(range(10, 45)) * 2
    found = sampler().prompt_logprobs(logits, tokens, 2)
    expected = logits.log_softmax(-1)
    for row, token in enumerate(tokens):
        assert found[row][token].logprob == pytest.approx(float(expected[row, token]), abs=1e-5)
        assert set(found[row]) == {token, *expected[row].topk(2).indices.tolist()}


def test_penalties_follow_a_growing_output() -> None:
    made = sequence(prompt=(3, 4, 4), temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4)
    draw = sampler()
    for step in range(150):
        logits = some_logits(1, seed=step)
        expected = expected_probabilities(logits[0], made)
        token = draw(logits, [made])[0].token_id
        assert expected[token] == 1
        made.token_ids.append(token)


def test_state_of_deleted_sequences_is_dropped() -> None:
    draw = sampler()
    for i in range(20):
        draw(some_logits(1), [sequence(seed=i, repetition_penalty=1.2)])
    gc.collect()
    assert len(draw._states) <= 1


def test_empty_batch() -> None:
    assert sampler()(torch.empty(0, VOCAB), []) == []
