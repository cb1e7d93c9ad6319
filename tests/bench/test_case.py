"""The driver of the cases, and the smallest run of cases."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import pytest

from bench import __main__ as bench
from bench.case import Row, in_rounds, parsed, run
from tests.support.tiny_server import checkpoint


def sample(
    *,
    size: int,
    names: tuple[str, ...] = ("a", "b"),
    kind: Literal["one", "two"] = "one",
    fast: Annotated[bool, "leaves out the slow part"] = False,
    even: Annotated[int | None, "an even number", lambda text: _even(int(text))] = None,
) -> Iterator[Row]:
    for name in names:
        yield {"name": name, "rate": size / 3}


def _even(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number


def test_options_are_the_parameters() -> None:
    found = parsed(sample, ["--size", "4", "--names", "x,y", "--fast", "--even", "6"])
    assert {name: found[name] for name in ("size", "names", "kind", "fast", "even")} == {
        "size": 4,
        "names": ("x", "y"),
        "kind": "one",
        "fast": True,
        "even": 6,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--size"),
        (["--size", "x"], "invalid int value"),
        (["--size", "1", "--kind", "3"], "invalid choice"),
        (["--size", "1", "--even", "3"], "argument --even: 3 is odd"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(sample, options)
    assert message in capsys.readouterr().err


def test_rows_are_lines_of_json_or_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    run(sample, ["--size", "1"])
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"name": "a", "rate": 0.33333},
        {"name": "b", "rate": 0.33333},
    ]
    run(sample, ["--size", "1", "--table"])
    assert capsys.readouterr().out.splitlines()[::2] == ["| name |  rate |", "| a    | 0.333 |"]


def test_sides_take_turns_after_a_round_that_warms_up() -> None:
    called: list[tuple[str, int]] = []

    def side(name: str) -> Callable[[int], int]:
        return lambda number: called.append((name, number)) or len(called)  # type: ignore[func-returns-value]

    assert in_rounds({"b": side("b"), "a": side("a")}, 2) == {"b": [4, 5], "a": [3, 6]}
    assert [name for name, _ in called] == ["b", "a", "a", "b", "b", "a"]


def test_cases_are_listed_and_found_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--list"])
    listed = capsys.readouterr().out
    for name in bench.cases():
        assert f"\n{name} " in listed
        with pytest.raises(SystemExit, match="0"):
            bench.main([name, "--help"])
        assert f"python -m bench {name}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is no case 'other'"):
        bench.main(["other"])


SMALLEST = {
    "encode_texts": "--shape tiny --texts 2 --rounds 1",
    "generate_rate": "--model MODEL --rows 1 --tokens 4 --rounds 1",
    "engine_stall": "--model MODEL --prompt-len 64 --chunk 64 --answers 1",
    "engine_overhead": "--model MODEL --batch 1 --steps 24 --final",
    "micro": "-k rope_table --rounds 1",
    "first_token": "--folder FOLDER --shape tiny --repeats 1",
    "parallel": "--shape tiny --rounds 1",
}
"""Options by case; every other case is run by tests of its own, or takes gigabytes."""


@pytest.mark.slow
@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize("name", SMALLEST)
def test_smallest_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = {"MODEL": checkpoint(tmp_path / "tiny"), "FOLDER": tmp_path / "random"}
    bench.main([name, *(str(places.get(option, option)) for option in SMALLEST[name].split())])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows
    for row in rows:
        assert all(value >= 0 for value in row.values() if isinstance(value, float))
