"""Models in forked processes: computing on one thread instead of waiting for threads that do not exist."""

from __future__ import annotations

import subprocess
import sys

PATCHED = """
import os, warnings
import torch
from tests.support.models import tiny, token_ids
import torch_armllm

torch.set_num_threads(2)
model, ids = tiny("llama", hidden_size=128), token_ids(1, 64)
torch_armllm.patch(model, progress=False)
rows = torch.ones(512, 512)

@torch.no_grad()
def compute():
    return model(ids).logits, torch.softmax(rows @ rows, -1)

expected = compute()
if (child := os.fork()) == 0:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same = all(map(torch.equal, compute(), expected))
        compute()
    spawn = [str(w.message) for w in caught if "spawn" in str(w.message)]
    os._exit(0 if same and torch.get_num_threads() == 1 and len(spawn) == 1 else 9)
assert os.waitpid(child, 0)[1] == 0
assert torch.get_num_threads() == 2 and torch.equal(compute()[0], expected[0])
"""
ENGINE = """
import os
import torch
from tests.support.models import tiny
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.llm.llm import LLM

def make(**options):
    return LLM(tiny("llama"), skip_tokenizer_init=True, progress=False, kv_cache_memory=1 << 20, **options)

def answer(llm):
    (output,) = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)
    return output.outputs[0].token_ids

llm = make(threads=2)
expected = answer(llm)
if (child := os.fork()) == 0:
    same = answer(llm) == expected
    same = same and answer(make(threads=2)) == expected and torch.get_num_threads() == 1
    os._exit(0 if same else 9)
assert os.waitpid(child, 0)[1] == 0
assert answer(llm) == expected
"""
UNUSED = """
import os
import torch
from torch_armllm.llm.llm import LLM

torch.set_num_threads(2)
if (child := os.fork()) == 0:
    os._exit(0 if torch.get_num_threads() == 2 else 9)
assert os.waitpid(child, 0)[1] == 0
"""


def test_forked_process_computes_on_one_thread() -> None:
    """One process tries all: the first fork is before anything has computed."""
    # the limit of time is for a hang; the forked process ends with its session
    done = subprocess.run(
        [sys.executable, "-c", UNUSED + PATCHED + ENGINE],
        timeout=120,
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
