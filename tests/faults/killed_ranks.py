"""Requests with aborts on several processes, of which each is killed in turn; nothing is left behind.

    python -m tests.faults.killed_ranks [--rounds 3] [--requests 1000] [--ranks 2] [--stages 1] [--seed 0]

Each round sends requests to a tiny model, one of five of which is aborted after a random number of outputs.
The tokens are those of one process, of aborted requests as far as they came.  Then a rank is killed: round
after round another one.  Rank 0 is the process that leads, so it is one of its own.  At the end no process of
a rank is left, no file in ``/dev/shm``, and no anonymous file of the process that led.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import of huggingface_hub

from tests.support.models import tiny
from tests.support.rank_processes import ended, pids
from tests.support.server_live import until
from torch_armllm import LLM, AsyncLLM, SamplingParams
from torch_armllm.parallel.rank_place import RankPlace

_SIZES = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64, "num_hidden_layers": 3}
_OPTIONS: dict[str, Any] = {
    **{"skip_tokenizer_init": True, "progress": False, "threads": 1, "kv_cache_memory": 4 << 20},
    **{"disable_log_stats": True, "speculative_config": None},
}
_AT_ONCE = 32
"""Requests that run or wait at a time."""
_ABORTED = 0.2
_LEADER = """
import sys
from tests.faults.killed_ranks import load
from tests.support.rank_processes import pids
from torch_armllm import SamplingParams
llm = load(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
params = SamplingParams(max_tokens=200, ignore_eos=True)
llm.generate([5, 6], params, use_tqdm=False)
print(*pids(), flush=True)
while True:
    llm.generate([[5, 6]] * 4, params, use_tqdm=False)
"""


class Work(NamedTuple):
    """A request, and the number of outputs after which it is aborted; None: it finishes."""

    prompt: list[int]
    params: SamplingParams
    aborted_after: int | None


def save_model(folder: Path) -> Path:
    """Saves a tiny model that ranks and stages share out."""
    tiny("llama", **_SIZES).save_pretrained(folder)
    return folder


def load(folder: str, ranks: int, stages: int) -> LLM:
    """Loads the model for a program that leads ranks."""
    return LLM(folder, tensor_parallel_size=ranks, pipeline_parallel_size=stages, **_OPTIONS)


def draw(count: int, seed: int) -> list[Work]:
    """Draws short requests, greedy and sampled, of which some begin alike."""
    rng = random.Random(seed)
    work = []
    for _ in range(count):
        begin = [7, 8, 9] * 6 if rng.random() < 0.3 else []
        prompt = begin + [rng.randrange(3, 97) for _ in range(rng.randrange(1, 24))]
        sampled: dict[str, Any] = {"temperature": 0}
        if rng.random() < 0.3:
            sampled = {"temperature": 0.9, "seed": rng.randrange(1000)}
        params = SamplingParams(max_tokens=rng.randrange(1, 9), ignore_eos=True, **sampled)
        work.append(Work(prompt, params, rng.randrange(4) if rng.random() < _ABORTED else None))
    return work


async def run(llm: AsyncLLM, work: Sequence[Work]) -> list[list[int]]:
    """Sends requests, and aborts those that are to be aborted; returns the tokens that came of each."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(each: Work) -> list[int]:
        tokens: list[int] = []
        count = 0
        async with room, aclosing(llm.generate(each.prompt, each.params)) as outputs:
            if each.aborted_after == 0:
                following = asyncio.ensure_future(anext(outputs))
                await asyncio.sleep(0)  # it is submitted
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                return tokens
            async for output in outputs:
                tokens, count = output.outputs[0].token_ids, count + 1
                if count == each.aborted_after:
                    break
        return tokens

    return list(await asyncio.gather(*map(one, work)))


def expected_tokens(folder: Path, work: Sequence[Work]) -> list[list[int]]:
    """Returns the tokens of one process."""
    one = load(str(folder), 1, 1)
    outputs = one.generate([w.prompt for w in work], [w.params for w in work], use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def files_of(process: int | str) -> collections.Counter[str]:
    """Returns the files that a process has opened or mapped."""
    links = []
    for file in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            links.append(os.readlink(file))
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return collections.Counter([*links, *(line.split(maxsplit=5)[-1] for line in lines)])


class Left:
    """Things that processes may leave behind: of this process, those that were not there at first."""

    def __init__(self) -> None:
        self._before = self._anonymous()
        self._shared: set[Path] = set()

    def look_at(self, processes: Sequence[int]) -> None:
        """Notes the files of processes in ``/dev/shm``, where other programs have theirs."""
        files = {file for process in processes for file in files_of(process)}
        self._shared |= {Path(file) for file in files if file.startswith("/dev/shm/")}

    def found(self) -> list[str]:
        """Returns what is left."""
        gc.collect()
        shared = [str(file) for file in self._shared if file.exists()]
        return sorted([*(self._anonymous() - self._before).elements(), *shared])

    @staticmethod
    def _anonymous() -> collections.Counter[str]:
        files = files_of("self")
        return collections.Counter({name: files[name] for name in files if "memfd:" in name})


def wait_for_end(llm: AsyncLLM) -> None:
    """Waits until an engine has noticed that a rank has ended."""
    until(lambda: llm.errored, 30)


def with_aborts(
    folder: Path, work: Sequence[Work], ranks: int, stages: int, killed: int
) -> collections.Counter[str]:
    """Runs requests on ranks, kills one of the others, and checks that nothing is left."""
    expected = expected_tokens(folder, work)
    left, others = Left(), set(pids())
    llm = AsyncLLM(str(folder), tensor_parallel_size=ranks, pipeline_parallel_size=stages, **_OPTIONS)
    processes = sorted(set(pids()) - others)
    found = asyncio.run(run(llm, work))
    left.look_at([os.getpid(), *processes])
    counts: collections.Counter[str] = collections.Counter()
    for each, tokens, right in zip(work, found, expected, strict=True):
        whole = each.aborted_after is None or len(tokens) == len(right)
        counts["finished" if whole else "aborted"] += 1
        assert tokens == (right if whole else right[: len(tokens)]), each
    os.kill(processes[killed - 1], signal.SIGKILL)
    assert all(ended(process, 30) for process in processes)
    wait_for_end(llm)
    place, process = RankPlace(killed, ranks, stages), processes[killed - 1]
    message = f"{place} has failed: process {process} was ended by signal 9"
    assert message in str(llm.dead_error), llm.dead_error
    llm.shutdown()
    del llm
    assert (things := left.found()) == [], things
    return counts


def without_leader(folder: Path, ranks: int, stages: int) -> None:
    """Kills the process that leads, and checks that the others end and nothing is left."""
    left = Left()
    command = [sys.executable, "-c", _LEADER, str(folder), str(ranks), str(stages)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        processes = list(map(int, leader.stdout.readline().split()))
        assert len(processes) == ranks * stages - 1
        left.look_at([leader.pid, *processes])
        leader.kill()
    assert all(ended(process, 30) for process in processes)
    assert (things := left.found()) == [], things


def main() -> None:
    """Runs the rounds that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2, help="tensor parallel ranks of each stage")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = save_model(Path(name))
        for number in range(options.rounds):
            killed = 1 + number % (options.ranks * options.stages - 1)
            work = draw(options.requests, options.seed + number)
            counts += with_aborts(folder, work, options.ranks, options.stages, killed)
            without_leader(folder, options.ranks, options.stages)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
