"""Drafts where measured acceptance and measured costs say that they save time."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.patched_models import patched
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.request import Request, Sequence
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.speculative.adaptive import MAX_DRAFT_TOKENS, MAX_SEQUENCES, AdaptiveDrafts
from torch_armllm.engine.speculative.hit_rates import HitRates
from torch_armllm.engine.speculative.step_costs import StepCosts
from torch_armllm.engine.speculative.suffix_match import LONGEST, SuffixMatch

STEP = 0.01  # seconds


def sequence(prompt: list[int], name: str = "0") -> Sequence:
    return Request(name, prompt, SamplingParams(max_tokens=1000), 0).sequences[0]


# matches


def ignore(_length: int, _hit: bool) -> None:
    pass


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 60), st.randoms())
def test_match_is_an_earlier_occurrence_of_the_end(text: list[int], prompt: int, draw: random.Random) -> None:
    prompt = min(prompt, len(text))
    match, seen = SuffixMatch(), prompt
    while True:
        tokens = text[:seen]
        match.follow(tokens, prompt, ignore)
        if match.length:
            (following,) = match.draft(tokens, 1)
            end = tokens[-match.length :]
            assert any(
                tokens[at : at + match.length] == end and tokens[at + match.length] == following
                for at in range(len(tokens) - match.length)
            )
        else:
            pairs = {tuple(tokens[at : at + 2]) for at in range(len(tokens) - 2)}
            assert tuple(tokens[-2:]) not in pairs
        if seen == len(text):
            return
        seen = min(len(text), seen + draw.randint(1, 4))


def test_four_tokens_are_found_where_three_occurred_later() -> None:
    match, tokens = SuffixMatch(), [1, 2, 3, 4, 9, 5, 2, 3, 4, 8, 1, 2, 3, 4]
    match.follow(tokens, len(tokens), ignore)
    assert (match.length, match.draft(tokens, 1)) == (4, [9])


def test_draft_goes_on_periodically() -> None:
    match, tokens = SuffixMatch(), [7, 1, 2, 3, 1, 2, 3]
    match.follow(tokens, len(tokens), ignore)
    assert match.length == 3
    assert match.draft(tokens, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_match_grows_while_it_predicts_right_and_reports_output_tokens_only() -> None:
    text = list(range(40))
    seen: list[tuple[int, bool]] = []
    match = SuffixMatch()
    tokens = [*text, 0, 1]
    match.follow(tokens, len(tokens), lambda *a: seen.append(a))
    assert not seen
    assert match.length == 2
    tokens += [*text[2:38], 99]
    match.follow(tokens, 42, lambda *a: seen.append(a))
    assert [length for length, _ in seen] == [min(2 + i, LONGEST) for i in range(37)]
    assert [hit for _, hit in seen] == [True] * 36 + [False]
    assert match.length == 0


# rates


def test_rates_are_those_that_were_observed() -> None:
    draw, rates = random.Random(0), HitRates(512)
    for _ in range(4000):
        rates.observe(2, draw.random() < 0.1)
        rates.observe(20, draw.random() < 0.95)
    assert rates.rate(2) == pytest.approx(0.1, abs=0.04)
    assert rates.rate(20) == pytest.approx(0.95, abs=0.03)


def test_a_sequence_starts_with_the_rates_of_all_and_leaves_them() -> None:
    everyone = HitRates(512)
    for _ in range(400):
        everyone.observe(5, False)
    own = HitRates(32, everyone)
    assert own.rate(5) < 0.05
    for _ in range(20):
        own.observe(5, True)
    assert own.rate(5) > 0.8
    assert everyone.rate(5) < 0.1


# costs


def costs(ratio_per_token: float, drafted: tuple[int, ...] = (1, 4), sequences: int = 1) -> StepCosts:
    measured = StepCosts()
    for _ in range(60):
        measured.record(sequences, 0, STEP)
        measured.record(sequences, 0, STEP)
        for count in drafted:
            measured.record(sequences, count, STEP * (1 + ratio_per_token * count))
    return measured


def test_costs_are_those_that_were_measured() -> None:
    curve = costs(0.3).curve(1)
    assert curve is not None
    assert curve[0] == 1
    assert curve[1] == pytest.approx(1.3, abs=0.1)
    assert curve[4] == pytest.approx(2.2, abs=0.1)
    assert min(curve) == 1
    assert costs(0.3).curve(3) is None  # of another number of sequences


def test_costs_are_known_after_a_few_steps_and_survive_interruptions() -> None:
    measured = StepCosts()
    measured.record(1, 0, 1.0)  # the first step of a process
    assert measured.curve(1) is None
    for _ in range(20):
        measured.record(1, 0, STEP)
        measured.record(1, 0, STEP)
        measured.record(1, 4, 1.5 * STEP)
    curve = measured.curve(1)
    assert curve is not None
    before = curve[4]
    assert before == pytest.approx(1.5, abs=0.1)
    measured.record(1, 0, STEP)
    measured.record(1, 0, 100.0)
    measured.record(1, 4, 100.0)
    measured.record(1, 0, STEP)
    assert measured.curve(1)[4] == pytest.approx(before, rel=0.2)  # type: ignore[index]


def test_costs_are_forgotten_when_nothing_is_drafted() -> None:
    measured = costs(1.0)
    curve = measured.curve(1)
    assert curve is not None and curve[4] > 4
    for _ in range(1000):
        measured.record(1, 0, STEP)
    assert measured.curve(1)[4] < 2  # type: ignore[index]


def test_what_the_next_step_prepares_anew_is_a_cost_of_draft_tokens() -> None:
    measured = StepCosts()
    for _ in range(60):
        measured.record(2, 0, STEP)
        measured.record(2, 3, 1.2 * STEP)
        measured.record(2, 0, 1.3 * STEP)
    curve = measured.curve(2)
    assert curve is not None
    assert curve[3] == pytest.approx(1.5, abs=0.05)


# drafts


def run(cost_per_token: float, text: list[int], prompt: list[int]) -> tuple[float, int]:
    """Generates ``text``; returns the time relative to that without drafts, and the number of drafts."""
    drafts, one = AdaptiveDrafts(), sequence(prompt)
    one.token_ids = prompt[:]
    time, made = 0.0, 0
    left = text[:]
    draft: list[int] = []
    while left:
        seconds = STEP * (1 + cost_per_token * len(draft))
        made += bool(draft)
        time += seconds
        agreed = 0
        while agreed < min(len(draft), len(left) - 1) and draft[agreed] == left[agreed]:
            agreed += 1
        one.token_ids += left[: agreed + 1]
        del left[: agreed + 1]
        drafts.record_step(1, len(draft), seconds)
        (draft,) = drafts.propose([one], [MAX_DRAFT_TOKENS])
    return time / (STEP * len(text)), made


def test_a_repeated_text_takes_a_fraction_of_the_time() -> None:
    prompt = random.Random(0).choices(range(5000), k=300)
    time, _ = run(0.1, prompt[20:280], prompt)
    assert time < 0.3


def test_a_text_that_does_not_repeat_itself_costs_nothing() -> None:
    draw = random.Random(0)
    text = [draw.randrange(30) for _ in range(1500)]  # pairs repeat, what follows does not
    time, drafts = run(0.1, text, [1, 2, 3])
    assert time < 1.01
    assert drafts < 30


def test_nothing_is_drafted_where_a_token_costs_a_whole_step() -> None:
    prompt = random.Random(0).choices(range(5000), k=300)
    time, _ = run(1.0, prompt, prompt)
    assert time < 1.05


def test_drafts_keep_to_limits_and_to_the_number_of_sequences() -> None:
    drafts = AdaptiveDrafts()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8] * 4
    for number in range(1, MAX_SEQUENCES + 2):
        running = [sequence(prompt, str(i)) for i in range(number)]
        assert drafts.propose(running, [9] * number) == [[]] * number  # no step was timed
        for _ in range(4):
            drafts.record_step(number, 0, STEP)
        proposed = drafts.propose(running, [i % 4 for i in range(number)])
        if number > MAX_SEQUENCES:
            assert not any(proposed)
        else:
            assert all(len(draft) <= i % 4 for i, draft in enumerate(proposed))
            assert any(proposed) or number == 1 or number > 8
    assert drafts.propose([], []) == []


@pytest.mark.parametrize(("quantization", "drafts"), [("int4", True), ("g32", False), ("int8", True)])
def test_auto_drafts_only_where_bits_do_not_depend_on_the_batch(quantization: str, drafts: bool) -> None:
    """A row of float group scales has other bits among few rows than among many."""
    engine = build_engine(patched("llama", torch.bfloat16, quantization), None, EngineConfig())
    assert (engine.speculative_decoder is not None) is drafts
