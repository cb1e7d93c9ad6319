"""Time from the start of a process to the first token of a saved model of one billion parameters.

    python -m bench.first_token [--folder DIR] [--shape 1b] [--by llm|server]

Builds a model of Llama 3.2 1B's shape with random weights and saves it quantized to DIR.  DIR defaults to a
temporary folder; a model that DIR already holds is used as it is.  Then starts processes that load the model
and prefill eight tokens.  They use ``LLM(folder)``, where the first process writes the plan cache for the
others; with ``--by server`` they run ``torch-armllm serve``, which needs a folder with a tokenizer.

A row per process has the seconds of the imports, of loading and of the first token; wall and CPU time without
the imports; wall and CPU time of the whole process.  For a server: seconds until it listens and until it has
responded.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from bench.agent_server import own_server
from bench.case import Row, in_process, random_folder, run


def by_llm(folder: str) -> Row:
    """Loads the model by `LLM`, as most users do, and prefills a prompt; runs in a process of its own."""
    start = time.perf_counter()
    from torch_armllm import LLM, SamplingParams

    imported, cpu = time.perf_counter(), time.process_time()
    llm = LLM(folder, skip_tokenizer_init=not (Path(folder) / "tokenizer.json").exists(), progress=False)
    loaded = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.generate({"prompt_token_ids": list(range(100, 108))}, params, use_tqdm=False)
    answered = time.perf_counter()
    return {
        "imports_s": imported - start,
        "load_s": loaded - imported,
        "first_token_s": answered - loaded,
        "without_imports_s": answered - imported,
        "cpu_without_imports_s": time.process_time() - cpu,
        "whole_s": answered - start,
        "cpu_whole_s": time.process_time(),
        "token": output.outputs[0].token_ids[0],
    }


def by_server(folder: str) -> Row:
    """Starts a server and requests one token."""
    start = time.perf_counter()
    with own_server(folder, ()) as port:
        listens = time.perf_counter()
        body = json.dumps({"prompt": "The", "max_tokens": 1, "temperature": 0}).encode()
        url = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            text = json.load(response)["choices"][0]["text"]
        return {"listens_s": listens - start, "whole_s": time.perf_counter() - start, "text": text}


def first_token(
    *,
    folder: Path | None = None,
    shape: Annotated[str, "of a new model, with the vocabulary of Llama 3.2"] = "1b",
    repeats: int = 3,
    by: Literal["llm", "server"] = "llm",
    answer: Annotated[bool, argparse.SUPPRESS] = False,
) -> Iterator[Row]:
    if answer:
        yield by_llm(str(folder))
        return
    with random_folder(shape, folder, vocab_size=128256) as home:
        model = str(home)
        for _ in range(repeats):
            yield by_server(model) if by == "server" else in_process("first_token", answer=True, folder=model)


if __name__ == "__main__":
    run(first_token)
