"""Drafts save steps and change no output."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.engines import plan_runner
from tests.support.patched_models import fresh
from torch_armllm.engine.request import Request, Sequence, Status
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.scheduling.step import Scheduled, Step
from torch_armllm.engine.speculative.build import build_speculative_decoder, load_drafter
from torch_armllm.engine.speculative.draft_model import DraftModelProposer
from torch_armllm.engine.speculative.drafting import Proposer, SpeculativeDecoder
from torch_armllm.engine.speculative.ngram import NgramProposer
from torch_armllm.kv_cache.budget import KvMemory
from torch_armllm.patching.patched_model import servable_model

VOCAB = 97


# whole outputs of tiny models


@functools.cache
def model(seed: int) -> Any:
    return fresh("llama") if seed == 0 else fresh("qwen3")


class Loop:
    """The simplest engine loop: unlimited blocks, every sequence in every step."""

    def __init__(self, proposer: Any = None, most: int = 4) -> None:
        self.runner = plan_runner(model(0), num_blocks=64)
        self.sampler = Sampler(VOCAB, (2,))
        self.speculative_decoder = (
            SpeculativeDecoder(proposer(self.sampler), self.sampler, most) if proposer else None
        )
        self.blocks = list(range(64))
        self.steps = 0

    def run(self, requests: list[Request], late: int = 0) -> list[list[int]]:
        """Returns the tokens of all sequences; the first ``late`` requests arrive later than the others."""
        sequences = [r.sequences[0] for r in requests]
        while going := [a for a in sequences if a.status is not Status.FINISHED]:
            self.step(going[late:] if self.steps < 3 and len(going) > late else going)
        return [a.output_token_ids for a in sequences]

    def step(self, sequences: list[Sequence]) -> None:
        scheduled = []
        for a in sequences:
            end = len(a.token_ids) + len(a.draft)
            while len(a.blocks) * self.runner.block_size < end:
                a.blocks.append(self.blocks.pop())
            scheduled.append(Scheduled(a, a.computed, end - a.computed))
        logits = self.runner.execute(Step(scheduled))
        counts = [s.num_draft for s in scheduled]
        if self.speculative_decoder is None:
            drawn = [[d] for d in self.sampler(logits, sequences)]
        else:
            drawn = self.speculative_decoder.verify(logits, sequences, counts)
        for a, found in zip(sequences, drawn, strict=True):
            most = a.params.max_tokens
            assert most is not None and a.output_length + len(found) <= most
            a.computed = len(a.token_ids) + len(found) - 1
            a.token_ids += [d.token_id for d in found]
            a.draft = []
            if a.output_length == most:
                a.status = Status.FINISHED
        if self.speculative_decoder is not None:
            self.speculative_decoder.propose(sequences)
        self.steps += 1


def requests(count: int = 3, tokens: int = 24, **params: Any) -> list[Request]:
    draw = random.Random(5)
    made = []
    for i in range(count):
        prompt = [draw.randrange(3, VOCAB) for _ in range(5 + 9 * i)] * 2
        made.append(Request(str(i), prompt, SamplingParams(max_tokens=tokens + i, **params), 40 + i))
    return made


class Oracle:
    """Drafts correct, wrong, too few or no tokens at random."""

    chooses_lengths = False

    def probabilities(self, _: Sequence) -> None:
        return None

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts
        self.chance = random.Random(0)

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        drafts = []
        for a, count in zip(sequences, counts, strict=True):
            right = self.texts[int(a.request.request_id)][a.output_length :][: self.chance.randint(0, count)]
            drafts.append([t if self.chance.random() < 0.8 else self.chance.randrange(VOCAB) for t in right])
        return drafts


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "min_tokens": 5, "logprobs": 1},
]


def draft_model(seed: int, rejection: bool = False) -> Any:
    def make(sampler: Sampler) -> Proposer:
        runner = plan_runner(model(seed), num_blocks=24)
        return DraftModelProposer(runner, 24, sampler, chunk=20, rejection=rejection)

    return make


@pytest.mark.parametrize("params", SETTINGS, ids=str)
@pytest.mark.parametrize("method", ["oracle", "ngram", "itself", "other"])
def test_outputs_equal_those_without_drafts(method: str, params: dict[str, Any]) -> None:
    plain = Loop()
    expected = plain.run(requests(**params))
    proposers = {
        "oracle": lambda _: Oracle(expected),
        "ngram": lambda _: NgramProposer(1, 3),
        "itself": draft_model(0),
        "other": draft_model(1),
    }
    loop = Loop(proposers[method])
    assert loop.run(requests(**params), late=1) == expected
    assert loop.speculative_decoder is not None
    counts = loop.speculative_decoder.acceptance
    assert counts.drafted > 0
    if method == "itself":  # the same logits and random numbers, so the same tokens
        assert counts.rate == 1.0 and loop.steps < plain.steps / 2
    elif method == "oracle":
        assert 0.3 < counts.rate < 1.0


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_rejection_accepts_all_drafts_of_the_same_model(params: dict[str, Any]) -> None:
    loop = Loop(draft_model(0, rejection=True))
    found = loop.run(requests(**params))
    assert loop.speculative_decoder is not None and loop.speculative_decoder.acceptance.rate == 1.0
    if not params["temperature"]:
        assert found == Loop().run(requests(**params))


def test_draft_model_frees_its_blocks() -> None:
    loop = Loop(draft_model(0))
    loop.run(requests(5))
    assert loop.speculative_decoder is not None
    proposer = loop.speculative_decoder.proposer
    assert isinstance(proposer, DraftModelProposer)
    assert proposer.propose([], []) == [] and proposer.free_blocks == 24


def test_sequences_without_free_blocks_get_no_drafts() -> None:
    def make(sampler: Sampler) -> Proposer:
        return DraftModelProposer(plan_runner(model(0), num_blocks=2), 2, sampler)

    expected = Loop().run(requests(4))
    loop = Loop(make)
    assert loop.run(requests(4)) == expected
    assert loop.speculative_decoder is not None and loop.speculative_decoder.acceptance.drafted > 0


def test_draft_model_needs_the_whole_vocabulary() -> None:
    with pytest.raises(ValueError, match="97 tokens and the model 98"):
        DraftModelProposer(plan_runner(model(0), 2), 2, Sampler(98))


def test_drafts_respect_max_tokens() -> None:
    speculative_decoder = SpeculativeDecoder(NgramProposer(1, 2), Sampler(VOCAB), 4)
    made = Request("r", [5, 6, 5, 6], SamplingParams(max_tokens=3), 0).sequences[0]
    speculative_decoder.propose([made])
    assert made.draft == [5, 6]
    made.token_ids += [5, 6]
    speculative_decoder.propose([made])
    assert made.draft == []
    made.status = Status.FINISHED
    made.draft = [1]
    speculative_decoder.propose([made])
    assert made.draft == [1]


def test_speculative_decoder_is_built_from_settings() -> None:
    sampler = Sampler(VOCAB)
    settings_: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}
    memory = KvMemory(4, 0, 32, 1, 128, "float32", drafter_tokens=128)
    looked_up = build_speculative_decoder(settings_, sampler, memory)
    assert isinstance(looked_up.proposer, NgramProposer) and looked_up.max_draft_tokens == 3
    settings_ = {"method": "draft_model", "model": model(0)}
    drafter = load_drafter(settings_, None, servable_model(model(1)))  # type: ignore[arg-type]
    drafted = build_speculative_decoder(settings_, sampler, memory, drafter).proposer
    assert isinstance(drafted, DraftModelProposer) and drafted.free_blocks == 4
    with pytest.raises(ValueError, match="no room for the draft model's own cache: raise it"):
        build_speculative_decoder(settings_, sampler, replace(memory, drafter_tokens=31), drafter)


def test_draft_lengths_follow_the_acceptance() -> None:
    class Always:
        chooses_lengths = False

        def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
            return [[7] * count for count in counts]

        def probabilities(self, _: Sequence) -> None:
            return None

    made = Request("r", [5], SamplingParams(max_tokens=None, temperature=0.0), 0).sequences[0]
    speculative_decoder = SpeculativeDecoder(Always(), Sampler(VOCAB), 5)
    lengths = []
    for right in (9, 9, 9, 1, 0, 0, 9, 9):
        speculative_decoder.propose([made])
        lengths.append(len(made.draft))
        logits = torch.zeros(len(made.draft) + 1, VOCAB)
        logits[:right, 7] = 1.0
        (drawn,) = speculative_decoder.verify(logits, [made], [len(made.draft)])
        made.token_ids += [d.token_id for d in drawn]
    assert lengths == [2, 4, 5, 5, 2, 1, 1, 2]
