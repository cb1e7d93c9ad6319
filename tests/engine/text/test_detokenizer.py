"""Concatenated increments equal the tokenizer's text of all tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.support.tokenizers import BYTES, MAKERS, SPECIAL, WORDS
from torch_armllm.engine.text import detokenizer
from torch_armllm.engine.text.detokenizer import Detokenizer, TokenPieces

TEXTS = [
    "Plain words, and two  spaces.\n\n\tTabs too.",
    "日本語のテキストと中文，混ざった。",
    "مرحبا بالعالم، كيف حالك؟",
    "e\u0301 a\u0308 ộ n\u0303: combining marks; नमस्ते दुनिया",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇯🇵 👍🏽 🤗",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀𓀁 \u200b\u200d\u00a0 end",
]


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return MAKERS[request.param]()


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_dir)


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], skip: bool = True) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def increments(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], prompt: Sequence[int] = (), skip: bool = True
) -> list[str]:
    """Returns the output per token and at the end; checks that known pieces do not change it."""
    made = Detokenizer(tokenizer, prompt, skip)
    found = [*(made.append(token_id) for token_id in ids), made.flush()]
    knowing = Detokenizer(tokenizer, prompt, skip, TokenPieces(tokenizer, skip))
    assert [*(knowing.append(token_id) for token_id in ids), knowing.flush()] == found
    return found


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str, skip: bool) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) > 20
    parts = increments(tokenizer, ids, skip=skip)
    assert "".join(parts) == decoded(tokenizer, ids, skip)
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("text", TEXTS)
def test_output_text_continues_the_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer("Hello " + 2 * text, add_special_tokens=False).input_ids
    for cut in range(1, len(ids), 5):
        whole = cut  # tokens of the prompt without an unfinished character at its end
        while decoded(tokenizer, ids[:whole]).endswith("\ufffd"):
            whole -= 1
        answer = "".join(increments(tokenizer, ids[cut:], ids[:cut]))
        assert decoded(tokenizer, ids[:whole]) + answer == decoded(tokenizer, ids)


@pytest.mark.parametrize("name", ["strip", "metaspace", "slow"])
def test_leading_space_depends_on_the_prompt(name: str) -> None:
    tokenizer = _cached(name)
    start, piece, word = tokenizer.convert_tokens_to_ids(["<s>", "▁Hello", "t"])
    assert increments(tokenizer, [piece]) == ["Hello", ""]
    assert increments(tokenizer, [piece, piece]) == ["Hello", " Hello", ""]
    assert increments(tokenizer, [piece], [word]) == [" Hello", ""]
    # skipped special tokens do not count as a beginning
    assert increments(tokenizer, [piece], [word, *(20 * [start])]) == [" Hello", ""]
    assert "".join(increments(tokenizer, [piece, *(19 * [start]), piece])) == "Hello Hello"


def test_character_is_output_once_complete(tokenizer: PreTrainedTokenizerBase) -> None:
    # 𝔘 is in no vocabulary: four tokens
    ids = tokenizer("𝔘𝔘a", add_special_tokens=False).input_ids[-9:]
    assert increments(tokenizer, ids) == ["", "", "", "𝔘", "", "", "", "𝔘", "a", ""]
    *parts, last = increments(tokenizer, ids[:6])
    assert parts == ["", "", "", "𝔘", "", ""]
    assert set(last) == {"\ufffd"}  # incomplete at the end: flushed as U+FFFD


def test_tokens_of_whole_characters_are_decoded_once() -> None:
    for name, known in (("bytes", "a"), ("strip", None), ("slow", None)):
        tokenizer = _cached(name)
        pieces = TokenPieces(tokenizer, True)
        (a,) = tokenizer.convert_tokens_to_ids(["a"])
        assert pieces[a] == known and pieces.any == (known is not None)
    tokenizer = _cached("bytes")
    pieces = TokenPieces(tokenizer, True)
    word, half = tokenizer.convert_tokens_to_ids(["a", "ð"])
    made = Detokenizer(tokenizer, [], True, pieces)
    pieces[word] = "b"  # a wrong value, to see that it is looked up
    assert [made.append(token) for token in (word, half, word, word)] == ["b", "", "\ufffda", "b"]
    assert pieces[half] is None and pieces[tokenizer.convert_tokens_to_ids("</s>")] == ""


def test_skip_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.convert_tokens_to_ids(["t", "</s>", "a"])
    assert increments(tokenizer, ids) == ["t", "", "a", ""]
    assert increments(tokenizer, ids, skip=False) == ["t", "</s>", "a", ""]


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 261), max_size=120), st.integers(0, 40), st.booleans())
def test_arbitrary_bytes_decode_as_by_the_tokenizer(ids: list[int], cut: int, skip: bool) -> None:
    tokenizer = _cached("bytes")
    assert "".join(increments(tokenizer, ids, skip=skip)) == decoded(tokenizer, ids, skip)
    whole = decoded(tokenizer, ids[:cut], skip)
    if not whole.endswith("\ufffd"):
        text = whole + "".join(increments(tokenizer, ids[cut:], ids[:cut], skip))
        assert text == decoded(tokenizer, ids, skip)


# In bytes, a real U+FFFD cannot be told from a character that is not complete.
_CHARACTERS = st.text(
    st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), min_size=1, max_size=3
)


@settings(max_examples=300, deadline=None)
@example([" 𐀀"])  # the space is stripped, but it makes the unreadable run a byte longer
@example(["a 𐀀"])
@given(st.lists(st.one_of(st.sampled_from(WORDS + SPECIAL), _CHARACTERS), max_size=60))
def test_whole_and_split_characters(parts: list[str]) -> None:
    for name in ("strip", "metaspace"):
        tokenizer = _cached(name)
        ids = []
        for part in parts:
            known = [part] if part in WORDS + SPECIAL else [BYTES[byte] for byte in part.encode()]
            ids += tokenizer.convert_tokens_to_ids(known)
        for skip in (True, False):
            assert "".join(increments(tokenizer, ids, skip=skip)) == decoded(tokenizer, ids, skip)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=150), st.integers(0, 40))
def test_invalid_bytes_do_not_break_sentencepiece_output(ids: list[int], cut: int) -> None:
    """A byte run with an invalid byte is unreadable as a whole; text that was output before stays."""
    tokenizer = _cached("strip")
    increments(tokenizer, ids[cut:], ids[:cut])
    readable = [c for c in decoded(tokenizer, ids) if c not in "\ufffd "]
    shown = iter("".join(increments(tokenizer, ids)))
    assert all(c in shown for c in readable)


def test_random_tokens_of_a_real_vocabulary(smollm2: PreTrainedTokenizerBase) -> None:
    draw = random.Random(0)
    for length in (1, 2, 5, 40, 300):
        for _ in range(20):
            ids = [draw.randrange(len(smollm2) + 50) for _ in range(length)]  # some beyond the vocabulary
            for skip in (True, False):
                assert "".join(increments(smollm2, ids, skip=skip)) == decoded(smollm2, ids, skip)


@pytest.mark.parametrize("text", TEXTS)
def test_real_text_of_a_real_vocabulary(smollm2: PreTrainedTokenizerBase, text: str) -> None:
    ids = smollm2(20 * text).input_ids
    parts = increments(smollm2, ids)
    assert "".join(parts) == 20 * text
    assert max(map(len, parts)) < 20


def test_cost_per_token_does_not_depend_on_length(
    smollm2: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    decoder = detokenizer.decoder

    def counting(tokenizer: PreTrainedTokenizerBase, skip: bool = True) -> detokenizer.Decode:
        decode = decoder(tokenizer, skip)

        def count(ids: list[int]) -> str:
            lengths.append(len(ids))
            return decode(ids)

        return count

    monkeypatch.setattr(detokenizer, "decoder", counting)
    unreadable = smollm2.convert_tokens_to_ids(["ð"])
    assert decoded(smollm2, unreadable) == "\ufffd"
    for ids in (smollm2("Some words to be said again. 🤗").input_ids * 100, unreadable * 1000):
        lengths.clear()
        increments(smollm2, ids, prompt=ids)
        assert max(lengths) <= 32
        assert len(lengths) < 2 * 2.5 * len(ids) + 50  # with known pieces and without


_made: dict[str, PreTrainedTokenizerFast] = {}


def _cached(name: str) -> PreTrainedTokenizerFast:
    if name not in _made:
        _made[name] = MAKERS[name]()
    return _made[name]
