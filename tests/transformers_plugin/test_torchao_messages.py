"""torchao's import-time messages do not reach users of this package."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from torch_armllm.transformers_plugin.torchao_messages import torchao_messages_hidden


def test_importing_patch_prints_nothing() -> None:
    pytest.importorskip("torchao")
    code = "import torch_armllm; torch_armllm.patch; import sys; assert 'torchao' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


class _Level:  # stands for an enum of torchao
    __module__ = "torchao.levels"


@pytest.mark.parametrize(
    "name, message, argument, passes",
    [
        ("torchao", "Failed to load _C.so: %s", "no such library", False),
        ("torchao", "Skipping import of cpp extensions due to %s", "an old torch", False),
        ("torchao", "another warning: %s", "…", True),
        ("torch.utils._pytree", "%s is an Enum subclass", _Level, False),
        ("torch.utils._pytree", "%s is an Enum subclass", logging.Filter, True),
    ],
)
def test_only_import_messages_of_torchao_are_hidden(
    name: str,
    message: str,
    argument: object,
    passes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torchao", raising=False)
    source, seen = logging.getLogger(name), []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: seen.append(record.getMessage()))
    source.addHandler(handler)
    try:
        with torchao_messages_hidden():
            source.warning(message, argument)
        assert seen == ([message % argument] if passes else [])
        source.warning(message, argument)
        assert seen[-1] == message % argument
    finally:
        source.removeHandler(handler)
