"""Ranks that ``torchrun`` starts and gloo connects."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import random_adapter
from tests.support.models import tiny
from torch_armllm import LLM, LoRARequest, SamplingParams
from torch_armllm.llm.ranks.network import launched_ranks

pytestmark = pytest.mark.usefixtures("warm_processes")
SIZES = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64}
PROMPTS = [[5, 6, 7] * 9, [11], list(range(20, 60))]
SCRIPT = """
import json, sys
from torch_armllm import LLM, LoRARequest, SamplingParams

options = {"skip_tokenizer_init": True, "progress": False, "threads": 1, "kv_cache_memory": 1 << 20}
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]), **options, enable_lora=True)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
adapters = [None, LoRARequest("adapter", 1, sys.argv[4]), None]
outputs = llm.generate(json.loads(sys.argv[3]), params, use_tqdm=False, lora_request=adapters)
print("tokens", json.dumps([output.outputs[0].token_ids for output in outputs]))
session = sys.argv[1] + ".session"
llm.save_session(session, json.loads(sys.argv[3])[-1])
llm.reset_prefix_cache()
llm.load_session(session)
again = llm.generate([json.loads(sys.argv[3])[-1]], params, use_tqdm=False)
assert again[0].num_cached_tokens == 32, again
assert again[0].outputs[0].token_ids == outputs[-1].outputs[0].token_ids
"""


def launch(script: Path, processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]  # at a port that it holds
    command += ["--nproc-per-node", str(processes), str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2},
        pytest.param({"pipeline": 2}, marks=pytest.mark.thorough),
        pytest.param({"tensor": 2, "pipeline": 2}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_ranks_of_torchrun_return_the_tokens_of_one_process(tmp_path: Path, sizes: dict[str, int]) -> None:
    model = tiny("llama", torch.bfloat16, **SIZES)
    adapter = str(random_adapter(model, tmp_path / "adapter", 1, 1.0))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = json.dumps({f"{name}_parallel_size": size for name, size in sizes.items()})
    count = math.prod(sizes.values())
    arguments = str(tmp_path / "model"), settings, json.dumps(PROMPTS), adapter
    run = launch(tmp_path / "script.py", count, *arguments)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line for line in run.stdout.splitlines() if line.startswith("tokens")]
    options: dict[str, Any] = {"skip_tokenizer_init": True, "progress": False, "enable_lora": True}
    one = LLM(str(tmp_path / "model"), tensor_parallel_size=1, **options)
    adapters = [None, LoRARequest("adapter", 1, adapter), None]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [
        list(output.outputs[0].token_ids)
        for output in one.generate(PROMPTS, params, use_tqdm=False, lora_request=adapters)
    ]
    assert lines == [f"tokens {json.dumps(expected)}"]


def test_a_process_that_torchrun_did_not_start_is_no_rank() -> None:
    assert launched_ranks({}) is None
    assert launched_ranks({"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "3"}) == 3
