"""Versions that are pinned, tested and allowed: the same in every file that says them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from torch_armllm.engine.reports.checkup import OLDEST

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="needs a checkout")

PROJECT = ROOT / "pyproject.toml"
LISTED = """torch (2.15.0)
Available versions: 2.15.0, 2.14.1, 2.13.0+cpu, 2.13.0, 2.12.1+cpu
  INSTALLED: 2.13.0+cpu
"""


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / ".ci" / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pinned(package: str, file: str = ".ci/constraints.txt") -> str:
    found = re.search(rf"^{package}==([\d.]+)", (ROOT / file).read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def oldest_transformers() -> str:
    return ".".join(map(str, OLDEST["transformers"]))


def test_pinned_release_is_the_newest_tested_one() -> None:
    releases = pytest.importorskip("torch_armllm.hf.releases")
    assert pinned("transformers") == releases.NEWEST_TESTED["transformers"]
    assert pinned("transformers") == pinned("transformers", "tests/arm/requirements.txt")


def test_rows_of_the_matrix_are_the_oldest_the_pinned_and_the_newest() -> None:
    tested = {row.split("/")[2] for row in script("release/matrix.py").ROWS}
    asked = re.findall(r"row: [\d.]+/\S+/(\S+)", (ROOT / ".github/workflows/wheels.yml").read_text())
    for rows in (tested, set(asked)):
        assert {oldest_transformers(), pinned("transformers"), "newest"} <= rows
    assert script("release/matrix.py").requirement("torch", "newest") == "torch"


def test_documentation_names_the_oldest_and_the_pinned_release() -> None:
    text = (ROOT / "docs/reference/compatibility.md").read_text()
    assert f"| transformers | {oldest_transformers()} | {pinned('transformers')} |" in text
    assert f"transformers {oldest_transformers()} or" in " ".join((ROOT / "README.md").read_text().split())
    assert f"transformers {oldest_transformers()} or newer" in (ROOT / "docs/index.md").read_text()


def test_newest_releases_are_allowed() -> None:
    text = PROJECT.read_text()
    assert re.search(r'"(torch|transformers)[^"]*<', text) is None


def test_lower_bounds_are_the_same_in_all_extras_and_have_a_reason() -> None:
    text = PROJECT.read_text()
    for package in ("fastapi", "starlette", "h11", "python-multipart", "pillow", r"ray(?:\[serve\])?"):
        found = set(re.findall(rf'"{package}(>=[\d.]+)?"', text))
        assert len(found) == 1 and "" not in found, package
        name = package.partition("(")[0]
        assert re.search(rf"^# {name}{found.pop()} ", text, re.MULTILINE), package
    assert set(re.findall(r'Python :: (3\.\d+)"', text)) >= {"3.10", "3.14"}


def test_other_versions_are_chosen_for_an_environment() -> None:
    versions = script("with_versions.py")
    assert versions.oldest("transformers") == oldest_transformers()
    assert versions.newest_cpu(LISTED) == "2.13.0+cpu"
    assert versions.newest_cpu("Available versions: 2.15.0, 2.14.1") == versions.newest_cpu("") == ""
    constraints = 'torch==2.13.0\ntransformers==5.24.0; python_version >= "3.11"\nruff==1\n'
    assert versions.others(constraints, {"transformers"}) == "torch==2.13.0\nruff==1\n"
    assert all((ROOT / "tests" / folder).is_dir() for folder in versions.FOLDERS)
