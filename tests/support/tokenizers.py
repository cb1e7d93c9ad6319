"""Small tokenizers of the common kinds, whose vocabularies split characters."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁the", "▁Hello", "llo", "he", "t", "a", ".", "▁日", "本", "é", "▁."]
SPECIAL = ["<s>", "</s>", "<|user|>"]


def byte_level() -> PreTrainedTokenizerFast:
    """A token for each byte, special tokens, and added tokens with text of their own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.add_tokens(["<think>", " spaced é "])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def sentencepiece(strip: bool) -> PreTrainedTokenizerFast:
    """Llama's kind (`Strip` at the end), or T5's and Gemma's (`Metaspace`)."""
    pieces = {piece: i for i, piece in enumerate([*SPECIAL, *BYTES, *WORDS])}
    tokenizer = Tokenizer(models.BPE(pieces, [], byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first" if strip else "always", False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        if strip
        else [decoders.ByteFallback(), decoders.Metaspace("▁", "always")]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


class Slow(PreTrainedTokenizerFast):
    """Overrides decoding, like tokenizers without a backend."""

    def _decode(self, *arguments: object, **options: object) -> str:
        return str(super()._decode(*arguments, **options))


def slow() -> PreTrainedTokenizerFast:
    """Returns Llama's kind with a decode method of its own."""
    fast = sentencepiece(True)
    return Slow(tokenizer_object=fast.backend_tokenizer, eos_token="</s>")


MAKERS = {
    "bytes": byte_level,
    "strip": lambda: sentencepiece(True),
    "metaspace": lambda: sentencepiece(False),
    "slow": slow,
}
"""Tokenizers by name."""
