"""Split GGUF files: all parts are read by the name of any one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.checkpoint.formats.test_gguf_fields import difference, made
from tests.support.gguf_models import add_field, converted, fields_of
from torch_armllm import load
from torch_armllm.checkpoint.formats.gguf import tokenizer_options
from torch_armllm.checkpoint.load import load_model


def write_parts(folder: Path, model: Any, sizes: tuple[int, ...], count: int) -> list[Path]:
    """Writes a Llama in parts with a number of tensors each; the last has the rest."""
    tensors, parts = list(converted(model, "llama").items()), []
    for number, size in enumerate(sizes):
        path = folder / f"m-{number + 1:05}-of-{len(sizes):05}.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        if number == 0:
            for name, value in fields_of(model, "llama").items():
                add_field(writer, f"llama.{name}", value)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", len(sizes))
        writer.add_int32("split.tensors.count", count)
        own = tensors[:size] if number + 1 < len(sizes) else tensors
        tensors = tensors[len(own) :]
        for name, weight in own:
            writer.add_tensor(name, np.ascontiguousarray(weight.numpy()))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(path)
    return parts


COUNT = 21


@pytest.mark.parametrize("sizes", [(5, 0), (0, 7, 0)])
def test_any_part_stands_for_the_file(sizes: tuple[int, ...], tmp_path: Path) -> None:
    model = made(head_dim=16)
    parts = write_parts(tmp_path, model, sizes, COUNT)
    for part in parts:
        assert difference(part, model) < 1e-5
        assert tokenizer_options(str(part)) == (str(tmp_path), {"gguf_file": parts[0].name})
    assert load(str(parts[-1]), dtype=torch.float32).name_or_path == str(parts[0])


def test_missing_and_renamed_parts(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, made(head_dim=16), (5, 5, 0), COUNT)
    second = parts[1].read_bytes()
    parts[1].unlink()
    for part in (parts[0], parts[2]):
        with pytest.raises(ValueError, match=r"m-00002-of-00003.gguf is missing in .*download all parts"):
            load_model(str(part))
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ValueError, match=r"part 2 \(from 0\) of 3, and its name says 1"):
        load_model(str(parts[0]))
    (tmp_path / "other.gguf").write_bytes(second)
    with pytest.raises(ValueError, match="one of 3 parts .* and its name does not end with"):
        load_model(str(tmp_path / "other.gguf"))


def test_parts_with_too_few_tensors(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, made(head_dim=16), (5, 0), COUNT + 1)
    with pytest.raises(ValueError, match="have 21 tensors, and its header says 22: a part is damaged"):
        load_model(str(parts[0]))
