"""Settings of several processes that are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.models import tiny
from torch_armllm import LLM

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "progress": False, "threads": 1}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
TENSOR, PIPELINE, DATA = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *[({name: 65}, "give at most 64") for name in (TENSOR, PIPELINE, DATA)],
        *[({name: 0}, "give at least 1") for name in (TENSOR, PIPELINE, DATA)],
        *[({name: 2, **MTP}, "draft layers are not shared") for name in (TENSOR, PIPELINE)],
        ({DATA: 2, "trace": "file"}, "not traced yet"),
        ({DATA: 2, "runner": "pooling"}, "replicas of models that pool"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), **OPTIONS, **settings)


@pytest.mark.parametrize("name", [TENSOR, DATA])
def test_a_loaded_model_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="give the folder in place of a loaded model"):
        LLM(tiny("llama"), **{name: 2}, **OPTIONS)
