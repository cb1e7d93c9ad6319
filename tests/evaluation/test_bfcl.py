"""Tasks of the Berkeley Function Calling Leaderboard: prompts, calls, BFCL's checker and the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_server import TEMPLATE, tokenizer
from torch_armllm.cli.main import main
from torch_armllm.evaluation import bfcl, bfcl_checker
from torch_armllm.evaluation.bfcl_checker import is_right
from torch_armllm.evaluation.bfcl_rows import BfclRow, read_rows
from torch_armllm.evaluation.tool_chat import ToolChat

ROW = BfclRow(
    "simple_python_0",
    [{"role": "user", "content": "How long is it?"}],
    [
        {
            "name": "math.hypot",
            "description": "The hypotenuse.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "x": {"type": "float"},
                    "type": {"type": "any"},
                    "path": {"type": "tuple", "items": {"type": "float"}},
                },
                "required": ["x"],
            },
        }
    ],
    [{"math.hypot": {"x": [4.0, 5.0], "type": ["", "flat"], "path": ["", [1.0, 2.0]]}}],
)
CALL = '<tool_call>{"name": "math_hypot", "arguments": {"x": 4}}</tool_call>'


def _write(folder: Path, category: str, count: int = 1) -> Path:
    row = {"id": "0", "messages": ROW.messages, "functions": ROW.functions, "ground_truth": ROW.answers}
    (folder / "data").mkdir(exist_ok=True)
    file = folder / "data" / f"bfcl_{category}.jsonl"
    file.write_text("\n".join(json.dumps({**row, "id": str(n)}) for n in range(count)))
    return folder


def test_functions_become_tools_with_types_of_json_schema() -> None:
    (tool,) = ROW.tools
    assert tool["type"] == "function" and tool["function"]["name"] == "math_hypot"
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "x": {"type": "number"},
            "type": {},
            "path": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["x"],
    }


def test_rows_are_found_beside_a_folder_of_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(read_rows("multiple", [_write(tmp_path, "multiple", 3) / "tasks"])) == 3
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    monkeypatch.setattr(bfcl_checker, "is_installed", lambda _: False)
    with pytest.raises(ImportError, match="pip install --no-deps bfcl-eval"):
        bfcl.load_bfcl(["irrelevance", "parallel"], tokenizer())


def test_prompts_show_tools_and_answers_hold_calls() -> None:
    chat = ToolChat(tokenizer())
    prompt = chat.prompt(ROW.messages, ROW.tools)
    assert prompt == "tools:math_hypot;<|user|>How long is it?<|assistant|>"
    assert chat.calls(prompt, f"It is.{CALL}{CALL}", ROW.tools) == [{"math_hypot": {"x": 4}}] * 2
    assert chat.calls(prompt, "I do not know.", ROW.tools) == []
    assert chat.calls(prompt, CALL[:50], ROW.tools) is None


def test_templates_without_tools_are_refused() -> None:
    plain = tokenizer()
    plain.chat_template = TEMPLATE.replace("tools", "others").replace("tool_calls", "none")
    with pytest.raises(ValueError, match="shows no tools"):
        ToolChat(plain)
    plain.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        ToolChat(plain)


def test_no_call_is_right_where_none_applies() -> None:
    assert is_right("irrelevance", ROW, []) and not is_right("irrelevance", ROW, [{"math_hypot": {}}])


def test_checker_takes_the_calls_that_bfcl_takes() -> None:
    pytest.importorskip("bfcl_eval", reason="needs pip install --no-deps bfcl-eval")
    right = [{"math_hypot": {"x": 4}}]
    assert is_right("simple_python", ROW, right) and is_right("multiple", ROW, right)
    assert is_right("simple_python", ROW, [{"math_hypot": {"x": 4.0, "type": "Flat", "path": [1.0, 2.0]}}])
    for wrong in ({"x": 6}, {"x": "4"}, {}, {"x": 4, "more": 1}, {"x": 4, "type": {"a": 1}}):
        assert not is_right("simple_python", ROW, [{"math_hypot": wrong}])
    assert not is_right("simple_python", ROW, [{"math.hypot": {"x": 4}}])  # the model was told math_hypot
    assert not is_right("simple_python", ROW, right * 2) and not is_right("simple_python", ROW, [])
    both = BfclRow(ROW.id, ROW.messages, ROW.functions, [{"math.hypot": {"x": [n]}} for n in (4.0, 5.0)])
    assert is_right("parallel", both, [{"math_hypot": {"x": 5.0}}, {"math_hypot": {"x": 4.0}}])
    assert not is_right("parallel", both, right * 2)


def test_command_compares_schemes(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bfcl, "_MAX_TOKENS", 8)
    answers: list[str] = []
    calls = ToolChat.calls

    def watched(self: ToolChat, prompt: str, answer: str, tools: list[dict[str, Any]]) -> Any:
        answers.append(answer)
        return calls(self, prompt, answer, tools)

    monkeypatch.setattr(ToolChat, "calls", watched)
    options = ["--include-path", str(_write(tmp_path, "irrelevance", 3)), "--quantization", "bf16-fused,int4"]
    command = ["eval", str(tiny_folder), "--tasks", "bfcl_irrelevance", "--limit", "2", "--max-length", "512"]
    assert main([*command, *options, "--apply-chat-template", "--num-fewshot", "3"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines() if "bfcl_irrelevance" in line]
    assert [line[:5] for line in table] == [
        ["bfcl_irrelevance", "2", "acc", scheme, "1.0000"] for scheme in ("bf16-fused", "int4")
    ]
    assert len(answers) == 4 and all(answers)
