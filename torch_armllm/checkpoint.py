"""Loading a model and its tokenizer from whatever a user names."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from torch_armllm import embedded
from torch_armllm.hf.registration import METHOD
from torch_armllm.upcycle import upcycle

DENSE = "smollm2"
MOE = "smollm2-moe"
SOURCES = f"{DENSE} (the embedded model), {MOE} (a Mixture-of-Experts made from it), a folder, or a hub name"


def load_model(
    source: str,
    dtype: torch.dtype | str = torch.bfloat16,
    progress: bool = False,
    kv_cache: str | None = None,
) -> PreTrainedModel:
    """Loads a causal language model.

    Args:
        source: ``smollm2``, the embedded SmolLM2-135M-Instruct; ``smollm2-moe``, a Mixture-of-Experts of
            8 experts a layer made from it; a checkpoint's folder; or a name on the model hub.
        dtype: of the weights; ``auto`` is the checkpoint's own.
        progress: shows a bar while the experts are made.
        kv_cache: see `patch`; of a checkpoint that was quantised before, instead of what it was saved with.

    Raises:
        FileNotFoundError: the embedded model is not installed, or the folder holds no checkpoint.
    """
    place = _place(source)
    config = AutoConfig.from_pretrained(place)
    saved = getattr(config, "quantization_config", None)
    if kv_cache is not None and isinstance(saved, dict) and saved.get("quant_method") == METHOD:
        saved["kv_cache"] = kv_cache
    model = AutoModelForCausalLM.from_pretrained(place, config=config, dtype=dtype).eval()
    return upcycle(model, progress=progress) if source == MOE else model


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model; see `load_model`."""
    return AutoTokenizer.from_pretrained(_place(source))


def _place(source: str) -> str:
    if source in (DENSE, MOE):
        return str(embedded.smollm2_dir())
    path = Path(source).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        raise FileNotFoundError(f"{path} holds no config.json: it is not a transformers checkpoint")
    return str(path) if path.exists() else source
