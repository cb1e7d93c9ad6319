"""Ranks and stages that are actors of a local Ray cluster."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.support.models import tiny
from tests.support.rank_processes import descendants
from tests.support.server_live import live, until
from tests.support.tiny_server import checkpoint
from torch_armllm import LLM, SamplingParams
from torch_armllm.engine.errors import RankFailedError
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.system import extras

PROMPTS = [[5, 6, 7] * 9, [11], list(range(20, 60))]
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "progress": False, "kv_cache_memory": 1 << 20}
RAY: dict[str, Any] = {"distributed_executor_backend": "ray", "threads": 1}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_experts": 5, "moe_intermediate_size": 48}
    tiny("qwen3_moe", torch.bfloat16, **sizes).save_pretrained(path)
    return path


def run(llm: LLM) -> list[Any]:
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.9, seed=3, logprobs=2)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def _run_often(llm: LLM) -> None:
    for _ in range(100):
        run(llm)


def groups(ray: Any) -> list[str]:
    """Returns the states of all placement groups."""
    return [group["state"] for group in ray.util.placement_group_table().values()]


def actors() -> list[int]:
    """Returns the processes of all ranks that are actors of this process's cluster."""
    found = []
    for process in descendants():
        with contextlib.suppress(OSError):  # of processes that end
            if b"ray::RankActor" in Path(f"/proc/{process}/cmdline").read_bytes():
                found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 3, "enable_expert_parallel": True},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True},
    ],
)
def test_actors_return_the_tokens_and_logprobs_of_one(
    cluster: Any, folder: Path, settings: dict[str, Any]
) -> None:
    expected = run(LLM(str(folder), tensor_parallel_size=1, threads=1, **OPTIONS))
    llm = LLM(str(folder), **settings, **RAY, **OPTIONS)
    assert groups(cluster).count("CREATED") == 1
    assert run(llm) == expected
    assert not torch.distributed.is_initialized() and "MASTER_ADDR" not in os.environ
    del llm
    gc.collect()
    assert set(groups(cluster)) == {"REMOVED"}


@pytest.mark.slow
def test_an_actor_that_dies_ends_the_engine_with_its_name(cluster: Any, folder: Path) -> None:
    llm = LLM(str(folder), tensor_parallel_size=2, **RAY, **OPTIONS)
    run(llm)
    (process,) = actors()
    os.kill(process, signal.SIGKILL)
    with pytest.raises(RankFailedError, match=rf"rank 1 has failed: Ray actor, process {process} on .*died"):
        _run_often(llm)
    del llm
    gc.collect()
    assert set(groups(cluster)) == {"REMOVED"}


@pytest.mark.slow
def test_a_server_is_unhealthy_once_an_actor_is_killed(cluster: Any, tmp_path: Path) -> None:
    options = {"kv_cache_memory": 4 << 20, "progress": False, "tensor_parallel_size": 2}
    with live(AsyncLLM(str(checkpoint(tmp_path)), **options, **RAY)) as server:
        (process,) = actors()
        assert httpx.get(f"{server.base}/health").status_code == 200
        os.kill(process, signal.SIGKILL)
        until(lambda: httpx.get(f"{server.base}/health").status_code == 503, 30)
        assert f"rank 1 has failed: Ray actor, process {process}" in str(server.llm.dead_error)
        until(lambda: set(groups(cluster)) == {"REMOVED"}, 30)  # another engine may have the CPUs


@pytest.mark.slow
def test_a_cluster_with_too_few_cpus_is_refused_with_the_numbers(
    cluster: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_armllm.llm.ranks import ray_places

    with pytest.raises(ValueError, match="5 ranks of 1 threads each need 5 CPUs, and the Ray cluster has 4"):
        LLM(str(folder), tensor_parallel_size=5, **RAY, **OPTIONS)
    monkeypatch.setattr(ray_places, "_SECONDS_TO_RESERVE", 1)
    busy = cluster.remote(num_cpus=3)(_Busy).remote()
    cluster.get(busy.ping.remote(), timeout=60)
    with pytest.raises(ValueError, match="of the Ray cluster's 4 CPUs 1 are free after 1 s"):
        LLM(str(folder), tensor_parallel_size=2, **RAY, **OPTIONS)
    cluster.kill(busy)


class _Busy:
    def ping(self) -> None:
        """Answers."""


@pytest.mark.slow
def test_an_error_of_loading_is_that_of_rank_0(cluster: Any, folder: Path, tmp_path: Path) -> None:
    tiny("llama", hidden_size=256).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="for models with quantized experts"):
        LLM(str(tmp_path), tensor_parallel_size=2, enable_expert_parallel=True, **RAY, **OPTIONS)
    assert set(groups(cluster)) <= {"REMOVED"}


@pytest.mark.slow
def test_a_server_that_restarts_gets_new_actors(cluster: Any, tmp_path: Path) -> None:
    # the last test of the cluster: pytest keeps the logged errors, and with them the engine and its CPUs
    options = {"kv_cache_memory": 4 << 20, "progress": False, "tensor_parallel_size": 2}
    engine, folder = {**options, **RAY, "threads": 2}, str(checkpoint(tmp_path))  # all CPUs
    prompt = {"prompt": "a", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    llm = AsyncLLM(folder, **engine)
    settings: dict[str, Any] = {"engine": engine, "source": folder, "restart": True}
    with live(llm, **settings) as server:
        del llm
        server.llm = None  # type: ignore[assignment]  # the engine is the registry's alone
        ask = functools.partial(httpx.post, f"{server.base}/v1/completions", json=prompt, timeout=60)
        expected = ask().json()["choices"][0]["text"]
        (process,) = actors()
        os.kill(process, signal.SIGKILL)
        until(lambda: actors() not in ([], [process]), 120)
        until(lambda: httpx.get(f"{server.base}/health").status_code == 200, 120)
        assert ask().json()["choices"][0]["text"] == expected


def test_ray_that_is_missing_is_an_error_with_the_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda package: package != "ray")
    with pytest.raises(ImportError, match=r'needs ray: pip install "torch_armllm\[ray\]"'):
        LLM(str(folder), tensor_parallel_size=2, **RAY, **OPTIONS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give one of them, at least 2"),
        (
            {
                "tensor_parallel_size": 2,
                "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
            },
            "draft layers are not shared",
        ),
        ({"data_parallel_size": 2}, "torch_armllm.serve_ray"),
        ({"distributed_executor_backend": "uni"}, "distributed_executor_backend = 'uni': give mp or ray"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_starts(
    folder: Path, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda package: True)
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), **{**RAY, **OPTIONS, **settings})
