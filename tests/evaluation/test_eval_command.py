"""``torch-armllm eval`` end to end on a tiny model."""

from __future__ import annotations

import errno
import json
from functools import partial
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest

from torch_armllm.checkpoint.load import load_tokenizer
from torch_armllm.cli.main import main
from torch_armllm.evaluation import run
from torch_armllm.evaluation.loading import load_variant
from torch_armllm.evaluation.variant import Variant
from torch_armllm.llm import calibration_text
from torch_armllm.system import extras


def _eval(folder: Path, tasks: Path, *more: str, names: str = "own_choice,own_letters,own_text") -> int:
    return main(
        ["eval", str(folder), "--include-path", str(tasks), "--tasks", names, "--dtype", "float32", *more]
    )


def test_command_writes_table_page_file_and_plot(
    tiny_folder: Path,
    own_tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # the tasks' data are found from anywhere
    files = [f"--{kind}=out.{kind}" for kind in ("json", "markdown")] + ["--plot=out.png"]
    assert _eval(tiny_folder, own_tasks, "--quantization", "f32,int4-row,int4-g32i", *files) == 0
    out = capsys.readouterr().out
    assert "own_choice" in out and "KL divergence" in out and Path("out.png").stat().st_size > 1000
    assert "| own_letters | 10 | acc | int4-row |" in Path("out.markdown").read_text()
    found = json.loads(Path("out.json").read_text())
    lines = {(line["task"], line["metric"], line["scheme"]): line for line in found["table"]}
    assert set(found["schemes"]) == {"f32", "int4-row", "int4-g32i"}
    for scheme in ("int4-row", "int4-g32i"):
        words = lines["own_text", "word_perplexity", scheme]
        assert words["kl"] > 0 and words["change"] > 0 and 0 < words["agreement"] <= 1
        choice = lines["own_choice", "acc", scheme]
        assert choice["moved"] > 0 and choice["p"] is not None and choice["rows"] == 10
    assert found["schemes"]["f32"]["bits"] == 32 and found["schemes"]["int4-row"]["bits"] < 8
    assert not Path("out.logits").exists()


def test_interrupted_run_resumes(
    tiny_folder: Path, own_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = f"--json={tmp_path / 'out.json'}"
    asked: list[str] = []
    own = run._evaluate

    def evaluate(lm: Any, task: Any, options: Any) -> dict[str, Any]:
        asked.append(task.config.task)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return own(lm, task, options)

    limit = ("--limit", "4", "--quantization", "f32,int4-g32i")
    names = "own_text,own_letters"
    assert _eval(tiny_folder, own_tasks, file, *limit, names=names) == 0
    whole = json.loads((tmp_path / "out.json").read_text())["table"]
    (tmp_path / "out.json").unlink()
    monkeypatch.setattr(run, "_evaluate", evaluate)
    assert _eval(tiny_folder, own_tasks, file, *limit, names=names) == 130
    assert _eval(tiny_folder, own_tasks, file, *limit, names=names) == 0
    assert asked == ["own_text", "own_letters", "own_text", "own_text", "own_letters"]
    assert json.loads((tmp_path / "out.json").read_text())["table"] == whole


def test_texts_are_compared_once_the_baseline_succeeds(
    tiny_folder: Path, own_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = ("--limit", "2", "--quantization", "f32,int4-g32i")
    assert _eval(tiny_folder, own_tasks, f"--json={tmp_path / 'whole.json'}", *limit, names="own_text") == 0
    own = run.load_variant

    def load(source: str, scheme: Any, *more: Any) -> Any:
        if scheme.name == "f32":
            raise RuntimeError("no room")
        return own(source, scheme, *more)

    with monkeypatch.context() as patch:
        patch.setattr(run, "load_variant", load)
        assert _eval(tiny_folder, own_tasks, f"--json={tmp_path / 'out.json'}", *limit, names="own_text") == 2
    assert _eval(tiny_folder, own_tasks, f"--json={tmp_path / 'out.json'}", *limit, names="own_text") == 0
    tables = [json.loads((tmp_path / name).read_text())["table"] for name in ("whole.json", "out.json")]
    assert tables[0] == tables[1] and tables[0][-1]["kl"] > 0


def test_texts_of_a_further_scheme_are_compared_with_an_earlier_baseline(
    tiny_folder: Path, own_tasks: Path, tmp_path: Path
) -> None:
    limit = ("--limit", "2", "--quantization")
    file = f"--json={tmp_path / 'out.json'}"
    whole = f"--json={tmp_path / 'whole.json'}"
    assert _eval(tiny_folder, own_tasks, whole, *limit, "f32,int4-g32i,int4-row", names="own_text") == 0
    assert _eval(tiny_folder, own_tasks, file, *limit, "f32,int4-g32i", names="own_text") == 0
    assert _eval(tiny_folder, own_tasks, file, *limit, "f32,int4-g32i,int4-row", names="own_text") == 0
    tables = [json.loads((tmp_path / name).read_text())["table"] for name in ("whole.json", "out.json")]
    assert tables[0] == tables[1]
    kl = [line["kl"] for line in tables[1] if line["metric"] == "word_perplexity"]
    assert len(kl) == 3 and kl[0] is None and min(kl[1:]) > 0


def test_full_disk_ends_the_run(
    tiny_folder: Path,
    own_tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run.BaselineLogits, "add", full)
    file = f"--json={tmp_path / 'out.json'}"
    assert _eval(tiny_folder, own_tasks, file, "--quantization", "f32,int4-g32i", names="own_text") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_results_of_other_settings_are_rejected(
    tiny_folder: Path, own_tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = f"--json={tmp_path / 'out.json'}"
    arguments = (file, "--quantization", "f32")
    assert _eval(tiny_folder, own_tasks, *arguments, "--limit", "2", names="own_letters") == 0
    assert _eval(tiny_folder, own_tasks, *arguments, "--limit", "3", names="own_letters") == 2
    assert "limit: 2 before, 3 now" in capsys.readouterr().err


def test_methods_calibrate_with_generated_tokens_by_default(
    tiny_folder: Path, own_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_text, "SEQUENCES", 4)
    monkeypatch.setattr(calibration_text, "LENGTH", 24)
    file = tmp_path / "out.json"
    schemes = ("--quantization", "f32,int4-g32i+gptq,int4-g32i+rtn", "--limit", "2", f"--json={file}")
    assert _eval(tiny_folder, own_tasks, *schemes, names="own_text") == 0
    found = json.loads(file.read_text())["table"]
    kl = {line["scheme"]: line["kl"] for line in found if line["kl"] is not None}
    assert 0 < kl["int4-g32i+gptq"] != kl["int4-g32i+rtn"]


def test_failed_variant_does_not_stop_the_others(
    tiny_folder: Path, own_tasks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = run.load_variant

    def load(source: str, scheme: Any, *more: Any) -> Any:
        if scheme.name == "int4-row":
            raise RuntimeError("no room")
        return own(source, scheme, *more)

    monkeypatch.setattr(run, "load_variant", load)
    schemes = ("--quantization", "f32,int4-row,int4-g32i", "--limit", "2")
    assert _eval(tiny_folder, own_tasks, *schemes, names="own_letters") == 2
    said = capsys.readouterr()
    assert "int4-row failed" in said.err and "RuntimeError: no room" in said.out
    assert sum("int4-g32i" in line for line in said.out.splitlines()) == 3  # its size, and two metrics


@pytest.mark.parametrize(
    "more,names,wanted",
    [
        (("--quantization", "bf16,int9"), "own_text", "int9"),
        ((), "own_txt", "own_text"),
        (("--include-path", "nowhere"), "own_text", "nowhere"),
    ],
)
def test_invalid_arguments_are_named(
    own_tasks: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
    names: str,
    wanted: str,
) -> None:
    every = lm_eval.tasks.TaskManager
    # without lm-eval's own tasks, whose index takes seconds
    few = partial(every, include_defaults=False)
    monkeypatch.setattr(
        lm_eval.tasks, "TaskManager", lambda include_path, **_: few(include_path=include_path)
    )
    assert _eval(Path("none"), own_tasks, *more, names=names) == 2
    assert wanted in capsys.readouterr().err


def test_quantized_checkpoint_is_evaluated_unchanged(
    tiny_folder: Path, own_tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_variant(str(tiny_folder), Variant.parse("int4-g32i"), "float32")[0]
    model.save_pretrained(tmp_path / "int4")
    load_tokenizer(str(tiny_folder)).save_pretrained(tmp_path / "int4")
    schemes = ("--quantization", "saved,int4-g32i,bf16", "--limit", "3")
    assert _eval(tmp_path / "int4", own_tasks, *schemes, names="own_choice") == 2
    said = capsys.readouterr()
    assert "bf16 failed" in said.err and "the scheme 'saved'" in said.out
    assert said.out.count("+0.0000 ± 0.0000") == 2  # the same model twice
    schemes = ("--quantization", f"int4-g32i,mine={tmp_path / 'int4'}", "--limit", "3")
    assert _eval(tiny_folder, own_tasks, *schemes, names="own_choice") == 0
    assert capsys.readouterr().out.count("+0.0000 ± 0.0000") == 2  # and as a folder beside its own model


def test_tags_and_patterns_name_tasks(own_tasks: Path) -> None:
    from torch_armllm.evaluation.tasks import load_tasks

    assert list(load_tasks(["own_tag"], [own_tasks])) == ["own_text"]
    assert sorted(load_tasks(["own_*"], [own_tasks])) == ["own_choice", "own_letters", "own_text"]


def test_tasks_that_execute_answers_ask_first(
    tiny_folder: Path, own_tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks").mkdir()
    text = (own_tasks / "own_choice.yaml").read_text().replace("own_choice", "own_unsafe", 1)
    (tmp_path / "tasks" / "own_unsafe.yaml").write_text(text + "\nunsafe_code: true\n")
    (tmp_path / "data").symlink_to(own_tasks.parent / "data")
    assert _eval(Path("none"), tmp_path / "tasks", names="own_unsafe") == 2
    said = capsys.readouterr().err
    assert "own_unsafe" in said and "--confirm-run-unsafe-code" in said
    run = ("--quantization", "f32", "--limit", "2", "--confirm-run-unsafe-code")
    assert _eval(tiny_folder, tmp_path / "tasks", *run, names="own_unsafe") == 0
    assert "own_unsafe" in capsys.readouterr().out


def test_missing_extra_is_named(
    own_tasks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    assert _eval(Path("none"), own_tasks) == 2
    assert 'pip install "torch_armllm[eval]"' in capsys.readouterr().err
