"""This package's engine."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import torch_armllm
from bench.peers.setup import Setup, family
from bench.peers.shapes import Shape
from bench.peers.work import Work
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams
from torch_armllm.engine.text.preprocess import NewRequest
from torch_armllm.evaluation.variant import Variant
from torch_armllm.kv_cache.dtype_names import KvCacheDtype
from torch_armllm.llm.loading.loader import load_engine
from torch_armllm.quant.recipe import Recipe

MAX_MODEL_LEN = 4608
TOKENS = 16_384  # that the cache holds
CHUNK = 512


def recipe_of(engine: str) -> Recipe:
    """Return the recipe of an engine, as ``ours``, ``ours:VARIANT`` or ``ours-int6``, a head of 6 bits.

    Raises:
        ValueError: the variant is unknown, or does not quantize.
    """
    recipe = Variant.parse(engine.partition(":")[2] or "int4").recipe
    if recipe is None:
        raise ValueError(f"{engine}: only quantized models are compared, as ours:int4 or ours:int4-g32")
    return replace(recipe, head="int6") if family(engine) == "ours-int6" else recipe


def quantized(shape: Shape, cache: Path, recipe: Recipe) -> Path:
    """Return the folder of the model quantized by a recipe; the first call writes it."""
    text = json.dumps(recipe.to_dict(), sort_keys=True)
    folder = cache / shape.name / f"armllm-{recipe.scheme}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**shape.config)
        with torch.device("cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        torch_armllm.quantize(model, recipe, progress=False)
        scratch = folder.with_suffix(".new")
        shutil.rmtree(scratch, ignore_errors=True)
        model.save_pretrained(scratch)
        scratch.rename(folder)
    return folder


class Ours:
    """See `work.Engine`."""

    def __init__(self, folder: Path, threads: int, kv_cache_dtype: KvCacheDtype = "auto") -> None:
        config = EngineConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=16,
            max_num_batched_tokens=CHUNK,
            kv_cache_memory=1 << 30,
            kv_cache_dtype=kv_cache_dtype,
            disable_log_stats=True,
            speculative_config=None,
            threads=threads,
        )
        request = ModelRequest(str(folder), skip_tokenizer_init=True, progress=False)
        self.engine = load_engine(request, config).engine

    def ways(self, work: Work) -> list[str]:
        return ["defaults"]

    def prepare(self, work: Work, way: str) -> None:
        pass

    def start(self, name: str, prompt: list[int], new_tokens: int) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self.engine.add_request(NewRequest(name, {"prompt_token_ids": prompt}, params))

    def step(self) -> dict[str, list[int]]:
        outputs = {output.request_id: list(output.outputs[0].token_ids) for output in self.engine.step()}
        return {name: tokens for name, tokens in outputs.items() if tokens}

    def stop(self, name: str) -> None:
        self.engine.abort_request(name)


def load(setup: Setup) -> Ours:
    """Load the engine with the model that its name says."""
    variant = Variant.parse(setup.engine.partition(":")[2] or "int4")
    folder = quantized(setup.shape, setup.cache, recipe_of(setup.engine))
    return Ours(folder, setup.threads, variant.kv_cache_dtype or "auto")
