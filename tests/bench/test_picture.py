"""The picture of KL over bits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.case import run
from bench.quality import picture
from bench.quality.labels import RADIUS, Rectangle, placed
from bench.quality.results import Results, Row
from torch_armllm.evaluation.paired_tests import Estimate

pytest.importorskip("matplotlib", reason="needs the extra bench")


def _row(name: str, series: str, bits: float | None, kl: float, stderr: float = 0.001) -> Row:
    one = Estimate(1.0, 0.1)
    return Row(name, series, bits, None, Estimate(kl, stderr), one, one, one)


def _results(model: str, *rows: Row) -> Results:
    return Results(model, 2, 48, 3, rows=[_row("floats", "floats", 32, 0.0), *rows])


ROWS = (
    _row("g32i, gptq", "ours, gptq", 4.3, 0.04),
    _row("g32i, gptq, floats", "ours, gptq, floats", None, 0.03),
    _row("Q4_K_M, padded, imatrix", "llama.cpp, imatrix", 4.7, 0.041, math.nan),
    _row("Q4_0", "llama.cpp", 4.5, 0.1),
)


def test_quantized_rows_with_bits_are_drawn() -> None:
    again, wide = _row("Q4_0", "llama.cpp", 4.5, 0.2), _row("wide", "llama.cpp", 32.0, 0.0)
    drawn = picture.drawn([*_results("tiny", *ROWS).rows, wide, again])
    assert [row.name for row in drawn] == ["g32i, gptq", "Q4_K_M, padded, imatrix", "Q4_0"]
    assert drawn[-1] is again  # measured again


def test_picture_names_models_formats_and_series(tmp_path: Path) -> None:
    new = _row("g32i, new", "ours, new", 4.3, 0.03)
    tiny = [_results("tiny", ROWS[0], _row("Q4_0", "llama.cpp", 4.5, 0.2)), _results("tiny", *ROWS[1:])]
    results = [tiny[0], _results("large", ROWS[0], new), tiny[1]]
    picture.draw(results, tmp_path / "kl.svg")
    text = (tmp_path / "kl.svg").read_text()
    for name in (
        "tiny",
        "large",
        "g32i",
        "Q4_K_M",
        "Q4_0",
        *{row.series for row in (*picture.drawn(ROWS), new)},
    ):
        assert f">{name}</text>" in text
    assert text.count(">g32i</text>") == 3 and text.count(">Q4_0</text>") == 1
    assert text.count(">tiny</text>") == 1  # both files in one panel
    assert "torchao" not in text
    assert "fill: #ffffff" in text  # readable on dark pages
    picture.draw(results, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text


def test_names_near_each_other_do_not_overlap() -> None:
    panel = Rectangle(0, 0, 200, 100)
    points = [(100.0, 50.0), (103.0, 52.0), (100.0, 60.0), (195.0, 50.0), (4.0, 95.0)]
    names = placed(points, [30.0, 25.0, 40.0, 30.0, 20.0], panel)
    markers = [Rectangle.around(x, y, 2 * RADIUS, 2 * RADIUS) for x, y in points]
    for i, name in enumerate(names):
        assert panel.holds(name)
        assert not any(name.overlaps(marker) for marker in markers)
        assert not any(name.overlaps(other) for other in names[:i])
    assert names[3].x1 < points[3][0] and names[4].x0 > points[4][0]  # turned inward, at the edges


def test_names_without_room_stay_beside_their_points() -> None:
    (name,) = placed([(5.0, 5.0)], [30.0], Rectangle(0, 0, 10, 10))
    assert name.x0 > 5 and (name.y0 + name.y1) / 2 == 5


def test_results_without_points_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        picture.draw([_results("tiny", ROWS[1])], tmp_path / "kl.svg")


def test_command_draws_files(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(_results("tiny", *ROWS).to_dict()))
    out = tmp_path / "kl.svg"
    run(picture.picture, ["--files", str(tmp_path / "rows.json"), "--out", str(out)])
    assert ">Q4_K_M</text>" in out.read_text()
