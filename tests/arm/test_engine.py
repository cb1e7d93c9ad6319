"""The engine on this machine's kernels: two requests at once, from prompt to finished output."""

from __future__ import annotations

import torch

from tests.support.engines import MEMORY, drain, submit
from tests.support.models import tiny, token_ids
from torch_armllm import patch
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.sampling_params import SamplingParams

PROMPTS = [token_ids(1, 37, seed=1)[0].tolist(), token_ids(1, 9, seed=2)[0].tolist()]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, n=2, max_tokens=6, ignore_eos=True, logprobs=1),
]


def test_two_requests_equal_single_runs() -> None:
    model = tiny("mixtral", torch.bfloat16)
    report = patch(model, progress=False)
    assert report.captured
    settings = EngineConfig(kv_cache_memory=MEMORY, max_num_seqs=4, max_num_batched_tokens=16)
    engine = build_engine(model, None, settings)
    submit(engine, PROMPTS, PARAMS)
    together = drain(engine)
    for prompt, params, output in zip(PROMPTS, PARAMS, together, strict=True):
        fresh = build_engine(model, None, settings)
        submit(fresh, [prompt], params)
        (alone,) = drain(fresh)
        assert len(alone.outputs) == params.n
        assert [a.token_ids for a in alone.outputs] == [a.token_ids for a in output.outputs]
        assert [a.logprobs for a in alone.outputs] == [a.logprobs for a in output.outputs]
        assert all(len(a.token_ids) == 6 and a.finish_reason == "length" for a in alone.outputs)
