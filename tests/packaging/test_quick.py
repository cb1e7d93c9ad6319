"""`make quick` chooses the tests that are nearest to a change."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

Imports = dict[Path, set[Path]]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def quick() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quick", ROOT / ".ci" / "quick.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def imports(quick: ModuleType) -> Imports:
    found: Imports = quick.imports_by_file()
    return found


def test_direct_importers_come_before_others(quick: ModuleType, imports: Imports) -> None:
    tests = quick.nearest_tests([ROOT / "torch_armllm/plan/share_rows.py"], imports)
    assert tests[0] == ROOT / "tests/plan/test_share_rows.py"
    assert ROOT / "tests/patching/test_patch.py" in tests, "it patches models, whose plans are lowered"
    assert ROOT / "tests/chat_format/test_derived.py" not in tests


def test_changed_tests_come_first(quick: ModuleType, imports: Imports) -> None:
    changed = [ROOT / "torch_armllm/plan/program.py", ROOT / "tests/kv_cache/test_states.py"]
    assert quick.nearest_tests(changed, imports)[0] == changed[1]


def test_compiled_files_count_as_their_package(quick: ModuleType, imports: Imports) -> None:
    tests = quick.nearest_tests([ROOT / "ops/sample/sample.cpp"], imports)
    assert ROOT / "tests/ops/test_sample.py" in tests[:12]


def test_other_files_have_no_tests(quick: ModuleType, imports: Imports) -> None:
    assert quick.nearest_tests([ROOT / "README.md"], imports) == []


def test_the_tests_of_each_kind_exist(quick: ModuleType) -> None:
    for name in quick.KINDS:
        path, function = name.split("[")[0].split("::")
        assert f"def {function}(" in (ROOT / path).read_text(), name
