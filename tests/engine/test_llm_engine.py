"""The engine end to end on tiny models: its outputs, and the requests and settings it refuses."""

from __future__ import annotations

import pytest
import torch

from tests.support.engines import drain, generate_token_ids, make_engine, submit
from tests.support.models import token_ids
from tests.support.patched_models import patched
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams
from torch_armllm.engine.text.preprocess import NewRequest

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
LENGTHS = (5, 33, 1, 70, 17)


def prompts() -> list[list[int]]:
    return [token_ids(1, length, seed=length)[0].tolist() for length in LENGTHS]


def at_rest(engine: LLMEngine) -> bool:
    blocks = engine.scheduler.blocks
    return blocks.free == blocks.num_blocks and not engine.scheduler.has_unfinished


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_outputs_equal_generate(family: str) -> None:
    model = patched(family)
    model.generation_config.eos_token_id = None  # the engine ignores it, so that all tokens are compared
    engine = make_engine(family)
    for prompt, (completion,) in zip(prompts(), generate_token_ids(engine, prompts(), GREEDY), strict=True):
        own = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=9)
        assert completion == own[0, len(prompt) :].tolist()
    assert at_rest(engine)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_batched_outputs_equal_single_runs(family: str) -> None:
    params = [GREEDY, *(SamplingParams(temperature=0.9, top_p=0.95, seed=s, max_tokens=12) for s in range(4))]
    together = generate_token_ids(make_engine(family), prompts(), params)
    alone = [
        generate_token_ids(make_engine(family), [p], q)[0] for p, q in zip(prompts(), params, strict=True)
    ]
    assert together == alone


def test_parallel_samples_share_their_prompt_and_differ() -> None:
    engine = make_engine()
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8, ignore_eos=True)
    (completions,) = generate_token_ids(engine, [prompts()[3]], params)
    assert len(completions) == 3 and len({tuple(a) for a in completions}) == 3
    assert engine.scheduler.blocks.hit_rate == 0
    assert at_rest(engine)
    one = generate_token_ids(
        make_engine(), [prompts()[3]], SamplingParams(seed=7, max_tokens=8, ignore_eos=True)
    )
    assert one[0][0] == completions[0]


def test_prefix_cache_hit_does_not_change_outputs() -> None:
    engine = make_engine()
    first = generate_token_ids(engine, [prompts()[3]], GREEDY)
    submit(engine, [prompts()[3]], GREEDY)
    (output,) = drain(engine)
    assert output.num_cached_tokens == 64
    assert [[a.token_ids for a in output.outputs]] == first


def test_logprobs_equal_the_models() -> None:
    model, prompt = patched("llama"), prompts()[1]
    engine = make_engine()
    submit(engine, [prompt], SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1))
    (output,) = drain(engine)
    (completion,) = output.outputs
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion.token_ids])).logits[0]
    expected = logits.float().log_softmax(-1)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for place, token in enumerate(prompt[1:]):
        known = output.prompt_logprobs[place + 1]
        assert known is not None
        assert known[token].logprob == pytest.approx(float(expected[place, token]), abs=1e-4)
    assert completion.logprobs is not None and len(completion.logprobs) == 3
    for step, (token, known) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        assert known[token].rank == 1 and len(known) == 2
        assert known[token].logprob == pytest.approx(float(expected[len(prompt) - 1 + step, token]), abs=1e-4)
    total = sum(
        known[token].logprob for token, known in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_do_not_change_parallel_samples() -> None:
    sampled = SamplingParams(n=2, seed=1, temperature=0.01, max_tokens=4)
    watched = SamplingParams(n=2, seed=1, temperature=0.01, max_tokens=4, prompt_logprobs=0)
    assert generate_token_ids(make_engine(), [[5, 9]], watched) == generate_token_ids(
        make_engine(), [[5, 9]], sampled
    )


def test_output_kinds_contain_the_same_tokens() -> None:
    found = {}
    for kind in RequestOutputKind:
        engine = make_engine(speculative_config=None)  # one token a step
        params = SamplingParams(n=2, seed=3, max_tokens=6, ignore_eos=True, output_kind=kind)
        engine.add_request(NewRequest("a", prompts()[0], params))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        if kind is RequestOutputKind.DELTA:
            parts = [[a.token_ids for o in outputs for a in o.outputs if a.index == i] for i in range(2)]
            assert all(len(part) == 1 for own in parts for part in own)
            found[kind] = [[t for part in own for t in part] for own in parts]
            assert sum(a.finish_reason is not None for o in outputs for a in o.outputs) == 2
        else:
            found[kind] = [a.token_ids for a in outputs[-1].outputs]
            assert len(outputs) == (1 if kind is RequestOutputKind.FINAL_ONLY else 6)
    assert len({str(tokens) for tokens in found.values()}) == 1


def test_abort_frees_blocks_and_keeps_other_outputs() -> None:
    expected = generate_token_ids(make_engine(), prompts(), GREEDY)
    engine = make_engine()
    submit(engine, prompts(), GREEDY)
    for _ in range(3):
        engine.step()
    (aborted,) = engine.abort_request(["1", "unknown"])
    assert aborted.finished and aborted.outputs[0].finish_reason == "abort"
    assert engine.abort_request("1") == []
    others = [[a.token_ids for a in output.outputs] for output in drain(engine)]
    assert others == [completion for number, completion in enumerate(expected) if number != 1]
    assert at_rest(engine)


def test_request_times_are_in_order() -> None:
    engine = make_engine()
    submit(engine, prompts()[:1], GREEDY)
    metrics = drain(engine)[0].metrics
    times = (metrics.arrival_time, metrics.scheduled_time, metrics.first_token_time, metrics.finished_time)
    assert None not in times and list(times) == sorted(times)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "no token"),
        ([1, 97], GREEDY, "97"),
        ("text", GREEDY, "tokenizer"),
        ({"text": "x"}, GREEDY, "prompt_token_ids"),
        ([1] * 600, GREEDY, "max_model_len"),
        ([1], SamplingParams(stop_token_ids=[1000]), "1000"),
    ],
)
def test_unservable_requests_raise_at_submission(prompt, params, message) -> None:  # type: ignore[no-untyped-def]
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request(NewRequest("a", prompt, params))
    assert not engine.has_unfinished_requests() and at_rest(engine)


def test_request_id_is_reserved_until_its_request_ends() -> None:
    engine = make_engine()
    engine.add_request(NewRequest("a", [1], GREEDY))
    with pytest.raises(ValueError, match="'a'"):
        engine.add_request(NewRequest("a", [1], GREEDY))
    drain_all(engine)
    engine.add_request(NewRequest("a", [1], GREEDY))
    drain_all(engine)


def drain_all(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 10**6}, "1000000"),
        ({"max_model_len": 1}, "at least 2"),
        ({"kv_cache_memory": 1 << 60}, "free"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_invalid_settings_raise(settings, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make_engine(**settings)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_do_not_change_outputs_and_are_accepted(method: str) -> None:
    sampled = SamplingParams(temperature=0.7, seed=5, max_tokens=20, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    params = [greedy, sampled, greedy, sampled, greedy]
    expected = generate_token_ids(make_engine(), prompts(), params)
    speculative_config = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        speculative_config["model"] = patched("llama")  # drafts every token correctly
    engine = make_engine(speculative_config=speculative_config)
    assert generate_token_ids(engine, prompts(), params) == expected
    assert engine.speculative_decoder is not None and engine.speculative_decoder.acceptance.accepted > 0
    if method == "draft_model":
        assert engine.speculative_decoder.acceptance.rate == 1
    assert at_rest(engine)
