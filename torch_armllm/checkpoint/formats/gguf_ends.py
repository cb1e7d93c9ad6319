"""Tokens of GGUF files that end a text or a turn."""

from __future__ import annotations

from typing import Any

_FIELDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Tokens that llama.cpp ends a generation with; their fields are ``tokenizer.ggml.…_token_id``."""
_TEXTS = frozenset(
    text.encode()
    for text in (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<turn|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<｜end▁of▁sentence｜>",
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<|repo_name|>",
        "<|fim_repo|>",
        "<|file_sep|>",
    )
)
"""Special tokens that end a generation by their text, where a header names too few."""
_CONTROL = 3
"""The type of special tokens in ``tokenizer.ggml.token_type``."""


def apply_ends(config: Any, fields: Any) -> None:
    """Sets ``eos_token_id`` to all tokens that end a text or a turn, the header's own first.

    Args:
        config: of the model; its own ids stay.
        fields: the fields of the header by their full names.
    """
    ids = [_integer(fields.get(f"tokenizer.ggml.{name}_token_id")) for name in _FIELDS]
    own = config.eos_token_id
    ids += own if isinstance(own, list) else [own]
    if ids[0] is not None:
        ids += _by_text(fields)
    vocabulary = config.vocab_size
    ends = list(dict.fromkeys(one for one in ids if one is not None and 0 <= one < vocabulary))
    for name in ("bos_token_id", "pad_token_id"):
        number = getattr(config, name, None)
        if isinstance(number, int) and number >= vocabulary:
            setattr(config, name, None)  # the default of the class, which is one checkpoint's
    if ends:
        config.eos_token_id = ends[0] if len(ends) == 1 else ends


def _integer(field: Any) -> int | None:
    value = None if field is None else field.contents()
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _by_text(fields: Any) -> list[int]:
    tokens, types = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type")
    if tokens is None or types is None or len(tokens.data) != len(types.data):
        return []
    found = [n for n, place in enumerate(tokens.data) if tokens.parts[place].tobytes() in _TEXTS]
    special = {tokens.parts[tokens.data[n]].tobytes(): n for n in found if _type(types, n) == _CONTROL}
    if any(text in special for text in (b"<|return|>", b"<|call|>")):
        special.pop(b"<|end|>", None)  # gpt-oss ends a message with it, not a turn
    return list(special.values())


def _type(types: Any, number: int) -> int:
    return int(types.parts[types.data[number]][0])
