"""A tiny random model with a byte-level tokenizer, saved as a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.models import tiny
from torch_armllm import Recipe
from torch_armllm.quant.inplace import quantize

TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %}{{ tool.function.name }};{% endfor %}\n{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}"
    "\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer with special tokens and a chat template with tools."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        vocab_size=259,
    )
    bpe.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    )


def checkpoint(folder: Path, packed: bool = False) -> Path:
    """Saves the model and its tokenizer in a folder; ``packed``: with INT4 weights, whose plan is stored."""
    saved_tokenizer = tokenizer()
    model = tiny("llama", vocab_size=len(saved_tokenizer), max_position_embeddings=512)
    if packed:
        quantize(model, Recipe(importance=False), progress=False)
    model.save_pretrained(folder)
    saved_tokenizer.save_pretrained(folder)
    return folder
