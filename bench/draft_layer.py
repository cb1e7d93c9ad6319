"""Time of a draft token by a layer for multi-token prediction, beside that of a step.

    python -m bench.draft_layer [--family qwen3_5_text] [--size 1024] [--layers 24] [--vocabulary 32768]
        [--lengths 1,2,4] [--tokens 96]

The model has random weights, INT4, of which no draft token is right: a step extends its one sequence by one
token, however many are drafted.  Prints the median time of a step without drafts, and for each draft length
the time to draft and the time of the step that verifies the draft.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from torch_armllm import LLM, SamplingParams
from torch_armllm.model_survey.tiny_models import tiny_config
from torch_armllm.system.logs import show_messages


def write_model(folder: Path, options: argparse.Namespace) -> None:
    """Writes a random model whose last layer is also the one for multi-token prediction."""
    from transformers import AutoModelForCausalLM

    size, kinds = options.size, ["linear_attention"] * 3 + ["full_attention"]
    config = tiny_config(
        options.family,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=options.layers,
        layer_types=(kinds * options.layers)[: options.layers],
        num_attention_heads=size // 128,
        num_key_value_heads=max(1, size // 512),
        head_dim=128,
        linear_num_key_heads=size // 128,
        linear_num_value_heads=size // 128,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        vocab_size=options.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last = f"model.layers.{options.layers - 1}."
    own = {
        f"mtp.layers.0.{n.removeprefix(last)}": t.clone() for n, t in tensors.items() if n.startswith(last)
    }
    own["mtp.fc.weight"] = torch.randn(size, 2 * size).bfloat16() * 0.02
    for name in ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"):
        own[f"{name}.weight"] = torch.zeros(size, dtype=torch.bfloat16)
    save_file({**tensors, **own}, folder / "model.safetensors", metadata={"format": "pt"})


def timed(owner: Any, name: str) -> list[float]:
    """Returns a list to which each call of a method adds its seconds."""
    function: Callable[..., Any] = getattr(owner, name)
    times: list[float] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **kwargs)
        times.append(time.perf_counter() - began)
        return result

    setattr(owner, name, run)
    return times


def median(times: list[float]) -> float:
    """Returns the median in milliseconds, without the first calls."""
    return 1e3 * statistics.median(times[8:])


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--family", default="qwen3_5_text")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--lengths", default="1,2,4")
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    show_messages()
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    prompt = torch.randint(10, options.vocabulary, (64,)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options)
        for length in (0, *map(int, options.lengths.split(","))):
            drafts = {"method": "mtp", "num_speculative_tokens": length} if length else None
            llm = LLM(
                folder,
                skip_tokenizer_init=True,
                speculative_config=drafts,
                kv_cache_memory=1 << 28,
                max_num_seqs=4,
                max_model_len=1024,
                progress=False,
            )
            engine = llm.llm_engine
            steps = timed(engine.runner, "compute")
            drafting: list[float] = []
            if (decoder := engine.speculative_decoder) is not None:
                decoder._draft_length = lambda sequence, most=length: most  # type: ignore[assignment,misc]
                drafting = timed(decoder.proposer, "propose")
            llm.generate(prompt, params, use_tqdm=False)
            drafted = f"drafting {median(drafting):.2f} ms, verified by" if drafting else "without drafts:"
            print(f"{length} draft tokens: {drafted} a step of {median(steps):.2f} ms", flush=True)


if __name__ == "__main__":
    main()
