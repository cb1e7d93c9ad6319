"""Chat sessions in the terminal, with a tiny model and with an interruptible stand-in."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.llm.test_llm import tokenizer
from tests.support.models import tiny
from tests.support.stand_in import StubEngine
from torch_armllm.cli.chat import _dimmed
from torch_armllm.cli.main import main
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.text.reasoning_tags import REASONING_PARSERS
from torch_armllm.llm import base
from torch_armllm.llm.chat_session import ChatSession, TurnStats
from torch_armllm.llm.llm import LLM


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    tiny("llama").save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    loaded = (StubEngine(), None, tokenizer())
    monkeypatch.setattr(base, "load_engine", lambda *a, **k: loaded)
    return LLM("none")


def say(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    said = iter(lines)

    def read(prompt: str) -> str:
        line = next(said, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def test_messages_accumulate(llm: LLM) -> None:
    chat = ChatSession(llm, SamplingParams(max_tokens=3), system="Be")
    pieces = list(chat.ask("Hi"))
    assert len(pieces) == 3
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[-1]["content"] == "".join(pieces)
    assert (chat.last_turn.tokens, chat.last_turn.reason) == (3, "length")
    list(chat.ask("Ho"))
    assert len(chat.messages) == 5
    chat.clear()
    assert chat.messages == [{"role": "system", "content": "Be"}]


def test_messages_without_a_reply_are_dropped(llm: LLM) -> None:
    chat = ChatSession(llm, SamplingParams(max_tokens=3))
    llm.get_tokenizer().chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        list(chat.ask("Hi"))
    assert chat.messages == []


def test_turn_statistics_as_text() -> None:
    turn = TurnStats(prompt_tokens=40, cached_tokens=32, tokens=11, first=0.5, spent=2.0, reason="stop")
    assert str(turn) == "11 tokens, 5.0 tok/s, the first after 0.50 s; prompt 40 tokens, 32 of them cached"
    assert str(TurnStats(reason="abort")) == "0 tokens; prompt 0 tokens, 0 of them cached; stopped"


@pytest.mark.usefixtures("sigint_enabled")
def test_ctrl_c_stops_the_reply_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine: Any = llm.llm_engine
    step = engine.step

    def interrupted() -> Any:
        if engine.steps == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    say(monkeypatch, "Hi", KeyboardInterrupt, "Ho", "/exit")
    assert main(["chat", "none", "--max-tokens", "8"]) == 0
    told = capsys.readouterr().out
    assert "[4 tokens" in told
    assert "; stopped]" in told
    assert "(/clear starts" in told  # Ctrl-C without a running reply
    assert "[8 tokens" in told
    assert not engine.has_unfinished_requests()


def test_chat_with_a_model(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["chat", str(checkpoint), "--temperature", "0", "--max-tokens", "8", "--system", "Be " * 20]
    command += ["--max-model-len", "256"]
    say(monkeypatch, "Hi", "", "Tell me more of it, please", "/nonsense", "/clear", "x" * 300, "Hi")
    assert main(command) == 0
    told = capsys.readouterr().out
    turns = [line for line in told.splitlines() if line.startswith("[")]
    assert len(turns) == 3
    assert "prompt 84 tokens, 0 of them cached" in turns[0]
    assert "64 of them cached" in turns[1]  # all whole blocks of the first turn's prompt
    assert "64 of them cached" in turns[2]
    assert "max_model_len is 256" in told
    assert "/clear starts a new conversation" in told
    assert told.count("/exit or Ctrl-D") == 2


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_dimmed(opened: bool) -> None:
    """However the reply arrives; only the text within the escapes is dimmed."""

    class Session:
        prompt = ""

        def ask(self, text: str) -> Iterator[str]:
            self.prompt = "<think>\n" if opened else ""
            yield from ("" if opened else "<think>\n") + "why\n</think>\n\nso </think>"

    session: Any = Session()
    shown = "".join(_dimmed(session, "hi", REASONING_PARSERS["qwen3"]))
    assert shown.replace("\033[0m\033[2m", "") == "\033[2mwhy\033[0m\n\nso </think>"
    assert session.prompt == ("<think>\n" if opened else "")
