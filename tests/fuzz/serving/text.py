"""Target: Unicode text, split into tokens anywhere, through the detokenizer and the stop conditions.

The streamed pieces are the tokenizer's text of all tokens.  A stop string ends the output wherever tokens
split it, and no text that was shown is taken back.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers import MAKERS, SPECIAL
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.text.detokenizer import UNREADABLE, Detokenizer, TokenPieces
from torch_armllm.engine.text.stopping import OutputText

_KINDS = ("bytes", "trained", "trained", "strip", "metaspace", "slow")
_RANGES = [
    (0x00, 0x7F), (0xA0, 0x24F), (0x300, 0x36F), (0x590, 0x6FF), (0x900, 0x97F), (0x1100, 0x11FF),
    (0x200B, 0x200F), (0x2028, 0x202E), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
    (0xE000, 0xE0FF), (0xFE00, 0xFE0F), (0xFFF0, 0xFFFC), (0x1D400, 0x1D7FF), (0x1F1E6, 0x1F1FF),
    (0x1F300, 0x1FAFF), (0xE0100, 0xE01EF), (0x10FFF0, 0x10FFFF),
]  # fmt: skip
"""Blocks of each length in UTF-8: controls, combining marks, right to left, joiners, flags, emoji."""
_PHRASES = [
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "👍🏽",
    "e\u0301",
    "नमस्ते",
    "\r\n",
    "  ",
    "\t",
    " the",
    " Hello",
    "日本",
    "<s>",
    "�a",
]
_MAX_TOKEN_BYTES = 16


class Finding(Exception):
    """Text that differs from the tokenizer's, or a stop string that is missed."""


def draw_text(draw: random.Random, length: int) -> str:
    """Returns random characters of all kinds, with repetitions."""
    parts: list[str] = []
    while len(parts) < length:
        kind = draw.random()
        if kind < 0.2:
            parts.append(draw.choice(_PHRASES))
        elif kind < 0.35 and parts:
            parts.append(draw.choice(parts))
        elif kind < 0.55:
            parts.append(draw.choice("ab .STOP"))
        else:
            parts.append(chr(draw.randint(*draw.choice(_RANGES))))
    return "".join(parts)


@cache
def _trained() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose longer tokens begin and end within characters."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    draw = random.Random("corpus")
    trainer = trainers.BpeTrainer(
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        vocab_size=2000,
        show_progress=False,
    )
    bpe.train_from_iterator([draw_text(draw, 60) for _ in range(400)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")


@cache
def _tokenizer(kind: str) -> PreTrainedTokenizerFast:
    return _trained() if kind == "trained" else MAKERS[kind]()


@cache
def _pieces(kind: str, skip: bool) -> TokenPieces:
    return TokenPieces(_tokenizer(kind), skip)


@cache
def _spellings(kind: str) -> dict[bytes, list[int]]:
    """Returns the tokens by their bytes."""
    byte_of = _bytes_of_characters()
    found: dict[bytes, list[int]] = defaultdict(list)
    special = set(_tokenizer(kind).get_added_vocab())
    for name, token in _tokenizer(kind).get_vocab().items():
        if name in special:
            continue
        if kind in ("bytes", "trained"):
            spelled = bytes(byte_of[character] for character in name)
        elif name.startswith("<0x"):
            spelled = bytes([int(name[1:-1], 16)])
        else:
            spelled = name.replace("▁", " ").encode()
        found[spelled].append(token)
    return found


def _bytes_of_characters() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary represents."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def split(draw: random.Random, kind: str, text: str) -> list[int]:
    """Returns tokens that spell a text, cut at random places.

    SentencePiece's kinds have no tokens that end within a character, other than those of single bytes.
    """
    spellings, ids = _spellings(kind), []
    data, start = text.encode(), 0
    longest = draw.choice([1, 3, _MAX_TOKEN_BYTES])
    while start < len(data):
        ends = [
            end
            for end in range(start + 1, min(len(data), start + longest) + 1)
            if data[start:end] in spellings
        ]
        end = draw.choice(ends) if ends else start + 1
        ids.append(draw.choice(spellings[data[start:end]]))
        start = end
    return ids


def _draw_ids(draw: random.Random, kind: str) -> tuple[list[int], bool]:
    """Returns tokens, and whether their text is valid UTF-8 throughout."""
    tokenizer = _tokenizer(kind)
    ids = split(draw, kind, draw_text(draw, draw.choice([0, 1, 3, 20, 60])))
    if draw.random() < 0.3:
        for name in draw.choices(SPECIAL, k=3):
            ids.insert(draw.randint(0, len(ids)), tokenizer.convert_tokens_to_ids(name))
        return ids, kind in ("bytes", "trained")  # others decode the bytes before and after it separately
    if draw.random() < 0.4:
        for _ in range(draw.choice([1, 3, 30])):
            ids.insert(draw.randint(0, len(ids)), draw.randrange(len(tokenizer) + 2))
        return ids, False
    return ids, True


def _check_stream(draw: random.Random, kind: str, ids: list[int], valid: bool, skip: bool) -> None:
    """Compares the streamed text with the whole text."""
    cut = draw.choice([0, 0, draw.randint(0, len(ids))])
    tokenizer = _tokenizer(kind)
    decode: Callable[[list[int]], str] = lambda tokens: str(  # noqa: E731
        tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    )
    results = []
    for pieces in (None, _pieces(kind, skip)):
        detokenizer = Detokenizer(tokenizer, ids[:cut], skip, pieces)
        results.append([*(detokenizer.append(token) for token in ids[cut:]), detokenizer.flush()])
    if results[0] != results[1]:
        raise Finding(f"{kind}: tokens {ids}, cut at {cut}: {results[0]} differs from {results[1]}")
    streamed = "".join(results[0])
    before, whole = decode(ids[:cut]), decode(ids)
    exact = kind in ("bytes", "trained") or valid
    if exact and not before.endswith(UNREADABLE) and before + streamed != whole:
        raise Finding(
            f"{kind}: tokens {ids}, cut at {cut}, skip {skip}: {before!r} + {streamed!r}, {whole!r}"
        )


def _check_stop(draw: random.Random, kind: str, ids: list[int], skip: bool) -> None:
    """Compares the end of the output with the first stop string in the text of all tokens."""
    tokenizer = _tokenizer(kind)
    detokenizer = Detokenizer(tokenizer, [], skip)
    whole = "".join([*(detokenizer.append(token) for token in ids)])
    stops = []
    for _ in range(draw.choice([1, 1, 2, 4])):
        start = draw.randint(0, len(whole))
        stop = (
            whole[start : start + draw.choice([1, 2, 3, 10])] if draw.random() < 0.8 else draw_text(draw, 2)
        )
        stops.append(stop.replace(UNREADABLE, "") or "STOP")
    keep = draw.random() < 0.3
    params = SamplingParams(
        stop=stops,
        include_stop_str_in_output=keep,
        skip_special_tokens=skip,
        ignore_eos=True,
        max_tokens=len(ids) + 1,
    )
    made = OutputText(tokenizer, params, [], (), 10_000, (_pieces(kind, False), _pieces(kind, True)))
    shown, finish = "", None
    for token in ids:
        finish = made.append(token)
        if not made.text.startswith(shown):
            raise Finding(f"{kind}: {ids}, stops {stops}: {shown!r} was shown, and it is {made.text!r} now")
        shown = made.text
        if finish is not None:
            break
    places = [(whole.find(stop), stop) for stop in stops if stop in whole]
    told = f"{kind}: tokens {ids}, stops {stops}, keep {keep}, skip {skip}: {shown!r}, {finish} of {whole!r}"
    if (finish is None) != (not places):
        raise Finding(told)
    if finish is None:
        if made.flush()[: len(whole)] != whole:
            raise Finding(told)
        return
    stop = str(finish.stop_reason)
    if keep:
        if not (shown.endswith(stop) and whole.startswith(shown)):
            raise Finding(told)
    elif not whole.startswith(shown + stop) or any(each in shown for each in stops):
        raise Finding(told)
    if len(set(stops)) == 1 and len(shown) - keep * len(stop) != places[0][0]:
        raise Finding(told)


def run(seed: int) -> None:
    """Streams random tokens, with and without stop strings.

    Raises:
        Finding: the text or its end is wrong.
    """
    draw = random.Random(f"text {seed}")
    kind, skip = draw.choice(_KINDS), draw.random() < 0.7
    ids, valid = _draw_ids(draw, kind)
    _check_stream(draw, kind, ids, valid, skip)
    _check_stop(draw, kind, ids, skip)
