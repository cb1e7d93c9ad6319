"""Time from the start of a process to the first token of a saved model of one billion parameters.

    python -m bench.first_token [--folder DIR] [--layers 16] [--by llm] [--profile]

Builds a model of Llama 3.2 1B's shape with random weights, quantizes it and saves it to DIR.  DIR defaults
to a temporary folder; a model that DIR already holds is used as it is.  Then starts processes that load the
model and prefill eight tokens.  They use ``LLM(folder)``, where the first process writes the plan cache for
the others; with ``--by transformers`` they use ``from_pretrained``.  With ``--by server`` they run
``torch-armllm serve``, which needs a folder with a tokenizer.

Prints one JSON line per process: seconds of the imports, of loading and of the first token; wall and CPU time
without the imports; wall and CPU time of the whole process.  For a server: seconds until it listens and until
it has responded.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

_VOCABULARY = 128256


def save(folder: Path, layers: int) -> None:
    """Quantizes and saves the model."""
    import torch_armllm
    from bench.patch_memory import random_model

    model = random_model(_VOCABULARY, layers)
    torch_armllm.quantize(model, torch_armllm.Recipe(importance=False))
    model.save_pretrained(folder)


def answer_by_llm(folder: str) -> None:
    """Loads the model by `LLM`, as most users do, and prefills a prompt; runs in its own process."""
    start = time.perf_counter()
    from torch_armllm import LLM, SamplingParams

    imported, cpu = time.perf_counter(), time.process_time()
    llm = LLM(folder, skip_tokenizer_init=not (Path(folder) / "tokenizer.json").exists(), progress=False)
    loaded = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.generate({"prompt_token_ids": list(range(100, 108))}, params, use_tqdm=False)
    answered = time.perf_counter()
    figures = {
        "imports_s": imported - start,
        "load_s": loaded - imported,
        "first_token_s": answered - loaded,
        "without_imports_s": answered - imported,
        "cpu_without_imports_s": time.process_time() - cpu,
        "whole_s": answered - start,
        "cpu_whole_s": time.process_time(),
    }
    rounded = {name: round(value, 2) for name, value in figures.items()}
    print(json.dumps({**rounded, "token": output.outputs[0].token_ids[0]}))


def answer(folder: str, profile: bool) -> None:
    """Loads the model by transformers and prefills a prompt; runs in its own process."""
    start = time.perf_counter()
    import torch
    import torch.export
    from transformers import AutoModelForCausalLM
    from transformers.models.llama import modeling_llama  # noqa: F401  # counts as import, not as loading

    import torch_armllm.checkpoint.layer_loader  # noqa: F401

    imported = time.perf_counter()
    cpu = time.process_time()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    model = AutoModelForCausalLM.from_pretrained(folder)
    loaded = time.perf_counter()
    with torch.no_grad():
        token = int(model(torch.arange(100, 108)[None]).logits[0, -1].argmax())
    answered = time.perf_counter()
    if profile:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(70)
    figures = {
        "imports_s": imported - start,
        "load_s": loaded - imported,
        "first_token_s": answered - loaded,
        "without_imports_s": answered - imported,
        "cpu_without_imports_s": time.process_time() - cpu,
    }
    rounded = {name: round(value, 2) for name, value in figures.items()}
    reason = model.hf_quantizer.report.capture_reason
    print(json.dumps({**rounded, "token": token, "not_captured": reason}))


def answer_by_server(folder: str) -> None:
    """Starts a server and requests one token."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "torch_armllm", "serve", folder, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = next(re.search(r" at (http\S+)", line) for line in server.stdout if "serving" in line)
        assert url is not None
        listens = time.perf_counter()
        body = json.dumps({"prompt": "The", "max_tokens": 1, "temperature": 0}).encode()
        request = urllib.request.Request(f"{url[1]}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            text = json.load(response)["choices"][0]["text"]
        answered = time.perf_counter()
        server.terminate()
    figures = {"listens_s": listens - start, "whole_s": answered - start}
    print(json.dumps({**{name: round(value, 2) for name, value in figures.items()}, "text": text}))


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--by", choices=("llm", "transformers", "server"), default="llm")
    parser.add_argument("--profile", action="store_true", help="print where the time goes (transformers)")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer and options.by == "llm":
        answer_by_llm(str(options.folder))
        return
    if options.answer:
        answer(str(options.folder), options.profile)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "config.json").exists():
            save(folder, options.layers)
        command = [sys.executable, "-m", "bench.first_token", "--answer", "--by", options.by]
        command += ["--folder", str(folder)]
        for _ in range(options.repeats):
            if options.by == "server":
                answer_by_server(str(folder))
                continue
            subprocess.run(command + ["--profile"] * options.profile, check=True)


if __name__ == "__main__":
    main()
