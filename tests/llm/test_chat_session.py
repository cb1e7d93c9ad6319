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
from tests.support.stand_in import StubEngine, StubModel
from torch_armllm.cli.chat import _shown
from torch_armllm.cli.main import main
from torch_armllm.engine.outputs import CompletionOutput, RequestOutput
from torch_armllm.engine.sampling_params import SamplingParams
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
    loaded = (StubEngine(), StubModel(), tokenizer())
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
    assert len(pieces) >= 3
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[-1]["content"] == "".join(piece.content for piece in pieces)
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


def test_images_go_with_the_next_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL", reason="needs the extra vision")
    from tests.support.picture_folders import picture, picture_folder

    folder = picture_folder(tmp_path / "model", "llava")
    for number in range(2):
        picture(number).save(tmp_path / f"{number}.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "1.png").read_bytes()[:2000])
    (tmp_path / "note.png").write_text("no image")
    monkeypatch.chdir(tmp_path)
    asked: list[Any] = []
    stream = LLM.stream
    monkeypatch.setattr(
        LLM, "stream", lambda self, prompt, *a: asked.append(prompt) or stream(self, prompt, *a)
    )
    say(
        monkeypatch,
        *("/image 0.png", "what is this", "/audio 0.png", "and this"),
        *("/image 1.png", "/image 0.png", ""),
        *("/image note.png", "/image cut.png", "and", "/image 1.png", "/clear", "what"),
    )
    command = ["chat", str(folder), "--temperature", "0", "--max-tokens", "2", "--quantization", "none"]
    assert main([*command, "--kv-cache-memory", "8M"]) == 0
    told = capsys.readouterr().out
    held = [len(prompt.get("multi_modal_data", {}).get("image", ())) for prompt in asked]
    assert held == [1, 1, 3, 0]
    assert [prompt["prompt"].count("<image>") for prompt in asked] == held
    assert "(0.png goes with the next message)" in told and "/image FILE adds an image" in told
    assert "note.png: an image cannot be read" in told and "(note.png" not in told
    assert "this model takes no audio, only text and image" in told
    assert "an image is damaged" in told and "; /clear starts a new conversation" in told
    assert told.count("\n[") == 4


def test_sounds_go_with_the_next_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    soundfile = pytest.importorskip("soundfile", reason="needs the extra audio")
    pytest.importorskip("soxr", reason="needs the extra audio")
    from tests.support.sound_folders import sound, sound_folder

    folder = sound_folder(tmp_path / "model")
    for name, rate in (("a.flac", 16_000), ("b.wav", 8_000)):
        soundfile.write(tmp_path / name, sound(len(name), rate=rate), rate)
    (tmp_path / "cut.wav").write_bytes((tmp_path / "b.wav").read_bytes()[:20])
    monkeypatch.chdir(tmp_path)
    asked: list[Any] = []
    stream = LLM.stream
    monkeypatch.setattr(
        LLM, "stream", lambda self, prompt, *a: asked.append(prompt) or stream(self, prompt, *a)
    )
    say(monkeypatch, "/audio a.flac", "/audio b.wav", "what is said", "/image a.flac", "/audio cut.wav")
    command = ["chat", str(folder), "--temperature", "0", "--max-tokens", "2", "--quantization", "none"]
    assert main([*command, "--kv-cache-memory", "8M"]) == 0
    told = capsys.readouterr().out
    (prompt,) = asked
    assert [len(samples) for samples in prompt["multi_modal_data"]["audio"]] == [16_000, 16_000]
    assert prompt["prompt"].count("<|AUDIO|>") == 2
    assert "this model takes no image, only text and audio" in told and "/audio FILE adds an audio" in told
    assert "cut.wav: " in told and "(cut.wav" not in told


THINKS = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}OPENED{% endif %}"
)


def scripted(llm: LLM, monkeypatch: pytest.MonkeyPatch, reply: str) -> list[str]:
    """Has the model write a reply, a character a step; returns the prompts that it gets."""
    prompts: list[str] = []

    def stream(prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        prompts.append(prompt["prompt"])
        for at, letter in enumerate(reply):
            last = at + 1 == len(reply)
            piece = CompletionOutput(0, letter, [1], finish_reason="stop" if last else None)
            yield RequestOutput("r", prompt["prompt"], [1], None, [piece], last)

    monkeypatch.setattr(llm, "stream", stream)
    return prompts


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_dimmed_and_remembered_apart(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    """However the reply arrives; only the text within the escapes is dimmed."""
    begun = "<think>\n" if opened else ""
    llm.get_tokenizer().chat_template = THINKS.replace("OPENED", begun)
    prompts = scripted(llm, monkeypatch, ("" if opened else "<think>\n") + "why\n</think>\n\nso it is")
    chat = ChatSession(llm, SamplingParams())
    shown = "".join(_shown(chat, "hi", True))
    assert shown.replace("\033[0m\033[2m", "") == "\033[2mwhy\033[0m\n\nso it is"
    assert "".join(_shown(chat, "ho", False)) == "why\n\nso it is"
    assert chat.messages[1] == {"role": "assistant", "content": "so it is", "reasoning": "why"}
    assert prompts == [f"hi;{begun}", f"hi;<think>why</think>so it is;ho;{begun}"]


HARMONY = (
    "{%- for m in messages %}<|start|>{{ m.role }}"
    "{%- if m.role == 'assistant' %}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "<|start|>assistant{% endif %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_channels_are_no_part_of_the_reply(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.get_tokenizer().chat_template = HARMONY
    thought = "<|channel|>analysis<|message|>User greets.<|end|>"
    scripted(llm, monkeypatch, f"{thought}<|start|>assistant<|channel|>final<|message|>Hello!")
    chat = ChatSession(llm, SamplingParams())
    assert "".join(_shown(chat, "hi", False)) == "User greets.\n\nHello!"
    assert chat.messages[1]["content"] == "Hello!"
