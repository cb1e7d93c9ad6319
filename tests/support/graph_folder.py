"""Captured graphs on disk, for the other processes of a run of tests and for later runs.

A folder belongs to one state of the sources that a graph depends on, and to one torch and one transformers.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from torch_armllm.capture.export import CapturedGraph, CaptureError

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("capture", "hf", "kv_cache", "lora", "quant", "system")
"""Folders of the package that exported models, or the exporter, call."""
_PICKLER = "torch.fx._graph_pickler"
_KEPT_META = ("val", "nn_module_stack")
"""Metadata of nodes that the package reads."""


class Kept(NamedTuple):
    """A graph without weights, and the attributes that are weights, by name."""

    captured: CapturedGraph
    own: dict[str, str]


@functools.cache
def _state() -> str:
    """Returns a digest of everything beside a model that its graph depends on."""
    files = [file for folder in _SOURCES for file in (ROOT / "torch_armllm" / folder).rglob("*.py")]
    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for file in sorted([*files, *(ROOT / "ops").rglob("*.py"), *Path(__file__).parent.glob("*graph*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _pickler() -> Any:
    """Returns a copy of torch's module that pickles graphs, without `dill`: that is in Python, and slow.

    Torch may have imported its own, with `dill`, before.
    """
    own = importlib.util.find_spec(_PICKLER)
    assert own is not None and own.origin is not None
    spec = importlib.util.spec_from_file_location(f"{_PICKLER}_without_dill", own.origin)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # pickles name it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils._import_utils.import_dill", lambda: None, raising=False)
        spec.loader.exec_module(module)
    return module


class GraphFolder:
    """A folder with a file for each structure of a model.

    Args:
        parent: the folder of all states; those of other states are removed.
    """

    def __init__(self, parent: Path) -> None:
        self._folder = parent / _state()
        self._folder.mkdir(parents=True, exist_ok=True)
        for other in parent.iterdir():
            if other != self._folder:
                shutil.rmtree(other, ignore_errors=True)

    def load(self, name: str) -> Kept | CaptureError | None:
        """Returns the graph of a structure, the error of its export, or None if there is neither."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        try:
            data = (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        found: Any = _pickler().GraphPickler.loads(data, mode)
        if isinstance(found, str):
            return CaptureError(found)
        module, fields, own = found
        return Kept(CapturedGraph(module, **fields), own)

    def store(self, name: str, kept: Kept | CaptureError) -> None:
        """Writes the graph of a structure, or the error of its export, if it can be written."""
        content: Any = str(kept)
        if isinstance(kept, Kept):
            fields = {**vars(replace(kept.captured, sample=None))}
            content = fields.pop("graph_module"), fields, kept.own
        try:
            pickler = _pickler()
            options = pickler.Options(ops_filter=None, node_metadata_key_filter=_KEPT_META.__contains__)
            data = pickler.GraphPickler.dumps(content, options)
        except Exception:  # noqa: BLE001 - constants without values, or a torch that has no such options
            return
        handle, path = tempfile.mkstemp(dir=self._folder)
        with io.FileIO(handle, "w") as file:
            file.write(data)
        os.replace(path, self._folder / name)


def graph_folder() -> GraphFolder | None:
    """Returns the folder of this checkout; None if this torch cannot write graphs."""
    if importlib.util.find_spec(_PICKLER) is None:
        return None
    return GraphFolder(ROOT / "build" / "test_graphs")
