"""Stop conditions, and the text that is output before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.text.stopping import Finish, OutputText, find_eos_token_ids

_alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
_words = [*_alphabet, "ab", "abc", "ÐŃ", "ĠSTOP", "ST", "OP"]
_backend = Tokenizer(models.BPE({word: i for i, word in enumerate(_words)}, []))
_backend.decoder = decoders.ByteLevel()
_backend.add_special_tokens([AddedToken(name, special=True) for name in ("<end>", "<turn>")])
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=_backend, eos_token="<end>")
END, TURN = TOKENIZER.convert_tokens_to_ids(["<end>", "<turn>"])


def ids(*words: str) -> list[int]:
    return [TOKENIZER.convert_tokens_to_ids(word) for word in words]


def spelled(text: str) -> list[int]:
    """One token per byte."""
    characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [TOKENIZER.convert_tokens_to_ids(c) for word, _ in characters for c in word]


def answer(max_model_len: int = 1000, end: tuple[int, ...] = (END, TURN), **settings: Any) -> OutputText:
    settings.setdefault("max_tokens", None)
    return OutputText(TOKENIZER, SamplingParams(**settings), ids("a", "b"), end, max_model_len)


def run(made: OutputText, tokens: list[int]) -> tuple[list[str], Finish | None]:
    shown: list[str] = []
    for token in tokens:
        finish = made.append(token)
        shown.append(made.text)
        if finish is not None:
            return shown, finish
    return shown, None


def test_stop_string_across_tokens_is_found_and_cut_off() -> None:
    shown, finish = run(answer(stop=["STOP"]), ids("a", "ST", "ab", "S", "T", "OP", "a"))
    assert shown == ["a", "a", "aSTab", "aSTab", "aSTab", "aSTab"]
    assert finish == Finish("stop", "STOP")


def test_text_after_a_stop_string_in_the_same_token_is_cut_off() -> None:
    shown, finish = run(answer(stop="b"), ids("a", "abc"))
    assert (shown, finish) == (["a", "aa"], Finish("stop", "b"))
    shown, finish = run(answer(stop="b", include_stop_str_in_output=True), ids("a", "abc"))
    assert (shown, finish) == (["a", "aab"], Finish("stop", "b"))


def test_included_stop_string_is_not_held_back() -> None:
    shown, finish = run(answer(stop="STOP", include_stop_str_in_output=True), ids("a", "ST", "OP"))
    assert (shown, finish) == (["a", "aST", "aSTOP"], Finish("stop", "STOP"))


def test_first_stop_string_in_the_text_wins() -> None:
    shown, finish = run(answer(stop=["c", "b"]), ids("abc"))
    assert (shown[-1], finish) == ("a", Finish("stop", "b"))
    shown, finish = run(answer(stop=["bc", "b"]), ids("abc"))
    assert (shown[-1], finish) == ("a", Finish("stop", "bc"))


def test_held_back_text_is_released_at_the_end() -> None:
    shown, finish = run(answer(stop="STOP", max_tokens=2), ids("a", "ST"))
    assert (shown, finish) == (["a", "aST"], Finish("length"))
    shown, finish = run(answer(stop="STOP"), [*ids("a", "ST"), END])
    assert (shown, finish) == (["a", "a", "aST"], Finish("stop"))
    made = answer(stop="STOP")
    run(made, ids("a", "ST"))
    assert (made.text, made.flush(), made.text) == ("a", "aST", "aST")


def test_incomplete_last_character_is_output_as_replacement() -> None:
    shown, finish = run(answer(max_tokens=3), spelled("aé漢")[:4])
    assert (shown, finish) == (["a", "a", "aé"], Finish("length"))
    shown, finish = run(answer(max_tokens=2), spelled("é漢")[1:])
    assert shown[-1] == "\ufffd\ufffd"


def test_multibyte_stop_strings() -> None:
    shown, finish = run(answer(stop=["漢字"]), spelled("a漢b漢字c"))
    assert (shown[-1], finish) == ("a漢b", Finish("stop", "漢字"))
    assert "a漢" not in shown
    assert "a漢b" in shown


def test_eos_tokens() -> None:
    assert run(answer(), [*ids("a"), END]) == (["a", "a"], Finish("stop"))
    assert run(answer(), [*ids("a"), TURN]) == (["a", "a"], Finish("stop", TURN))
    assert run(answer(ignore_eos=True), [*ids("a"), END, TURN]) == (["a", "a", "a"], None)
    assert run(answer(end=()), [*ids("a"), END]) == (["a", "a"], None)
    told = answer(skip_special_tokens=False)
    assert run(told, [*ids("a"), END]) == (["a", "a"], Finish("stop"))
    told = answer(skip_special_tokens=False, include_stop_str_in_output=True)
    assert run(told, [*ids("a"), END])[0][-1] == "a<end>"


def test_stop_token_ids() -> None:
    (stop,) = ids("abc")
    assert run(answer(stop_token_ids=[stop]), ids("a", "abc")) == (["a", "a"], Finish("stop", stop))
    shown, finish = run(answer(stop_token_ids=[stop], include_stop_str_in_output=True), ids("a", "abc"))
    assert (shown, finish) == (["a", "aabc"], Finish("stop", stop))
    # requested by the user: it stops even with ignore_eos, and is named as the stop reason
    for ignore in (True, False):
        _, finish = run(answer(stop_token_ids=[END], ignore_eos=ignore), [END])
        assert finish == Finish("stop", END)


def test_length_limits() -> None:
    assert run(answer(max_tokens=2), ids("a", "b", "c")) == (["a", "ab"], Finish("length"))
    assert run(answer(max_model_len=5), ids("a", "b", "c", "ab")) == (["a", "ab", "abc"], Finish("length"))
    assert run(answer(max_tokens=2), [*ids("a"), END])[1] == Finish("stop")


def test_min_tokens_suppresses_stop_conditions() -> None:
    made = answer(min_tokens=3, stop="b", stop_token_ids=ids("c"))
    shown, finish = run(made, [END, *ids("c"), *ids("b"), *ids("a"), *ids("b")])
    assert (shown[-1], finish) == ("cba", Finish("stop", "b"))
    assert run(answer(min_tokens=2), [*ids("a"), END])[1] == Finish("stop")
    # a stop string that ends after min_tokens counts, wherever it began
    _, finish = run(answer(min_tokens=1, stop="STOP"), ids("ST", "OP"))
    assert finish == Finish("stop", "STOP")


class EndsAt:
    """An end behind some characters, which is found later."""

    def __init__(self, kept: int, known: int) -> None:
        self._kept, self._known = kept, known

    def begin(self) -> Callable[[str], int | None]:
        pieces: list[str] = []

        def end(text: str) -> int | None:
            pieces.append(text)
            return self._kept if len("".join(pieces)) >= self._known else None

        return end


def test_the_end_of_a_text_is_found_by_what_it_says() -> None:
    shown, finish = run(answer(text_end=EndsAt(3, 5)), ids("ab", "a", "b", "abc", "c"))
    assert (shown, finish) == (["ab", "aba", "abab", "aba"], Finish("stop"))
    shown, finish = run(answer(text_end=EndsAt(2, 2), stop="abc"), ids("ab", "c"))
    assert (shown, finish) == (["ab"], Finish("stop"))
    shown, finish = run(answer(text_end=EndsAt(2, 2), min_tokens=3), ids("ab", "a", "b", "c"))
    assert (len(shown), shown[-1], finish) == (3, "ab", Finish("stop"))
    shown, finish = run(answer(text_end=EndsAt(2, 9)), [*ids("ab", "c"), END])
    assert (shown, finish) == (["ab", "abc", "abc"], Finish("stop"))
    assert run(answer(text_end=EndsAt(0, 1), detokenize=False, max_tokens=1), ids("a"))[1] == Finish("length")


def test_without_detokenization() -> None:
    for made in (
        answer(detokenize=False, max_tokens=3),
        OutputText(None, SamplingParams(max_tokens=3), [1], (END,), 100),
    ):
        assert run(made, ids("a", "b", "c")) == (["", "", ""], Finish("length"))
    assert run(answer(detokenize=False), [END])[1] == Finish("stop")


def test_find_eos_token_ids() -> None:
    assert find_eos_token_ids(TOKENIZER, GenerationConfig(eos_token_id=[TURN, END, 7])) == (END, TURN, 7)
    assert find_eos_token_ids(TOKENIZER, GenerationConfig(eos_token_id=3)) == (END, 3)
    assert find_eos_token_ids(TOKENIZER, None) == (END,)
    assert find_eos_token_ids(None, GenerationConfig()) == ()


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "abc", "é", "c"]), max_size=30),
    st.lists(st.text("abcé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_streams_never_output_text_that_is_cut_off_later(
    words: list[str], stops: list[str], keep: bool
) -> None:
    tokens = [t for word in words for t in (spelled(word) if word == "é" else ids(word))]
    whole = "".join(words)
    places = [whole.find(stop) for stop in stops]
    shown, finish = run(answer(stop=stops, include_stop_str_in_output=keep), tokens)
    assert all(later.startswith(earlier) for earlier, later in zip(shown, shown[1:], strict=False))
    if finish is None:
        assert max(places) < 0
        held = whole[len(shown[-1]) :] if shown else ""
        assert not held or any(stop.startswith(held) for stop in stops)
    else:
        assert finish.reason == "stop"
        assert finish.stop_reason in stops
        stop = str(finish.stop_reason)
        assert whole.startswith(shown[-1] if keep else shown[-1] + stop)
        assert shown[-1].endswith(stop) or not keep
        begun = len(shown[-1]) - len(stop) * keep
        come = len(str(TOKENIZER.decode(tokens[: len(shown)])))
        for other in stops:  # no other complete stop string begins before it
            place = whole.find(other)
            assert place < 0 or place >= begun or place + len(other) > come
