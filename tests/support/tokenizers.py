"""Small tokenizers: of the common kinds, whose vocabularies split characters, and of words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁the", "▁Hello", "llo", "he", "t", "a", ".", "▁日", "本", "é", "▁."]
SPECIAL = ["<s>", "</s>", "<|user|>"]
_ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def byte_level() -> PreTrainedTokenizerFast:
    """A token for each byte, special tokens, and added tokens with text of their own."""
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(sorted(_ALPHABET))}, []))
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


def bytes_and_words(words: Sequence[str], special: Sequence[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of single bytes and a few longer tokens; the first special token ends texts."""
    vocab = {token: number for number, token in enumerate([*special, *sorted(_ALPHABET)])}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0])


def whole_words(ids: dict[str, int], special: Sequence[str], **options: Any) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of words that have these ids, the four common special tokens among them.

    Args:
        ids: the vocabulary.
        special: further special tokens of it.
        options: of the tokenizer.
    """
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(special),
        **options,
    )


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
