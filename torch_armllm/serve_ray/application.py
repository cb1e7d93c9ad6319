"""The application of Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from torch_armllm.llm.loading.loader import engine_config
from torch_armllm.serve_ray.front import Front
from torch_armllm.serve_ray.model_replica import ModelReplica
from torch_armllm.serve_ray.request_router import PrefixRequestRouter


@dataclass(frozen=True)
class RayModel:
    """A model of an application.

    Attributes:
        source: a checkpoint's folder or hub name, which all machines can read.
        name: in the API; empty: the source.
        cores: of each replica, or of each of its ranks; they are reserved for it.
        min_replicas: least number of replicas.
        max_replicas: most replicas.
        running: requests of a replica above which another replica starts; twice as many wait at most.
        idle: seconds of lower load after which a replica ends.
        engine: settings of each replica's engine; see `torch_armllm.LLM`.

    Raises:
        ValueError: a setting of the engine is unknown, or a number is out of its bounds.
    """

    source: str
    name: str = ""
    cores: int = 4
    min_replicas: int = 1
    max_replicas: int = 4
    running: int = 16
    idle: float = 300.0
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("cores", "max_replicas", "running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: give at least 1")
        if not 0 <= self.min_replicas <= self.max_replicas:
            most = self.max_replicas
            raise ValueError(f"min_replicas = {self.min_replicas}: give 0 to max_replicas, {most}")
        config = engine_config(self.settings)
        if config.data_parallel_size > 1:
            raise ValueError("data_parallel_size is Ray Serve's number of replicas here: give max_replicas")
        if config.distributed_executor_backend == "ray" and config.ranks == 1:
            raise ValueError(
                "distributed_executor_backend = 'ray' starts ranks of a replica: give tensor_parallel_size "
                "or pipeline_parallel_size, at least 2, or leave it out"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the engine, and the threads that its cores are for."""
        # replicas of a machine do not know of each other: none may pin threads to cores
        given = {"max_num_seqs": self.running, "threads": self.cores, "pin_threads": False}
        return {"tensor_parallel_size": 1, **given, **self.engine}


def application(models: Sequence[RayModel]) -> Application:
    """Returns an application that serves models; ``ray.serve.run`` starts it.

    A model whose name is that of one which runs replaces it without a gap: new replicas start, and the old
    ones end after their requests.

    Args:
        models: the first one answers requests that name none.

    Raises:
        ValueError: there is none, or two have the same name.
    """
    by_name = {model.name or model.source: model for model in models}
    if not models or len(by_name) < len(models):
        raise ValueError(f"{len(models)} models have {len(by_name)} names: give each model a name of its own")
    handles = {name: _deployment(name, model) for name, model in by_name.items()}
    front = serve.deployment(
        Front, name="front", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1 << 16
    )
    return front.bind(handles)


def _places(model: RayModel) -> dict[str, Any]:
    """Returns the options of a deployment that reserve CPUs for all ranks of each replica."""
    config = engine_config(model.settings)
    if config.distributed_executor_backend == "mp":  # ranks are processes of the replica's machine
        return {"ray_actor_options": {"num_cpus": config.ranks * model.cores}}
    return {
        "ray_actor_options": {"num_cpus": model.cores},  # those of rank 0, in the first bundle
        "placement_group_bundles": [{"CPU": model.cores}] * config.ranks,
        "placement_group_strategy": "SPREAD" if config.has_stages_only else "PACK",
    }


def _deployment(name: str, model: RayModel) -> Application:
    deployment = serve.deployment(
        ModelReplica,
        name=f"model {name}".replace("/", " ").replace("#", " "),
        autoscaling_config={
            "min_replicas": model.min_replicas,
            "max_replicas": model.max_replicas,
            "target_ongoing_requests": model.running,
            "downscale_delay_s": model.idle,
        },
        max_ongoing_requests=3 * model.running,
        graceful_shutdown_timeout_s=60,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRequestRouter),
        **_places(model),
    )
    return deployment.bind(name, model.source, model.settings, 2 * model.running)
