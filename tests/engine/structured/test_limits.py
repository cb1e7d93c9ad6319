"""No structured output ends the process: what is too large is refused, and what is allowed fits the stack."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from torch_armllm.engine.sampling_params import StructuredOutputsParams
from torch_armllm.engine.structured.limits import MAX_CHOICES, MAX_NESTING, MAX_RULES

pytestmark = pytest.mark.usefixtures("warm_processes")


def chain(rules: int) -> str:
    return (
        "start: r1\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(1, rules - 1)) + f'r{rules - 1}: "b"\n'
    )


def cycle(rules: int) -> str:
    names = range(rules - 1)
    return "start: r0\n" + "".join(
        f'r{i}: r{(i + 1) % len(names)} "a" | r{i * 7 % len(names)} | "b"\n' for i in names
    )


def references(count: int) -> dict[str, Any]:
    definitions = {f"d{i}": {"items": {"$ref": f"#/$defs/d{(i + 1) % count}"}} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"not": schema}
    return schema


def inside(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "any_text"}
    for _ in range(levels - 1):
        made = {"type": "optional", "content": made}
    return made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grammar": chain(MAX_RULES + 1)}, "2001 rules of the grammar, at most 2000"),
        ({"grammar": chain(20_000)}, "bytes of the grammar"),
        (
            {"grammar": "start: " + "(" * 65 + '"a"' + ")" * 65},
            "65 nested parentheses of the grammar, at most 64",
        ),
        (
            {"grammar": 'root ::= "a"\n' + "".join(f'r{i} ::= "a"\n' for i in range(500))},
            "501 rules of the grammar, at most 500",
        ),
        ({"json": {}, "whitespace_pattern": " " * 40_000}, "40000 bytes of the regex, at most 32768"),
        (
            {
                "structural_tag": {
                    "triggers": ["a"],
                    "structures": [{"begin": "a", "schema": nested(65), "end": ""}],
                }
            },
            "65 nested levels of the schema, at most 64",
        ),
        ({"structural_tag": "[" * 300_000}, "300000 nested levels of the structural tag, at most 256"),
        ({"structural_tag": " " * 300_000}, "300000 bytes of the structural tag, at most 262144"),
        (
            {"structural_tag": {"format": {"type": "sequence", "elements": 4096 * [{"type": "any_text"}]}}},
            "4097 formats of the structural tag, at most 4096",
        ),
        (
            {"structural_tag": {"format": inside(65)}},
            "65 formats inside each other, at most 64 are allowed",
        ),
        (
            {"structural_tag": {"format": {"type": "regex", "pattern": "a" * 40_000}}},
            "40000 bytes of the regex, at most 32768",
        ),
        (
            {"structural_tag": {"format": {"type": "grammar", "grammar": "start: start"}}},
            "no text matches the rule 'start'",
        ),
        ({"regex": "a" * 40_000}, "40000 bytes of the regex, at most 32768"),
        ({"regex": "(" * 100 + "a" + ")" * 100}, "100 nested parentheses of the regex"),
        ({"choice": ["a"] * 100_000}, "100000 choices, at most 4096"),
        ({"choice": ["a" * 1000] * 1000}, "1000000 bytes of choices"),
        ({"json": nested(MAX_NESTING + 1)}, "65 nested levels of the schema, at most 64"),
        ({"json": nested(100_000)}, "65 nested levels of the schema"),
        ({"json": "[" * 100_000}, "100000 nested levels of the schema"),
        ({"json": references(20_000)}, "bytes of the schema"),
        ({"json": {"const": -(2**63)}}, "-9223372036854775808 in const of the schema is beyond"),
        ({"json": {"const": {"a": [-1e300]}}}, "in a of the schema is beyond"),
        ({"json": '{"anyOf": [{"enum": [1, 9007199254740993]}]}'}, "9007199254740993 in enum of the schema"),
        ({"grammar": 'start: "a" %json {"const": -9223372036854775808}'}, "in const of the schema is beyond"),
        ({"json": {"multipleOf": 999_983}}, "multipleOf 999983: the least common multiple"),
        ({"json": {"multipleOf": 123.4567}}, "multipleOf 123.4567: the least common multiple"),
        ({"json": {"allOf": [{"multipleOf": p} for p in (97, 101, 103)]}}, "multipleOf .*: the least"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_too_large_formats_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**given)


def test_usual_numbers_are_allowed() -> None:
    for schema in (
        {"minimum": -(2**63), "maximum": 2**63 - 1},
        {"enum": [2**53, -(2**53), 0.5, True]},
        {
            "properties": {
                name: {"multipleOf": m} for name, m in zip("abcd", (0.01, 60, 1000, 1e-9), strict=True)
            }
        },
    ):
        StructuredOutputsParams(json=schema)


LARGEST = {
    "chain": {"grammar": chain(MAX_RULES)},
    "cycle": {"grammar": cycle(MAX_RULES)},
    "references": {"json": references(4000)},
    "nested": {"json": nested(MAX_NESTING)},
    "choices": {"choice": [f"choice {i}" for i in range(MAX_CHOICES)]},
    "regex": {"regex": "(ab?c*)" * 4000},
    "numbers": {"json": {"enum": [-(2**53), 2**53]}},
    "multiples": {"json": {"type": "integer", "multipleOf": 99_991}},
}


def test_largest_formats_compile_or_are_refused_without_a_signal() -> None:
    """Each compiles, and serves a mask, in one child process; a stack overflow would end it."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    script = """
import json, sys, llguidance
from torch_armllm.engine.structured.matcher import StructuredOutputs
from torch_armllm.engine.sampling_params import StructuredOutputsParams
outputs = StructuredOutputs(None, 257, [256])
outputs._loaded = llguidance.LLTokenizer("byte")
for name, given in json.load(sys.stdin).items():
    try:
        matcher = outputs.matcher(StructuredOutputsParams(**given))
        print(name, matcher._mask().shape[0])
    except ValueError as error:
        print(name, len(str(error)) < 600)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(LARGEST), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = dict(line.split() for line in done.stdout.splitlines())
    assert results.pop("nested") in ("257", "True")
    assert results == dict.fromkeys(
        ("chain", "cycle", "references", "choices", "regex", "numbers", "multiples"), "257"
    ), results
