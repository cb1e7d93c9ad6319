"""Structured outputs match their schema, regular expression or grammar."""

from __future__ import annotations

import copy
import functools
import json
import random
import re
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers import bytes_and_words
from torch_armllm.engine.request import Request, Sequence
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.sampling_params import SamplingParams, StructuredOutputsParams
from torch_armllm.engine.structured import matcher
from torch_armllm.engine.structured.matcher import StructuredOutputs

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install torch_armllm[structured]")

END, OTHER_END = 0, 1
WORDS = ['{"', '":', "yes", "no", "Ġno", "true", '"}', "12", "aa"]


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes and a few longer tokens."""
    return bytes_and_words(WORDS, ["<end>", "<stop>"])


@functools.cache
def sampler() -> Sampler:
    return Sampler(len(tokenizer()), (END, OTHER_END), tokenizer())


def sequence(seed: int = 0, structure: dict[str, Any] | None = None, **settings: Any) -> Sequence:
    wanted = StructuredOutputsParams(**structure) if structure else None
    params = SamplingParams(structured_outputs=wanted, max_tokens=200, **settings)
    return Request("r", [5, 6], params, seed).sequences[0]


def logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, len(tokenizer()), generator=torch.Generator().manual_seed(seed)) * 3


def text(made: Sequence) -> str:
    return str(tokenizer().decode(made.output_token_ids, skip_special_tokens=True))


def finish(made: Sequence, most: int = 200) -> str:
    """Generates from random logits until the sequence ends by itself; returns the text."""
    for step in range(most):
        token = sampler()(logits(1000 * made.request.seed + step), [made])[0].token_id
        made.token_ids.append(token)
        if token in (END, OTHER_END):
            return text(made)
    raise AssertionError(f"no end after {most} tokens: {text(made)!r}")


@pytest.mark.parametrize("seed", range(3))
def test_choice_yields_one_of_its_strings(seed: int) -> None:
    choice = ["yes", "no", 'say "no"\n', "größer", "a\\b/(c)"]
    assert finish(sequence(seed, {"choice": choice})) in choice


@pytest.mark.parametrize("seed", range(3))
def test_regex_matches_the_whole_output(seed: int) -> None:
    pattern = r"[0-9]{3}-(yes|no)( [a-z]{1,4}){0,2}"
    assert re.fullmatch(pattern, finish(sequence(seed, {"regex": pattern})))


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "ok": {"type": "boolean"},
        "size": {"type": "integer", "minimum": 3, "maximum": 14},
    },
    "required": ["name", "ok", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["dict", "text"])
@pytest.mark.parametrize("seed", range(2))
def test_output_matches_the_schema(seed: int, schema: Any) -> None:
    # unbounded random logits would fill the object with spaces
    spaces = {tokenizer().convert_tokens_to_ids(t): -100.0 for t in ("Ġ", "Ċ", "ĉ", "č")}
    found = json.loads(finish(sequence(seed, {"json": schema}, logit_bias=spaces)))
    assert set(found) == {"name", "ok", "size"}
    assert len(found["name"]) <= 5 and isinstance(found["ok"], bool) and 3 <= found["size"] <= 14


def test_grammar_and_json_object() -> None:
    grammar = 'start: pair+ "."\npair: "(" pair* ")"'
    found = finish(sequence(4, {"grammar": grammar}), 2000)
    assert found[-1] == "." and found.count("(") == found.count(")") and set(found) == {*"()."}
    begin = sequence(0, {"json_object": True})
    first = sampler()(logits(0), [begin])[0].token_id
    assert tokenizer().decode([first]).lstrip()[:1] in ("{", "")


def follows(structure: dict[str, Any], text: str, following: str) -> bool:
    """True if an output may begin with a text and then a character, or end after it if that is empty."""
    own = copy.deepcopy(tokenizer())
    own.add_special_tokens({"additional_special_tokens": ["<call>"]})
    made = sequence(0, structure)
    made.token_ids += own.encode(text)
    allowed = StructuredOutputs(own, len(own), (END,)).matcher(StructuredOutputsParams(**structure))
    token = own.encode(following)[0] if following else END
    return not bool(allowed.forbidden(made, [])[token])


def accepts(structure: dict[str, Any], text: str) -> bool:
    """True if a text is an output."""
    own = tokenizer()
    matcher = StructuredOutputs(own, len(own), (END,)).matcher(StructuredOutputsParams(**structure))
    made = sequence(0, structure)
    made.token_ids += own.encode(text)
    return not bool(matcher.forbidden(made, [])[END]) and not matcher._off_grammar


@pytest.mark.parametrize("seed", range(2))
def test_grammar_in_ebnf(seed: int) -> None:
    grammar = r"""# calls
root ::= name "(" (num ("," num){0,2})? ")"
name ::= "caf\u00e9" | "a\U0001F600b" [\u00e8-\u00ea\u002d]   # two of them
num ::= [0-9]+ | "-" num"""
    written = finish(sequence(seed, {"grammar": grammar}), 2000)
    assert re.fullmatch(r"(café|a😀b[è-ê-])\((-*[0-9]+(,-*[0-9]+){0,2})?\)", written)


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('root ::= (("a"?){0,3}"b")*', ["", "b", "aaab", "bab"], ["a", "aaaab"]),
        ('root ::= start "c"{0} Start\nstart ::= "a"\nStart ::= "b"', ["ab"], ["acb", "aa"]),
        ('root ::= "a\nb" [^\n]', ["a\nbc"], ["a\nb\n", "anbc"]),
    ],
    ids=["repetitions", "names", "line ends"],
)
def test_ebnf_that_lark_reads_in_another_way(grammar: str, texts: list[str], others: list[str]) -> None:
    for text in [*texts, *others]:
        assert accepts({"grammar": grammar}, text) == (text in texts), text


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ('start ::= "a"', "the grammar is no EBNF: No 'root' rule found"),
        ("root ::= foo", "the grammar is no EBNF: Rule 'foo' not found"),
        (
            'root ::= <think> "a"',
            "the grammar is no EBNF: Expected name at line 1, 'root ::= ' ^ '<think> \"a\"'",
        ),
        (
            'root ::= "a" root',
            "no text matches the rule 'root': all its alternatives refer to themselves without an end; add "
            "one that does not",
        ),
        (
            'root ::= "a" | Start-1\nStart-1 ::= "(" Start-1',
            "no text matches the rule 'Start-1': all its alternatives refer to themselves without an end; "
            "add one that does not",
        ),
    ],
    ids=["root", "reference", "token", "endless root", "endless rule"],
)
def test_faults_of_ebnf(grammar: str, told: str) -> None:
    with pytest.raises(ValueError) as refused:
        sampler().check(SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar)))
    assert str(refused.value) == f"structured outputs: {told}"


@pytest.mark.parametrize(
    ("grammar", "written"),
    [
        ('start: A A\nA: "b"+', ""),
        ('%llguidance {"no_forcing": false}\nstart: A A\nA: "b"+ // b', "bb"),
        ('root ::= x{2} [^a]{0,3}\nx ::= ""{0,3} ""? "b"+', "b"),
        (
            'start: "]" r1\nr0: (WORD~0..3) "日"? " "+\nr1: (WORD (WORD?)~0..3) (r0 WORD)\n'
            'WORD: "yes" | /[0-9]{1,3}/\n%ignore /[ ]+/',
            "] 12yes日 ",
        ),
        ('start: %lark {\nstart: A A\nA: "b"+\n}', ""),
    ],
    ids=["terminal", "option", "ebnf", "ignored", "nested"],
)
def test_bytes_that_follow_without_an_end_stop_nothing(grammar: str, written: str) -> None:
    """No text matches these, as a terminal takes all that the next one needs; nothing waits for its end."""
    made = sequence(0, {"grammar": grammar})
    made.token_ids += tokenizer().encode(written)
    for step in range(20):
        made.token_ids.append(sampler()(logits(step), [made])[0].token_id)
    assert END not in made.output_token_ids


def test_whitespace_of_json() -> None:
    schema = {"type": "array", "items": {"const": 1}}
    for structure in ({"json": schema}, {"json": schema, "whitespace_pattern": "[ ]{0,1}"}):
        assert follows(structure, "[ 1", " ") and follows(structure, "[ 1 ,", "1")
        assert follows(structure, "[ 1 ", "\n") == ("whitespace_pattern" not in structure)
    assert follows({"json": {**schema, "x-guidance": {"whitespace_pattern": "\\s"}}}, "[ 1 ,", "1")
    with pytest.raises(ValueError) as refused:
        StructuredOutputsParams(regex="a", whitespace_pattern=" ")
    assert str(refused.value) == (
        "structured outputs: whitespace_pattern is for json and json_object, not for regex"
    )


@pytest.mark.parametrize(
    ("structure", "told"),
    [
        (
            {"json": {"type": "array", "maxItems": 0}, "whitespace_pattern": "]+"},
            "whitespace_pattern ']+' matches text that is no white space, as [ \\t\\n\\r]* does not",
        ),
        (
            {"json_object": True, "whitespace_pattern": " |/"},
            "whitespace_pattern ' |/' matches text that is no white space, as [ \\t\\n\\r]* does not",
        ),
        (
            {"json": {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": "x"}}},
            "whitespace_pattern 'x' matches text that is no white space, as [ \\t\\n\\r]* does not",
        ),
        (
            {"json": '{"x-guidance": {"item_separator": "]+"}}'},
            "x-guidance of the schema sets item_separator to ']+'; only whitespace_pattern and options that "
            "are true or false can be set",
        ),
    ],
    ids=["pattern", "object", "option", "separator"],
)
def test_white_space_that_is_other_text_is_refused(structure: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as refused:
        sampler().check(SamplingParams(structured_outputs=StructuredOutputsParams(**structure)))
    assert str(refused.value) == f"structured outputs: {told}"


def test_output_that_exceeds_a_limit_ends_with_a_warning() -> None:
    """All items are forced, and llguidance looks at them together."""
    schema = {"items": {"const": "a"}, "minItems": 10**6, "x-guidance": {"whitespace_flexible": False}}
    made = sequence(0, {"json": {"type": "array", **schema}})
    made.token_ids.append(sampler()(logits(0), [made])[0].token_id)
    with pytest.warns(UserWarning, match=r"^a structured output ends: parser error: Too many items[^\n]*$"):
        finish(made)


TAG = {
    "triggers": ["<f=", "<call>"],
    "structures": [
        {"begin": "<f=a>", "schema": {"const": 12}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": ""},
        {"begin": "<call>(", "schema": {"const": 7}, "end": ")"},
    ],
}


@pytest.mark.parametrize("tag", [TAG, json.dumps(TAG)], ids=["dict", "text"])
def test_structural_tags(tag: Any) -> None:
    structure = {"structural_tag": tag}
    for text, following, possible in [
        ("", "", True),
        ("any {<f text", "!", True),
        ("any text", "", True),
        ("any <f=", "a", True),
        ("any <f=", "b", True),
        ("any <f=", "c", False),
        ("any <f=", "", False),
        ("any <f=a>1", "2", True),
        ("any <f=a>1", "3", False),
        ("any <f=a>12</f", ">", True),
        ("any <f=a>12</f", " ", False),
        ("any <f=a>12</f>", "x", True),
        ("any <f=a>12</f>", "", True),
        ("<f=b>true<f=", "a", True),
        ("<call>", "(", True),
        ("<call>", "x", False),
        ("<call>(7", ")", True),
    ]:
        assert follows(structure, text, following) == possible, (text, following)


@pytest.mark.parametrize(
    ("tag", "told"),
    [
        (
            "{",
            "structural_tag is not valid JSON: Expecting property name enclosed in double quotes: line 1 "
            "column 2 (char 1)",
        ),
        (
            {"triggers": ["a"]},
            'structural_tag needs {"format": {"type": …}}, or {"triggers": [text, …], "structures": '
            '[{"begin": text, "schema": {…}, "end": text}, …]}',
        ),
        (
            {"triggers": [""], "structures": [{}]},
            "the trigger '' is no text of a character or more",
        ),
        (
            {"triggers": ["<f"], "structures": [3]},
            "the structure 3 is no dict of begin, schema and end",
        ),
        (
            {"triggers": ["<f"], "structures": [{"begin": "<f", "schema": {}}]},
            "a structure needs the texts begin and end, and the dict schema; it has begin, schema",
        ),
        (
            {"triggers": ["<f", "<g"], "structures": [{"begin": "f", "schema": {}, "end": ""}]},
            "the structure 'f' begins with no trigger; triggers: '<f', '<g'",
        ),
    ],
    ids=["text", "missing", "trigger", "structure", "end", "begin"],
)
def test_faults_of_structural_tags(tag: Any, told: str) -> None:
    with pytest.raises(ValueError) as refused:
        StructuredOutputsParams(structural_tag=tag)
    assert str(refused.value) == f"structured outputs: {told}"


@pytest.mark.parametrize(
    ("structure", "told"),
    [
        ({"regex": "[a-"}, "regex"),
        ({"json": {"type": "objekt"}}, "objekt"),
        ({"json": "{"}, "not valid JSON"),
        ({"grammar": "start: nothing"}, "nothing"),
    ],
)
def test_unsupported_grammars_are_rejected(structure: dict[str, Any], told: str) -> None:
    wanted = SamplingParams(structured_outputs=StructuredOutputsParams(**structure))
    with pytest.raises(ValueError, match=told):
        sampler().check(wanted)


def test_structured_outputs_need_a_tokenizer() -> None:
    wanted = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(ValueError, match="fast tokenizer"):
        Sampler(50).check(wanted)


def test_eos_is_forbidden_until_the_output_is_complete() -> None:
    made = sequence(0, {"regex": "yes"}, temperature=0.0)
    for _ in range(3):
        row = logits(0)
        row[0, [END, OTHER_END]] = 100.0
        token = sampler()(row, [made])[0].token_id
        made.token_ids.append(token)
        if token in (END, OTHER_END):
            break
    assert text(made) == "yes" and made.token_ids[-1] == END
    # other processors yield where they would leave no token
    ended = sequence(0, {"regex": "no"}, min_tokens=50)
    ended.token_ids += tokenizer().encode("no")
    assert sampler()(logits(0), [ended])[0].token_id == END


def test_sequence_outside_its_grammar_ends() -> None:
    made = sequence(0, {"regex": "[a-z]{9}"}, allowed_token_ids=tokenizer().encode("3"))
    assert sampler()(logits(0), [made])[0].token_id == END
    made.token_ids += tokenizer().encode("3")
    made.params.allowed_token_ids = None
    assert sampler()(logits(0), [made])[0].token_id == END


def test_grammar_states_of_a_batch_are_independent() -> None:
    """Sequences in one batch, forked and preempted at random, equal those that run alone."""
    structures = [{"regex": "[a-c]{4}[0-9]+"}, None, {"choice": ["yes no", "no yes"]}]
    alone, together = ([sequence(i, s) for i, s in enumerate(structures)] for _ in range(2))
    for step in range(6):
        rows = logits(step, 3)
        for i, made in enumerate(alone):
            made.token_ids.append(sampler()(rows[i : i + 1].clone(), [made])[0].token_id)
        order = random.Random(step).sample(range(3), 3)
        for i, drawn in zip(order, sampler()(rows[order], [together[i] for i in order]), strict=True):
            together[i].token_ids.append(drawn.token_id)
    assert [a.token_ids for a in alone] == [a.token_ids for a in together]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("structure", [{"regex": "(yes|no|12)+"}, {"choice": ["yes", "no no"]}], ids=str)
def test_drafts_do_not_change_structured_outputs(temperature: float, structure: dict[str, Any]) -> None:
    """Correct drafts are accepted; wrong and forbidden ones are rejected, and the matcher rolls back."""
    plain, drafted = (sequence(3, structure, temperature=temperature) for _ in range(2))
    rows = [logits(7 + i) for i in range(40)]
    for i in range(12):
        plain.token_ids.append(sampler()(rows[i].clone(), [plain])[0].token_id)
    right = plain.output_token_ids
    guess = random.Random(0)
    while drafted.output_length < 12:
        at = drafted.output_length
        drafted.draft = [t if guess.random() < 0.7 else guess.randrange(60) for t in right[at : at + 4]]
        given = torch.cat(rows[at : at + 1 + len(drafted.draft)])
        drafted.token_ids += [d.token_id for d in sampler().verify(given, drafted)]
    assert drafted.output_token_ids[:12] == right


def test_drafts_after_the_end_of_a_structured_output_change_nothing() -> None:
    """A request that ignores EOS continues; only EOS follows, drafted or not."""
    drafted = sequence(0, {"regex": "yes"}, ignore_eos=True)
    drafted.token_ids += tokenizer().encode("yes")
    drafted.draft = [END, END, END]
    rows = logits(0, 4)
    rows[:, END] -= 50.0
    rows[:, OTHER_END] -= 100.0
    found = sampler().verify(rows, drafted)
    assert [sample.token_id for sample in found] == [END] * 4


@pytest.mark.parametrize(
    "structure",
    [{"grammar": "start: start"}, {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}],
    ids=str,
)
def test_formats_without_any_text_are_rejected(structure: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no text matches the (format|rule 'start')"):
        sampler().check(SamplingParams(structured_outputs=StructuredOutputsParams(**structure)))


def test_cached_formats_are_few_and_bounded_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_ = matcher._compile

    def counted(grammar: str, own: Any) -> Any:
        compiled.append(grammar)
        return compile_(grammar, own)

    monkeypatch.setattr(matcher, "_compile", counted)
    monkeypatch.setattr(matcher, "_MAX_GRAMMARS", 4)
    monkeypatch.setattr(matcher, "_MAX_CACHED_TEXT", 1000)
    outputs = StructuredOutputs(tokenizer(), len(tokenizer()), (END,))

    def use(*words: str) -> bool:
        """True if the format was compiled."""
        before = len(compiled)
        outputs.check(StructuredOutputsParams(choice=list(words)))
        outputs.matcher(StructuredOutputsParams(choice=list(words)))
        return len(compiled) > before

    assert [use(word) for word in "abcd"] == [True] * 4
    assert not use("a")
    assert use("e")  # evicts b, which was not used for the longest time
    assert not use("a") and use("b")
    assert use("x" * 2000)  # alone is larger than all of the cache, and is compiled once
    assert use("a")
