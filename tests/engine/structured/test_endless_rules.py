"""Rules of grammars that no finite text matches."""

from __future__ import annotations

import pytest

from torch_armllm.engine.sampling_params import StructuredOutputsParams
from torch_armllm.engine.structured.endless_rules import endless_rules
from torch_armllm.engine.structured.limits import MAX_BYTES


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ("start: /x*/ start", ["start"]),
        ('start: /x*/? start (start "z")?)* start~2 WORD?\nWORD: "yes" | /[0-9]{1,3}/', ["start"]),
        ('start: /x*/* start~2 "{"*\nr0: /a|b/* start ("-" (r0+ "z"~0..3 W)*)~2\nW: "1"', ["r0", "start"]),
        ('start: "a" b\nb: /x*/ b', ["b", "start"]),
        ('start: "a" b?\nb: /x*/ b // | "c"', ["b"]),
        ("start: a\na: b+\nb: (a | c)\nc: b a~1..3", ["a", "b", "c", "start"]),
        ('start: a\n?a: "(" a ")"\n   | [a] b{1,2} | "|"\nb: a', []),
        ('start: a b{0,3} c~0..2 d* [e]\na: "x"\nb: b\nc: c\nd: d\ne: e', ["b", "c", "d", "e"]),
        ('start: "start" start | /start|x\\// -> start', []),
        ('start: item ("," item)* | \nitem: "[" start "]" | NUMBER\n%import common.NUMBER', []),
        ('start: %json {"a": "start"} | start start\n%ignore /[ ]+/', []),
        ("start: unknown | start", []),
        ("start.2: start[stop=/x/]\nstart: ", []),
        ("start[capture]: start", ["start"]),
        ("", []),
        ("|)](", []),
    ],
)
def test_rules_that_never_end(grammar: str, expected: list[str]) -> None:
    assert endless_rules(grammar) == expected


def test_grammar_that_never_ends_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(ValueError, match=r"no text matches the rule 'b': .*; add one that does not"):
        StructuredOutputsParams(grammar='start: "a" b?\nb: /x*/ b')


def test_time_is_linear_in_long_chains() -> None:
    chain = "\n".join(f"r{i}: {f'r{i + 1} ' * 10}" for i in range(1999))
    assert len(endless_rules(f"start: r0\n{chain}")) == 0
    assert len(endless_rules(f"start: r0\n{chain}\nr1999: r0")) == 2001


@pytest.mark.parametrize(
    "piece", ['"\\"', "/\\/", "{ ", " ", "~ ", "a\n", "[", "(", "-> ", "? ", "start\n", ".1", "%json {"]
)
def test_time_is_linear_in_repeated_pieces(piece: str) -> None:
    endless_rules("start: " + (MAX_BYTES // len(piece)) * piece)  # minutes, if it were quadratic
    endless_rules("start: {" + (MAX_BYTES // len(piece)) * piece)
    endless_rules((MAX_BYTES // len(piece)) * piece)
