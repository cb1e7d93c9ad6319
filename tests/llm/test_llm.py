"""`LLM` with a stand-in for the engine: order, progress bar, interrupts, cleanup after errors."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast

import torch_armllm
from tests.support.stand_in import StubEngine, StubModel
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams
from torch_armllm.llm import base
from torch_armllm.llm.llm import LLM
from torch_armllm.llm.loading.loader import default_sampling_params, engine_config

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'wrong' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}{{ extra }}"
)


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    characters = {c: i for i, c in enumerate(map(chr, range(32, 127)))}
    backend = Tokenizer(models.WordLevel(characters, " "))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=backend)
    made.chat_template = template
    return made


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    def make(template: str | None = TEMPLATE, **options: Any) -> LLM:
        loaded = (StubEngine(**options), StubModel(), tokenizer(template))
        monkeypatch.setattr(base, "load_engine", lambda *a, **k: loaded)
        return LLM("none")

    return make


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_outputs_come_in_the_order_of_the_prompts(make: Callable[..., LLM]) -> None:
    llm = make(max_running=2)
    each = [SamplingParams(max_tokens=n) for n in (9, 1, 5, 3)]
    outputs = llm.generate(["ab", "cd", "ef", "gh"], each, use_tqdm=False)
    assert texts(outputs) == ["ababababa", "c", "efefe", "ghg"]
    assert all(output.finished for output in outputs)
    assert all(one.output_kind is RequestOutputKind.CUMULATIVE for one in each)  # the user's own
    assert llm.generate([], use_tqdm=False) == []


def test_kinds_of_prompts(make: Callable[..., LLM]) -> None:
    llm = make()
    for prompts, count in [
        ("ab", 1),
        (["ab"], 1),
        ([97, 98], 1),
        ([[97, 98], [97, 98]], 2),
        ({"prompt_token_ids": [97, 98]}, 1),
        (["ab", {"prompt_token_ids": [97, 98], "prompt": "ab"}, [97, 98]], 3),
    ]:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=3), use_tqdm=False)  # type: ignore[arg-type]
        assert texts(outputs) == ["aba"] * count


def test_invalid_prompt_is_named_and_all_requests_are_aborted(make: Callable[..., LLM]) -> None:
    llm = make()
    with pytest.raises(ValueError, match="prompt 2: the prompt holds no token"):
        llm.generate(["ab", "cd", [], "ef"], use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="prompt 1: .*not iterable"):
        llm.generate(["ab", None], use_tqdm=False)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="^the prompt holds no token"):
        llm.generate([[]], use_tqdm=False)
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)
    with pytest.raises(ValueError, match="priority has 3 entries for 2"):
        llm.generate(["a", "b"], priority=[1, 2, 3], use_tqdm=False)
    with pytest.raises(ValueError, match="priority has 1 entries for 2"):
        llm.chat([[{"role": "user", "content": "a"}]] * 2, priority=[1], use_tqdm=False)
    assert texts(llm.generate("ab", SamplingParams(max_tokens=2), use_tqdm=False)) == ["ab"]


def test_failed_step_aborts_all_requests(make: Callable[..., LLM]) -> None:
    llm = make()
    llm.llm_engine.fail_at = 3
    with pytest.raises(RuntimeError, match="out of order"):
        llm.generate(["ab", "cd"], SamplingParams(max_tokens=9), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert texts(llm.generate("ab", SamplingParams(max_tokens=2), use_tqdm=False)) == ["ab"]


@pytest.mark.usefixtures("sigint_enabled")
def test_ctrl_c_takes_effect_between_steps(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    engine = llm.llm_engine
    step = engine.step
    whole: list[int] = []

    def interrupted() -> Any:
        if engine.steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        outputs = step()
        whole.append(engine.steps)
        return outputs

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["ab", "cd"], SamplingParams(max_tokens=100), use_tqdm=False)
    assert whole == [1, 2, 3, 4]
    assert not engine.has_unfinished_requests()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine.steps = 100
    assert texts(llm.generate("ab", SamplingParams(max_tokens=2), use_tqdm=False)) == ["ab"]


def test_thread_may_generate(make: Callable[..., LLM]) -> None:
    llm, found = make(), []
    thread = threading.Thread(
        target=lambda: found.extend(llm.generate("ab", SamplingParams(max_tokens=2), use_tqdm=False))
    )
    thread.start()
    thread.join()
    assert texts(found) == ["ab"]


def test_bar_counts_prompts_and_shows_rates(
    make: Callable[..., LLM], capsys: pytest.CaptureFixture[str]
) -> None:
    make(seconds=0.01).generate(["ab", "cd"], SamplingParams(max_tokens=3), use_tqdm=tqdm)
    told = capsys.readouterr().err
    assert "Processed prompts: 100%" in told
    assert "2/2" in told
    assert "est. speed input: " in told
    assert " toks/s, output: " in told
    for use_tqdm in (False, True):  # this standard error is no terminal
        make().generate(["ab", "cd"], SamplingParams(max_tokens=3), use_tqdm=use_tqdm)
        assert not capsys.readouterr().err


def test_stream_yields_every_step_and_aborts_when_closed(make: Callable[..., LLM]) -> None:
    llm = make()
    assert texts(list(llm.stream("ab", SamplingParams(max_tokens=3)))) == ["a", "ab", "aba"]
    stream = llm.stream("ab", SamplingParams(max_tokens=10**9))
    next(stream)
    with pytest.raises(ValueError, match="already generating"):
        llm.generate("cd", use_tqdm=False)
    assert llm.llm_engine.has_unfinished_requests()
    stream.close()  # type: ignore[attr-defined]
    assert not llm.llm_engine.has_unfinished_requests()


def prompt(llm: LLM, messages: Any, **options: Any) -> list[str | None]:
    return [o.prompt for o in llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, **options)]


def test_conversations_are_rendered_by_the_template(make: Callable[..., LLM]) -> None:
    llm = make()
    one = [{"role": "user", "content": "Hi"}]
    other = [*one, {"role": "assistant", "content": "Yes"}]
    assert prompt(llm, one) == ["<user>Hi<answer>"]
    assert prompt(llm, [one, other]) == ["<user>Hi<answer>", "<user>Hi<assistant>Yes<answer>"]
    assert prompt(llm, other, add_generation_prompt=False) == ["<user>Hi<assistant>Yes"]
    assert prompt(llm, one, chat_template="{{ messages[0].content }}") == ["Hi"]
    assert prompt(llm, one, chat_template_kwargs={"extra": "!"}) == ["<user>Hi<answer>!"]
    continued = prompt(llm, other, continue_final_message=True, add_generation_prompt=False)
    assert continued == ["<user>Hi<assistant>Yes"]
    (output,) = llm.chat(one, SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids == [ord(c) - 32 for c in "<user>Hi<answer>"]


def test_contents_have_the_form_of_the_template(make: Callable[..., LLM]) -> None:
    llm = make()
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    loops = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"
    assert prompt(llm, parts) == ["<user>a\nb<answer>"]
    assert prompt(llm, parts, chat_template=loops) == ["[a][b]"]
    assert prompt(llm, [{"role": "user", "content": "a"}], chat_template=loops) == ["[a]"]
    lines = prompt(llm, parts, chat_template_content_format="string")
    assert lines == ["<user>a\nb<answer>"]
    with pytest.raises(ValueError) as refused:
        prompt(llm, parts, chat_template_content_format="parts")
    assert str(refused.value) == "chat_template_content_format is 'parts'; give auto, string or openai"


def test_conversations_that_the_template_rejects(make: Callable[..., LLM]) -> None:
    llm = make()
    good, bad = [{"role": "user", "content": "Hi"}], [{"role": "wrong", "content": "Hi"}]
    with pytest.raises(ValueError, match="conversation 1: the chat template refuses .*no such role"):
        llm.chat([good, bad], use_tqdm=False)
    with pytest.raises(ValueError, match="has no chat template; give chat_template"):
        make(template=None).chat(good, use_tqdm=False)


def test_default_params_come_from_the_generation_config() -> None:
    found = default_sampling_params(GenerationConfig(temperature=0.6, top_p=0.9, eos_token_id=2))
    assert (found.temperature, found.top_p, found.top_k, found.max_tokens) == (0.6, 0.9, 0, 16)
    assert default_sampling_params(GenerationConfig(max_new_tokens=99)).max_tokens == 99
    assert default_sampling_params(None).temperature == 1.0


def test_settings_by_name() -> None:
    assert engine_config({"max_num_seqs": 3}).max_num_seqs == 3
    with pytest.raises(ValueError, match=r"^unknown setting 'max_num_seq' \(did you mean max_num_seqs\?\); "):
        engine_config({"max_num_seq": 3})


def test_public_names() -> None:
    assert torch_armllm.LLM is LLM
    assert torch_armllm.SamplingParams is SamplingParams
    assert torch_armllm.AsyncLLM.__name__ == "AsyncLLM"
    assert torch_armllm.RequestOutput.__name__ == "RequestOutput"
