"""The parser: help, versions, suggestions, defaults, completion, and how fast it answers."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from torch_armllm._version import __version__
from torch_armllm.cli import engine_options
from torch_armllm.cli.main import build_parser, main
from torch_armllm.cli.parser import help_text
from torch_armllm.engine.config import EngineConfig
from torch_armllm.system.settings import settings_of

COMMANDS = "demo, chat, serve, quantize, bench, eval, doctor, env or models"


def parsers(parser: argparse.ArgumentParser | None = None) -> Iterator[argparse.ArgumentParser]:
    """Yields the parsers of all commands."""
    parser = build_parser() if parser is None else parser
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


EVERY = list(parsers())
LEAVES = [parser for parser in EVERY if parser._subparsers is None]


def process(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_armllm", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **(environment or {})}
    )


def test_version() -> None:
    for option in (["--version"], ["--version", "chat"]):
        found = process(*option)
        assert (found.returncode, found.stdout) == (0, f"torch_armllm {__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["bench"]], ids=["torch-armllm", "bench"])
def test_bare_call_prints_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    bare = capsys.readouterr().out
    assert main([*arguments, "--help"]) == 0
    assert capsys.readouterr().out == bare
    assert bare.startswith(f"usage: {' '.join(['torch-armllm', *arguments])} COMMAND ... [options]\n")


@pytest.mark.parametrize(
    ("arguments", "usage", "message"),
    [
        (
            ["chta"],
            "torch-armllm COMMAND ... [options]",
            f"torch-armllm: error: there is no command chta: give {COMMANDS}; did you mean chat?",
        ),
        (
            ["xyz"],
            "torch-armllm COMMAND ... [options]",
            f"torch-armllm: error: there is no command xyz: give {COMMANDS}",
        ),
        (
            ["bench", "latenzy"],
            "torch-armllm bench COMMAND ... [options]",
            "torch-armllm bench: error: there is no command latenzy: give latency, throughput, serve or "
            "report; did you mean latency?",
        ),
        (
            ["chat", "--temprature", "0.5"],
            "torch-armllm chat [MODEL] [options]",
            "torch-armllm chat: error: there is no option --temprature; did you mean --temperature?",
        ),
        (
            ["serve", "--max-num-seq=8", "--prot=1"],
            "torch-armllm serve [MODEL ...] [options]",
            "torch-armllm serve: error: there is no option --prot; did you mean --port?",
        ),
        (
            ["quantize", "--methd", "gptq"],
            "torch-armllm quantize MODEL OUT [options]",
            "torch-armllm quantize: error: there is no option --methd; did you mean --method?",
        ),
        (
            ["quantize", "a"],
            "torch-armllm quantize MODEL OUT [options]",
            "torch-armllm quantize: error: the following arguments are required: out",
        ),
        (
            ["bench", "latency", "--model", "smollm2"],
            "torch-armllm bench latency [MODEL] [options]",
            "torch-armllm bench latency: error: there is no option --model: the model comes first, as in "
            "`torch-armllm bench latency MODEL`",
        ),
        (
            ["--verbose"],
            "torch-armllm COMMAND ... [options]",
            "torch-armllm: error: there is no option --verbose; did you mean --version?",
        ),
        (
            ["env", "more"],
            "torch-armllm env [options]",
            "torch-armllm env: error: unexpected argument 'more'",
        ),
        (
            ["chat", "-z"],
            "torch-armllm chat [MODEL] [options]",
            "torch-armllm chat: error: there is no option -z",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistyped_words_get_a_suggestion_and_the_command_s_usage(
    arguments: list[str], usage: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    program = usage.removesuffix(" COMMAND ... [options]").partition(" [")[0].removesuffix(" MODEL OUT")
    told = f"usage: {usage}\n{message}\n`{program} --help` describes the command.\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("parser", LEAVES, ids=lambda parser: parser.prog)
def test_every_option_s_help_names_its_default(parser: argparse.ArgumentParser) -> None:
    without = [
        action.option_strings[0]
        for action in parser._actions
        if action.option_strings
        and not isinstance(action, argparse._HelpAction)
        and not action.required
        and "default: " not in help_text(action)
    ]
    assert without == []


@pytest.mark.parametrize("parser", LEAVES, ids=lambda parser: parser.prog)
def test_every_command_has_examples(parser: argparse.ArgumentParser) -> None:
    lines = textwrap.dedent((parser.epilog or "").partition("examples:\n")[2]).strip().splitlines()
    assert lines
    for line in lines:
        assert line.startswith(parser.prog)
        assert len(line) <= 100


@pytest.mark.parametrize("parser", EVERY, ids=lambda parser: parser.prog)
def test_help_is_in_the_words_of_the_field(parser: argparse.ArgumentParser) -> None:
    text = parser.format_help()
    assert not re.search(r"\b(most|fewest) (tokens|sequences|bytes|requests|rows) (of|per|in|a)\b", text)


def test_engine_defaults_in_helps_are_those_of_the_engine() -> None:
    parser = build_parser()
    serve = next(found for found in parsers(parser) if found.prog == "torch-armllm serve")
    texts = {action.dest: help_text(action) for action in serve._actions}
    for field, declared in settings_of(EngineConfig):
        default = getattr(EngineConfig(), field.name)
        if declared.option is None or default is None:
            continue
        shown = {True: "on", False: "off"}.get(default) if isinstance(default, bool) else str(default)
        shown = {"()": "none", str(10 * 10**9): "10GB"}.get(str(shown), shown)
        assert f"(default: {shown})" in texts[field.name], field.name


def test_chat_runs_one_sequence_by_default() -> None:
    chat = next(found for found in parsers() if found.prog == "torch-armllm chat")
    help_of = {action.dest: help_text(action) for action in chat._actions}
    assert help_of["max_num_seqs"] == "maximum number of sequences per step (default: 1)"
    options = build_parser().parse_args(["chat"])
    assert engine_options.engine_arguments(options)["max_num_seqs"] == 1


@pytest.mark.parametrize("name", ["bf16", "fp16", "half", "fp32", "bfloat16"])
def test_short_names_of_dtypes(name: str) -> None:
    full = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}.get(name, name)
    for command in (["chat"], ["serve"], ["eval", "m", "--tasks", "t"], ["bench", "latency"]):
        assert build_parser().parse_args([*command, "--dtype", name]).dtype == full
    assert build_parser().parse_args(["chat", "--kv-cache-dtype", name]).kv_cache_dtype == full


@pytest.mark.parametrize("command", [["chat"], ["bench", "latency"], ["bench", "throughput"], ["demo"]])
def test_the_model_is_a_positional_argument(command: list[str]) -> None:
    assert build_parser().parse_args([*command, "a/b"]).model == "a/b"


def test_help_and_version_import_no_torch() -> None:
    code = (
        "import sys\nfrom torch_armllm.cli.main import main\n"
        "for words in (['--version'], ['--help'], ['serve', '--help'], ['chat', '--prot']):\n"
        "    main(words)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("arguments", ["serve --help", "env"])
def test_a_reader_that_leaves_early_gets_no_traceback(arguments: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m torch_armllm {arguments} | true"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert found.stderr == ""
    assert found.returncode in (0, 141)  # 0: the pipe took all of it before its reader left


def complete(line: str) -> list[str]:
    """Returns what a shell offers for the last word of a line."""
    pytest.importorskip("argcomplete")
    environment = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \"'><=;|&(:",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    found = process(environment=environment)
    assert found.returncode == 0, found.stderr
    return [word.strip() for word in found.stdout.splitlines()]


def test_shells_complete_commands_options_and_choices() -> None:
    assert complete("torch-armllm se") == ["serve"]
    assert complete("torch-armllm bench la") == ["latency"]
    assert "--kv-cache-memory" in complete("torch-armllm serve --kv-c")
    assert complete("torch-armllm serve --kv-cache-dtype int") == ["int8", "int4"]
