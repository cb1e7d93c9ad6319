"""Logit processors of whole batches: what they are told of the rows, and what they change."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.sampling.test_sampler import VOCAB, Words, ids, sampler, sequence, some_logits
from torch_armllm import BatchUpdate, LogitsProcessor, MoveDirectionality, SamplingParams
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.request import Sequence
from torch_armllm.engine.sampling.batch_processors import ProcessedBatch
from torch_armllm.engine.sampling.custom_processors import load_processors
from torch_armllm.engine.sampling.sampler import Sampler


class Only(LogitsProcessor):
    """Allows the token of ``extra_args["only"]``, plus the prompt's first and the output's last, alone."""

    invariant = False

    def __init__(self, config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        assert (device.type, is_pin_memory) == ("cpu", False)
        self.rows: dict[int, Any] = {}
        self.updates: list[BatchUpdate | None] = []

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if not isinstance((sampling_params.extra_args or {}).get("only", 0), int):
            raise ValueError("only must be a token id")

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keeps a dict of rows as vLLM's processors do."""
        self.updates.append(batch_update)
        if batch_update is None:
            return
        for row, params, prompt, output in batch_update.added:
            self.rows[row] = (params, prompt, output)
        for row in batch_update.removed:
            self.rows.pop(row, None)
        for old, new, direction in batch_update.moved:
            assert direction is MoveDirectionality.UNIDIRECTIONAL
            self.rows[new] = self.rows.pop(old)
        assert sorted(self.rows) == list(range(batch_update.batch_size))

    def apply(self, logits: Tensor) -> Tensor:
        assert logits.shape == (len(self.rows), VOCAB)
        for row, (params, prompt, output) in self.rows.items():
            only = (params.extra_args or {}).get("only")
            if only is not None:
                best = (only + prompt[0] + sum(output[-1:])) % VOCAB
                logits[row] = float("-inf")
                logits[row, best] = 0.0
        return logits


class Invariant(Only):
    """The same, but greedy steps do not need it."""

    invariant = True


class Halved(Only):
    """Returns other logits in half precision."""

    def apply(self, logits: Tensor) -> Tensor:
        return super().apply(logits.clone()).to(torch.float16)


class Wrong(Only):
    """Returns a wrong shape."""

    def apply(self, logits: Tensor) -> Tensor:
        return logits[:, :3]


class Nothing(Only):
    """Changes in place, and returns nothing."""

    def apply(self, logits: Tensor) -> Tensor:
        return None  # type: ignore[return-value]


def made_sampler(*classes: str | type[Any]) -> Sampler:
    return Sampler(VOCAB, (2,), Words(), None, load_processors(classes, EngineConfig()))


@pytest.mark.parametrize("kind", [Only, Halved, f"{__name__}:Only"], ids=["in place", "returned", "name"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_of_a_batch_are_changed(kind: Any, temperature: float) -> None:
    draw, logits = made_sampler(kind), some_logits(2)
    chosen = sequence(prompt=(4,), output=(9,), extra_args={"only": 30}, temperature=temperature)
    other = sequence(temperature=temperature, seed=3)
    given = logits.to(torch.float16).float()
    drawn = ids(draw(given.clone(), [chosen, other]))
    assert drawn == [43, ids(sampler()(given[1:].clone(), [other]))[0]]


def test_processors_follow_their_sequences_through_random_batches() -> None:
    """Sequences come, go, pause and change places; each processor knows whose row is whose."""
    choose = random.Random(0)
    draw = made_sampler(Only, Only)
    waiting: list[Sequence] = []
    for step in range(200):
        if len(waiting) < 6 and choose.random() < 0.5:
            extra = {"only": choose.randrange(VOCAB)}
            waiting.append(sequence(prompt=(choose.randrange(VOCAB),), extra_args=extra, temperature=0.0))
        if waiting and choose.random() < 0.3:
            waiting.pop(choose.randrange(len(waiting)))
        batch = choose.sample(waiting, choose.randint(0, len(waiting)))
        if not batch:
            continue
        drawn = ids(draw(some_logits(len(batch)), batch))
        for made, token in zip(batch, drawn, strict=True):
            last = sum(made.token_ids[made.prompt_length :][-1:])
            assert token == (made.params.extra_args["only"] + made.token_ids[0] + last) % VOCAB, step
            made.token_ids.append(token)


def test_updates() -> None:
    processor = Only(EngineConfig(), torch.device("cpu"), False)
    batch = ProcessedBatch([processor])
    a, b, c, d = (sequence(prompt=(i,), temperature=0.0) for i in range(4))
    unidirectional = MoveDirectionality.UNIDIRECTIONAL
    for members, expected in [
        ([a, b, c], (3, [], [0, 1, 2], [])),
        ([a, b, c], None),
        ([c, a, b], None),
        ([c, b], (2, [0], [], [(2, 0, unidirectional)])),
        ([b, c, d, a], (4, [], [2, 3], [])),
        ([d], (1, [3, 1, 0], [], [(2, 0, unidirectional)])),
        ([a, b], (2, [], [0, 1], [])),
        ([b, c], (2, [], [0], [])),
    ]:
        batch.apply(some_logits(len(members)), members, True)
        update = processor.updates[-1]
        if expected is None:
            assert update is None
        else:
            assert update is not None
            rows = [row for row, *_ in update.added]
            assert (update.batch_size, list(update.removed), rows, list(update.moved)) == expected
    a.token_ids.append(7)
    batch.apply(some_logits(1), [a], True)
    assert [output for *_, output in processor.rows.values()] == [[7]]
    a.token_ids.append(8)
    batch.apply(some_logits(1), [a], True)
    assert [output for *_, output in processor.rows.values()] == [[7, 8]]


def test_greedy_steps_leave_invariant_processors_out() -> None:
    draw, logits = made_sampler(Invariant), some_logits(1)
    greedy = sequence(extra_args={"only": 30}, temperature=0.0)
    assert draw.needs_best_only([greedy])
    assert ids(draw(logits.clone(), [greedy])) == logits.argmax(-1).tolist()
    chosen = sequence(prompt=(0,), extra_args={"only": 30})
    assert not draw.needs_best_only([chosen])
    assert ids(draw(logits.clone(), [chosen])) == [30]
    assert not made_sampler(Only).needs_best_only([greedy])


def test_other_settings_of_requests_hold() -> None:
    """A minimum length forbids before the processor, and allowed tokens stay; a bias is seen."""
    draw = made_sampler(Only)
    biased = sequence(temperature=0.0, logit_bias={11: 100.0})
    assert ids(draw(some_logits(1), [biased])) == [11]
    scored = sequence(prompt=(0,), temperature=0.0, logprobs=1, extra_args={"only": 30})
    logits = some_logits(1)
    (drawn,) = draw(logits.clone(), [scored])
    assert drawn.token_id == 30 and drawn.logprobs is not None
    assert drawn.logprobs[30].logprob == pytest.approx(logits.log_softmax(-1)[0, 30].item(), abs=1e-5)


def test_requests_are_checked() -> None:
    draw = made_sampler(Only)
    draw.check(SamplingParams(extra_args={"only": 3}))
    with pytest.raises(ValueError, match="^only must be a token id$"):
        draw.check(SamplingParams(extra_args={"only": "x"}))


@pytest.mark.parametrize(("kind", "got"), [(Wrong, r"a tensor \(2, 3\)"), (Nothing, "None")])
def test_a_wrong_result_is_an_error(kind: type[Any], got: str) -> None:
    told = rf"^the logits processor {kind.__name__} returned {got}; return logits \(2, 50\)$"
    with pytest.raises(ValueError, match=told):
        made_sampler(kind)(some_logits(2), [sequence(), sequence()])
