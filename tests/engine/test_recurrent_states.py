"""States that steps save: checkpoints of the prefix cache, and states before draft tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import torch_armllm
from tests.engine.test_recurrent_models import engine, memory_of, model
from tests.support.engines import drain, submit
from tests.support.exact_outputs import exact_outputs, prompt
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.errors import StepFailedError
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.speculative.draft_model import DraftModelProposer
from torch_armllm.engine.speculative.draft_states import DraftStates
from torch_armllm.engine.speculative.hit_rates import HitRates
from torch_armllm.engine.speculative.step_costs import MAX_DRAFTED, StepCosts
from torch_armllm.kv_cache import state_budget
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.plan.fused_head import FusedHead
from torch_armllm.plan.step import StepInputs

FAMILIES = (
    *("qwen3_5_moe_text", "kimi_linear", "nemotron_h", "lfm2", "mamba2", "falcon_mamba", "jamba"),
    *("qwen3_5_moe_text, bfloat16 states", "falcon_mamba, bfloat16 states"),
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


def greedy(tokens: int, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=1, ignore_eos=True, **settings)


def hit_rate(running: LLMEngine) -> float:
    return running.scheduler.blocks.hit_rate


def chat(running: LLMEngine, turns: int, seed: int) -> list[Any]:
    """Returns the answers of a chat with their exact log-probabilities."""
    draw, text, answers = random.Random(seed), prompt(70, seed), []
    for turn in range(turns):
        ((answer, logprobs),) = exact_outputs(running, [text], greedy(draw.randrange(1, 13)))[0]
        answers.append((answer, logprobs))
        text = [*text, *answer, *prompt(draw.randrange(1, 6), 100 * seed + turn)]
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_chat_hits_its_checkpoints_and_keeps_its_bits(family: str) -> None:
    cached = engine(family)
    answers = chat(cached, 30, 1)
    assert hit_rate(cached) >= 0.9
    assert answers == chat(engine(family, enable_prefix_caching=False), 30, 1)


def test_chats_with_few_checkpoints_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_budget, "_LEAST_CHECKPOINTS", 2)
    running = engine("qwen3_5_moe_text", max_num_seqs=1)
    slots = running.scheduler.blocks.states
    assert slots is not None and slots.spare == 4
    plain = engine("qwen3_5_moe_text", enable_prefix_caching=False)
    for seed in (1, 2, 1):
        assert chat(running, 6, seed) == chat(plain, 6, seed)
    assert hit_rate(running) > 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_decode_steps_leave_checkpoints(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []
    begin = FusedHead._begin

    def count(head: FusedHead, inputs: StepInputs) -> None:
        bound.append(inputs.tokens)
        begin(head, inputs)

    monkeypatch.setattr(FusedHead, "_begin", count)
    running = engine(family, speculative_config=None)  # one token a step
    plain = engine(family, enable_prefix_caching=False)
    fast = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    texts = [prompt(9 + seed, seed) for seed in range(3)]
    submit(running, texts, fast)
    for text, output in zip(texts, drain(running), strict=True):
        longer = [*text, *output.outputs[0].token_ids, 5]
        assert exact_outputs(running, [longer], greedy(5)) == exact_outputs(plain, [longer], greedy(5))
    cache = running.scheduler.blocks.prefix_cache
    assert cache is not None and cache.tokens_hit == 3 * 96
    assert len(bound) < 10, "saving a state must not bind a step anew"
    assert bound or "mamba" in family, "their hidden states are rounded before the head"


def test_failed_steps_leave_no_checkpoint() -> None:
    running, plain = engine("lfm2", max_num_seqs=3), engine("lfm2", enable_prefix_caching=False)
    runner: Any = running.runner
    begin, texts = runner.begin, [prompt(50, seed) for seed in range(3)]

    def fail(*_: Any) -> Any:
        raise OSError("a broken part")

    for number in range(12):
        submit(running, texts, greedy(20))
        for _ in range(number):
            running.step()
        runner.begin = fail
        with pytest.raises(StepFailedError):
            running.step()
        runner.begin = begin
        drain(running)
        states = running.scheduler.blocks.states
        assert states is not None and states.free == len(states) and not states.saved
    assert [exact_outputs(running, [t], greedy(40)) for t in texts] == [
        exact_outputs(plain, [t], greedy(40)) for t in texts
    ]


def test_draft_model_with_few_slots_drafts_for_few() -> None:
    draft = {"method": "draft_model", "model": model("lfm2"), "num_speculative_tokens": 3}
    texts = [prompt(length, length) for length in (1, 40, 90, 33)]
    expected = exact_outputs(engine("lfm2"), texts, greedy(30))
    for slots in (1, 2, 5):
        running = engine("lfm2", speculative_config=draft)
        assert running.speculative_decoder is not None
        proposer = running.speculative_decoder.proposer
        assert isinstance(proposer, DraftModelProposer)
        proposer.states = DraftStates(slots)
        assert exact_outputs(running, texts, greedy(30)) == expected
        assert running.speculative_decoder.acceptance.drafted > 0
        proposer.release_finished()
        assert proposer.states.free == slots


@pytest.mark.parametrize("target", ["lfm2", "falcon_mamba"])
def test_the_cache_of_a_draft_model_is_part_of_the_memory(target: str) -> None:
    draft = {"method": "draft_model", "model": model("lfm2"), "num_speculative_tokens": 3}
    memory = 2 << 20
    running = engine(target, speculative_config=draft, kv_cache_memory=memory, max_model_len=256)
    decoder = running.speculative_decoder
    assert decoder is not None and isinstance(decoder.proposer, DraftModelProposer)
    drafter: Any = decoder.proposer._runner
    assert drafter.kv_bytes == decoder.kv_bytes > 0
    assert 0.4 * memory < running.runner.kv_bytes + drafter.kv_bytes <= memory
    exact_outputs(running, [prompt(length, length) for length in (1, 40)], greedy(20))
    assert decoder.acceptance.drafted > 0


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "lfm2"])
def test_prompts_share_what_they_have_in_common(family: str) -> None:
    common = prompt(100, 7)
    prompts = [[*common, *prompt(60 + seed, 50 + seed)] for seed in range(4)]
    running, plain = engine(family), engine(family, enable_prefix_caching=False)
    for number, each in enumerate(prompts):
        before = running.scheduler.blocks.prefix_cache.tokens_hit  # type: ignore[union-attr]
        assert exact_outputs(running, [each], greedy(5)) == exact_outputs(plain, [each], greedy(5))
        hit = running.scheduler.blocks.prefix_cache.tokens_hit - before  # type: ignore[union-attr]
        assert hit == (96 if number >= 2 else 0), "the second prompt leaves a checkpoint where they part"


def test_long_prompts_have_checkpoints_in_the_middle() -> None:
    running, plain = engine("lfm2"), engine("lfm2", enable_prefix_caching=False)
    first = prompt(480, 3)
    other = [*first[:300], *prompt(40, 4)]
    for each in (first, other):
        assert exact_outputs(running, [each], greedy(5)) == exact_outputs(plain, [each], greedy(5))
    assert running.scheduler.blocks.prefix_cache.tokens_hit == 256  # type: ignore[union-attr]


@pytest.mark.parametrize("n", [2, 4])
def test_forked_sequences_begin_at_checkpoints(n: int) -> None:
    params = SamplingParams(n=n, temperature=1.0, seed=5, max_tokens=40, logprobs=1, ignore_eos=True)
    running, plain = engine("kimi_linear"), engine("kimi_linear", enable_prefix_caching=False)
    for text in (prompt(64, 1), prompt(64, 1), prompt(95, 1)):
        assert exact_outputs(running, [text], params) == exact_outputs(plain, [text], params)
    assert hit_rate(running) > 0.2


def test_other_models_and_sizes_share_no_checkpoints() -> None:
    text = prompt(64, 1)
    for family in ("lfm2", "kimi_linear"):
        running = engine(family)
        assert exact_outputs(running, [text], greedy(3)) == exact_outputs(engine(family), [text], greedy(3))
        assert hit_rate(running) == 0.0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("caching", [False, True])
def test_ngram_drafts_change_no_bits(family: str, caching: bool) -> None:
    texts = [prompt(6, 1) * 6, prompt(3, 2) * 20, prompt(40, 3), prompt(1, 4)]
    speculative = engine(family, speculative_config=NGRAM, enable_prefix_caching=caching)
    plain = engine(family, enable_prefix_caching=False)
    assert exact_outputs(speculative, texts, greedy(70)) == exact_outputs(plain, texts, greedy(70))
    assert speculative.speculative_decoder is not None
    counts = speculative.speculative_decoder.acceptance
    assert counts.drafted > counts.accepted > 0
    assert exact_outputs(speculative, texts, greedy(70)) == exact_outputs(plain, texts, greedy(70))
    assert not caching or hit_rate(speculative) > 0.3


@pytest.mark.parametrize("family", [family for family in FAMILIES if "mamba" not in family])
def test_default_drafts_change_no_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [prompt(6, 1) * 6, prompt(3, 2) * 20, prompt(40, 3)]
    texts += [part for seed in (4, 7) for part in (prompt(6, seed) * 6, prompt(3, 20 + seed) * 20)]
    params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    plain, drafting = engine(family, speculative_config=None), engine(family)
    assert drafting.speculative_decoder is not None and plain.speculative_decoder is None
    # everything that may repeat itself is drafted, also what does not
    monkeypatch.setattr(HitRates, "rate", lambda _rates, _length: 0.9)
    monkeypatch.setattr(StepCosts, "curve", lambda _costs, _sequences: [1.0] * (MAX_DRAFTED + 1))
    for running in (plain, drafting):
        submit(running, texts, params)
    answers = [[output.outputs[0].token_ids for output in drain(running)] for running in (plain, drafting)]
    assert answers[0] == answers[1]
    counts = drafting.speculative_decoder.acceptance
    assert counts.drafted > counts.accepted


def test_drafts_leave_slots_to_checkpoints() -> None:
    running = engine("lfm2", max_num_seqs=3)
    tables = running.scheduler._tables.states
    assert tables is not None and tables.slots.spare > 1
    assert tables.room_for_drafts == -(-tables.slots.spare // 2)
    apart = engine("lfm2", max_num_seqs=3, enable_prefix_caching=False)
    assert apart.speculative_decoder is None  # no slot is spare


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_5_moe_text, bfloat16 states"])
@pytest.mark.parametrize("swap", [0, 1 << 20], ids=["recomputed", "swapped"])
def test_drafts_and_checkpoints_survive_preemption(swap: int, family: str) -> None:
    small = memory_of(family, blocks=7, slots=8)
    limits = {"kv_cache_memory": small, "max_num_seqs": 3, "swap_space": swap, "max_model_len": 128}
    running = engine(family, speculative_config=NGRAM, **limits)
    texts = [prompt(5, seed) * 8 for seed in range(5)]
    params = [SamplingParams(n=1 + seed % 2, seed=seed, max_tokens=70, logprobs=1) for seed in range(5)]
    plain = engine(family, enable_prefix_caching=False)
    expected = [exact_outputs(plain, [text], each)[0] for text, each in zip(texts, params, strict=True)]
    assert exact_outputs(running, texts, params) == expected
    assert running.scheduler.preemptions > 0


def test_requests_aborted_with_drafts_free_their_slots() -> None:
    running = engine("lfm2", speculative_config=NGRAM, max_num_seqs=3)
    submit(running, [prompt(2, seed) * 15 for seed in range(8)], greedy(60))
    for number in range(6):
        for _ in range(number + 1):
            running.step()
        running.abort_request(str(number))
    drain(running)
    states = running.scheduler.blocks.states
    assert states is not None and states.free == len(states) and not states.saved


@pytest.mark.parametrize("target", ["llama", "lfm2"])
@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_draft_models_may_have_recurrent_layers(target: str, sampling: str) -> None:
    chosen = model("lfm2") if target == "lfm2" else tiny_model(target, torch.bfloat16)
    if target != "lfm2":
        torch_armllm.patch(chosen, progress=False)
    draft = {"method": "draft_model", "model": model("lfm2"), "num_speculative_tokens": 3}
    options: Any = {"kv_cache_memory": 4 << 20, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    speculative = build_engine(
        chosen, None, EngineConfig(speculative_config=draft | {"draft_sampling": sampling}, **options)
    )
    plain = build_engine(chosen, None, EngineConfig(**options))
    texts = [prompt(length, length) for length in (1, 40, 90, 33, 7)]
    found = []
    for running in (speculative, plain):
        submit(running, texts, greedy(40))
        found.append([[o.token_ids for o in output.outputs] for output in drain(running)])
    assert found[0] == found[1]
    decoder = speculative.speculative_decoder
    assert decoder is not None and isinstance(decoder.proposer, DraftModelProposer)
    assert decoder.acceptance.drafted > 50
    if target == "lfm2":
        assert decoder.acceptance.rate == 1.0
    else:
        assert decoder.acceptance.rate < 1.0
    decoder.proposer.release_finished()
    assert decoder.proposer.states is not None and decoder.proposer.states.free == 12
