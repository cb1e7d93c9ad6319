"""A folder of float weights that is to be quantized."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from torch_armllm.checkpoint.empty_model import empty_model
from torch_armllm.checkpoint.load import auto_class
from torch_armllm.checkpoint.model_config import check_one_stack, read_config
from torch_armllm.checkpoint.own_head import untie_own_head
from torch_armllm.checkpoint.pretrained import refuse_adapter
from torch_armllm.checkpoint.weight_files import SAFETENSORS, weight_files

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


class FloatCheckpoint:
    """The files of a float checkpoint, and its model without values.

    Attributes:
        folder: the folder.
        files: its safetensors files.
    """

    def __init__(self, folder: Path) -> None:
        """Looks for the files.

        Raises:
            ValueError: the folder has none, holds an adapter, or the checkpoint is already quantized.
        """
        if not folder.exists():
            raise ValueError(f"{folder} does not exist: give the folder of a float checkpoint")
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder} holds no config.json: it is not a transformers checkpoint")
        config = json.loads((folder / "config.json").read_text())
        if (saved := config.get("quantization_config")) is not None:
            raise ValueError(
                f"{folder} is quantized already ({saved.get('quant_method', 'in some way')}): name the "
                "original model"
            )
        if not any(folder.glob("*.safetensors*")):
            raise ValueError(
                f"{folder} holds no .safetensors files: load it with from_pretrained and save it with "
                "save_pretrained"
            )
        self.folder = folder
        self.files = weight_files(str(folder), SAFETENSORS)
        refuse_adapter(str(folder))

    def empty_model(self) -> Any:
        """Returns the model on the meta device."""
        source = str(self.folder)
        config = read_config(source)
        check_one_stack(source, config)
        untie_own_head(auto_class(config), source, config)
        dtype = getattr(config, "dtype", None) or torch.float32
        model = empty_model(auto_class(config), config, source, dtype)
        model.tie_weights()
        return model

    @property
    def metadata(self) -> list[Path]:
        """The files that the quantized folder has too, such as those of the tokenizer."""
        return [
            file
            for file in sorted(self.folder.iterdir())
            if file.is_file()
            and file.name != "README.md"
            and not file.name.endswith((*_WEIGHTS, ".index.json"))
        ]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The identity of the checkpoint: a hash of its configuration, and its files' sizes and times."""
        stats = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in self.files}
        config = (self.folder / "config.json").read_bytes()
        return {"config": hashlib.sha256(config).hexdigest(), "files": stats}
