"""The project's own lint: order of imports and of C++ includes, docstring openers, line lengths."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

LINT = Path(__file__).resolve().parents[2] / ".ci" / "lint"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, LINT / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A package of two clean modules, ``engine.step`` above ``quant.layers``."""
    for folder in ("ops", "passes", "torch_armllm/engine", "torch_armllm/quant"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "torch_armllm/quant/layers.py").write_text('"""Layers."""\n')
    (tmp_path / "torch_armllm/engine/step.py").write_text("from torch_armllm.quant import layers\n")
    return tmp_path


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("", None),
        ("from torch_armllm.engine.step import x\n", "1 upward, 1 circles"),
        ("def f():\n    import torch_armllm.engine.step\n", "1 upward, 1 circles, 1 inside functions"),
        ("if TYPE_CHECKING:\n    from torch_armllm.engine import step\n", "1 upward, 1 circles"),
    ],
)
def test_imports_against_layer_order_are_reported(
    checkout: Path, capsys: pytest.CaptureFixture[str], code: str, complaint: str | None
) -> None:
    (checkout / "torch_armllm/quant/layers.py").write_text(code)
    status = script("imports").main(["--root", str(checkout)])
    printed = capsys.readouterr().out
    assert status == (complaint is not None)
    assert (complaint or "0 upward, 0 circles, 0 inside functions") in printed


def test_imports_of_siblings_and_modules_without_a_layer_are_reported(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "torch_armllm/transformers_plugin").mkdir()
    (checkout / "torch_armllm/transformers_plugin/a.py").write_text("import torch_armllm.engine.step\n")
    assert script("imports").main(["--root", str(checkout)]) == 1
    assert "a.py:1: upward: torch_armllm.engine.step" in capsys.readouterr().out
    (checkout / "torch_armllm/other.py").write_text("")
    assert script("imports").main(["--root", str(checkout)]) == 1
    assert "without a layer in pyproject.toml: other" in capsys.readouterr().out


def test_import_cycle_within_a_layer_is_reported(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "torch_armllm/quant/layers.py").write_text("import torch_armllm.quant.recipe\n")
    (checkout / "torch_armllm/quant/recipe.py").write_text("from torch_armllm.quant.layers import x\n")
    assert script("imports").main(["--root", str(checkout)]) == 1
    assert "circle of 2: torch_armllm.quant.layers, torch_armllm.quant.recipe" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("header", "include", "complaint"),
    [
        ("moe/moe.h", "linear/linear.h", None),
        ("moe/moe.h", "group.h", None),
        (
            "moe/moe.h",
            "attention/attention.h",
            "ops/moe/moe.h includes attention/attention.h: attention is not",
        ),
        ("linear/linear.h", "moe/moe.h", "ops/linear/linear.h includes moe/moe.h: moe is not below linear"),
        ("moe/group.h", "moe/group.h", "circle: moe/group.h -> moe/group.h"),
        ("quilt/a.h", "a.h", "the folder 'quilt' has no row"),
    ],
)
def test_includes_against_the_order_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], header: str, include: str, complaint: str | None
) -> None:
    for name in ("moe/moe.h", "moe/group.h", "linear/linear.h", "attention/attention.h", header):
        (tmp_path / "ops" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "ops" / name).write_text(f'#include "{include}"\n' if name == header else "")
    assert script("includes").main([str(tmp_path)]) == (complaint is not None)
    assert (complaint or "1 includes: 0 against the order") in capsys.readouterr().out


def test_checkout_has_no_import_violations(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("imports").main([]) == 0, capsys.readouterr().out
    assert script("includes").main([]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "breach"),
    [
        ("a.py", '"""What this is."""\n', "1: docstring opens with 'What'"),
        ("a.py", 'x = 1\n"""Whether it is set."""\n', "2: docstring opens with 'Whether'"),
        ("a.py", '"""Whatever fits."""\n', None),
        ("a.py", '"""Layers of a model."""\n', None),
        ("a.md", "word " * 30 + "\n", "1: 150 characters, at most 110"),
        ("a.md", "| " + "word " * 30 + "|\n", None),
        ("a.md", "```\n" + "word " * 30 + "\n```\n", None),
        ("a.h", "// " + "word " * 30 + "\n", "1: 153 characters, at most 110"),
        ("a.sh", "run " + "word " * 30 + "\n", None),
        ("a.sh", "# " + "word " * 30 + "\n", "1: 152 characters, at most 110"),
    ],
)
def test_prose_rules_are_checked(tmp_path: Path, name: str, text: str, breach: str | None) -> None:
    (tmp_path / name).write_text(text)
    assert list(script("prose").breaches(tmp_path / name)) == ([breach] if breach else [])


def test_what_makes_changes_long_is_counted(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def counts(code: str) -> dict[str, int]:
        (checkout / "torch_armllm/quant/layers.py").write_text(code)
        script("sizes").main(["--root", str(checkout)])
        rows = [
            line.split(maxsplit=5) for line in capsys.readouterr().out.splitlines() if " of at most " in line
        ]
        return {row[5]: int(row[0]) for row in rows if row[0] != "0"}

    assert counts("def f(a, b, c, d, e, f, g): ...\n") == {}
    assert counts("class A:\n    def f(self, a, b, c, d, e, f, g): ...\n") == {}
    eight, twelve = "functions of 8 and more parameters", "functions of 12 and more parameters"
    assert counts("def f(a, b, c, d, e, f, g, *, h=1): ...\n") == {eight: 1}
    assert counts("async def f(a, b, c, d, e, f, g, h, i, j, k, l): ...\n") == {eight: 1, twelve: 1}
    stars = "calls that pass a tuple of 3 and more by star"
    assert counts("f(*(1, 2))\nf(*a, *(1, 2, 3))\n") == {stars: 1}
    assert counts("node.args[1]\nargs[1]\n") == {"arguments of a graph's node by number": 1}
    forks = "isinstance of a kind of plan, runner, model or engine"
    assert counts("isinstance(a, int)\nisinstance(a, (str, NativePlan))\n") == {forks: 1}


def test_a_figure_above_its_limit_fails(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("sizes").main(["--root", str(checkout)]) == 0
    (checkout / "torch_armllm/quant/layers.py").write_text("f(*(1, 2, 3))\n")
    assert script("sizes").main(["--root", str(checkout)]) == 1
    assert "a figure is above its limit" in capsys.readouterr().out
    script("sizes").main(["--root", str(checkout), "--list", "tuples"])
    assert capsys.readouterr().out == "torch_armllm/quant/layers.py:1\n"
