"""Every code block of the tutorials runs, in the order of the pages, on a tiny checkpoint."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.server_live import live
from tests.support.tiny_server import checkpoint
from torch_armllm.cli.main import build_parser, main
from torch_armllm.llm.async_llm import AsyncLLM

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / f"docs/tutorials/{name}.md"
    for name in ("first-answer", "quantize-and-save", "serve", "two-layers", "write-a-pass")
]
_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```", re.M | re.S
)
NOT_RUN = {
    "first-answer": ["needs a package index", "installs into a new virtual environment"],
    "serve": ["needs a package index"],
}
"""Blocks that cannot run here, by page: their syntax alone is checked."""


class Block(NamedTuple):
    page: str
    line: int
    language: str
    code: str
    reason: str | None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(page.stem, line, match["language"], match["code"], match["reason"]))
    return found


def test_every_tutorial_is_tested() -> None:
    assert sorted((ROOT / "docs/tutorials").glob("*.md")) == sorted(PAGES)
    for page in PAGES:
        assert page.read_text().count("```") == 2 * len(blocks_of(page))


def test_blocks_that_are_not_run_are_known() -> None:
    reasons = {
        page.stem: [block.reason for block in blocks_of(page) if block.reason is not None] for page in PAGES
    }
    assert {page: listed for page, listed in reasons.items() if listed} == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_syntax(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            ast.parse(block.code)
        elif block.language == "sh":
            subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
        else:
            pytest.fail(f"{page.name}:{block.line}: {block.language} blocks are not tested")


class Tutorial:
    """A working folder in which blocks run; a tiny checkpoint replaces SmolLM2."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.address = ""
        self.running = ExitStack()

    def adapt(self, code: str) -> str:
        """Names the tiny checkpoint and the server's address."""
        code = re.sub(r"\bsmollm2\b(?!-)", str(self.model), code)
        return code.replace("http://localhost:8000", self.address) if self.address else code

    def run(self, block: Block, namespace: dict[str, Any]) -> None:
        code = self.adapt(block.code)
        if block.language == "python":
            # the line numbers of an error are those of the page
            exec(compile("\n" * (block.line - 1) + code, f"{block.page}.md", "exec"), namespace)
            return
        for line in code.replace("\\\n", "").splitlines():
            command = shlex.split(line, comments=True)
            if command[:2] == ["torch-armllm", "serve"]:
                self.serve(command[1:])
            elif command:
                assert command[0] == "torch-armllm", f"{block.page}.md:{block.line}: {line}"
                # a finding of this machine's is no error of the page's
                assert main(command[1:]) in ((0, 1) if command[1] == "doctor" else (0,))

    def serve(self, arguments: list[str]) -> None:
        """Serves in a thread of this process, by the command's options: another process takes seconds."""
        options = build_parser().parse_args(arguments)
        (name,) = options.model
        llm = AsyncLLM(name, max_num_seqs=8, kv_cache_memory=64 << 20)
        self.running.callback(llm.shutdown)
        server = self.running.enter_context(live(llm, name, api_keys=tuple(options.api_key)))
        self.address = server.base


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tutorial]:
    folder = tmp_path_factory.mktemp("tutorial")
    before = Path.cwd()
    os.chdir(folder)
    tutorial = Tutorial(folder, checkpoint(folder / "model"))
    try:
        with tutorial.running:
            yield tutorial
    finally:
        os.chdir(before)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorial_runs(page: Path, tutorial: Tutorial) -> None:
    if page.stem == "serve" and not (tutorial.folder / "smollm2-int4").exists():
        pytest.skip("runs after quantize-and-save, whose folder it serves")
    namespace: dict[str, Any] = {"__name__": "tutorial"}
    for block in blocks_of(page):
        if block.reason is None:
            tutorial.run(block, namespace)
