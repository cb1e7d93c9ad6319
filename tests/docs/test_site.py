"""The site's generated parts and links; `make docs` builds it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from torch_armllm.quant.schemes.registry import SCHEMES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
_MARKER = re.compile(r"<!-- generated: (.+?) -->")
_PATH = re.compile(r"`((?:torch_armllm|ops|passes|tests|bench|docs)/[\w/.*-]+)[` ]")
_MODULE = re.compile(r"python -m ((?:bench|torch_armllm)\.[\w.]*\w)")
_LINK = re.compile(r"\]\((?!https?://|#)([^)\s#]+)")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "hooks/generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    missing = [link for link in _LINK.findall(text) if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize(
    "marker", sorted({marker for page in PAGES for marker in _MARKER.findall(page.read_text())})
)
def test_generated_parts_have_rows(hooks: ModuleType, marker: str) -> None:
    assert hooks.generate(*marker.split()).count("\n") > 2


def test_fields_have_defaults_and_meanings(hooks: ModuleType) -> None:
    table = hooks.generate("settings", "torch_armllm.engine.config", "EngineConfig")
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()[2:]]
    assert ["`max_num_seqs`", "`int`", "`64`"] in [row[:3] for row in rows]
    assert all(meaning for *_, meaning in rows)


def test_every_scheme_is_listed() -> None:
    page = (DOCS / "reference/schemes.md").read_text()
    assert [name for name in SCHEMES if f"`{name}`" not in page] == []


def test_environment_variables_are_listed() -> None:
    page = (DOCS / "reference/environment.md").read_text()
    code = [
        *(ROOT / "torch_armllm").rglob("*.py"),
        *(ROOT / "ops").rglob("*.py"),
        *(ROOT / "ops").rglob("*.cpp"),
    ]
    read = {name for path in code for name in re.findall(r'"(ARMLLM_[A-Z_]+)"', path.read_text())}
    users_part = page.split("Development only")[0]
    assert set(re.findall(r"ARMLLM_[A-Z_]+", users_part)) == read


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    named = {name for name in _PATH.findall(text) if not (ROOT / name).exists() and not any(ROOT.glob(name))}
    modules = [ROOT / name.replace(".", "/") for name in _MODULE.findall(text)]
    missing = [module for module in modules if not (module.with_suffix(".py").exists() or module.is_dir())]
    assert not named and not missing


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert [page for page in pages if f": {page}" not in navigation] == []
