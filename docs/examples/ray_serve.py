"""The server on Ray Serve; the number of replicas follows the load.

    pip install "ray[serve]" "torch_armllm[serve]"
    python docs/examples/ray_serve.py smollm2 --max-replicas 4 --cores 8
    curl http://127.0.0.1:8000/v1/models

Each replica has the model, an engine and cores of its own, and serves all routes. The replicas of a machine
share its memory, so each gets a fixed size of KV cache. Replicas are independent: a prefix that is cached in
one replica is prefilled again in another, and ``/metrics`` are those of a single replica.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve


def replicas(
    model: str, engine: dict[str, Any], cores: int, most: int, running: int = 16, idle: float = 300
) -> serve.Application:
    """Return an application of Ray Serve.

    Args:
        model: smollm2, a folder or a hub name.
        engine: engine settings of each replica; see ``torch_armllm.LLM``.
        cores: cores of each replica.
        most: maximum number of replicas.
        running: requests of a replica above which another replica starts; at most three times as many wait.
        idle: seconds of lower load after which a replica ends.
    """

    def build() -> FastAPI:
        import torch

        torch.set_num_threads(cores)
        from torch_armllm.server.app import build_app
        from torch_armllm.server.model_registry import ModelRegistry
        from torch_armllm.server.settings import ModelSettings, ServerSettings

        registry = ModelRegistry(ServerSettings(max_queue=2 * running), {"max_num_seqs": running, **engine})
        served = ModelSettings(model, model)
        registry.register(registry.load_llm(served), served)
        return build_app(registry)

    @serve.deployment(
        name="model",
        ray_actor_options={"num_cpus": cores},
        autoscaling_config={
            "min_replicas": 1,
            "max_replicas": most,
            "target_ongoing_requests": running,
            "downscale_delay_s": idle,
        },
        max_ongoing_requests=3 * running,
        graceful_shutdown_timeout_s=60,
    )
    @serve.ingress(build)
    class Replica:
        pass

    return Replica.bind()


def main() -> None:
    """Serve until Ctrl-C or SIGTERM, and let running requests finish."""
    parser = argparse.ArgumentParser(description="A model on Ray Serve.")
    parser.add_argument("model", help="smollm2, a folder or a hub name")
    parser.add_argument("--cores", type=int, default=4, help="cores of each replica (4)")
    parser.add_argument("--max-replicas", type=int, default=4, help="maximum number of replicas (4)")
    parser.add_argument("--cache-mb", type=int, default=1024, help="MB of each replica's KV cache (1024)")
    parser.add_argument("--running", type=int, default=16, help="running requests of each replica (16)")
    parser.add_argument(
        "--idle", type=float, default=300, help="seconds of lower load after which a replica ends (300)"
    )
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    ray.init()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's would end it at once
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    engine = {"kv_cache_memory": options.cache_mb << 20}
    serve.run(
        replicas(options.model, engine, options.cores, options.max_replicas, options.running, options.idle)
    )
    print(f"serving {options.model} at http://127.0.0.1:{options.port}/v1; Ctrl-C ends it", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        with contextlib.suppress(TimeoutError):
            serve.delete("default")  # waits for requests that run; what follows does not
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
