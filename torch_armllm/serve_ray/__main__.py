"""The command that serves models on Ray.

python -m torch_armllm.serve_ray MODEL [MODEL ...] [--cores 4] [--max-replicas 4] [--port 8000]
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import time

import ray
from ray import serve

from torch_armllm.engine.config import EngineConfig
from torch_armllm.serve_ray.application import RayModel, application
from torch_armllm.system.settings import setting_named


def main() -> None:
    """Serves until Ctrl-C or SIGTERM, and lets running requests finish."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_armllm.serve_ray", description="serve models on Ray Serve"
    )
    parser.add_argument("model", nargs="+", help="smollm2, a folder or a hub name")
    parser.add_argument("--cores", type=int, default=4, help="cores of each replica's rank (4)")
    parser.add_argument(
        "--min-replicas", type=int, default=1, help="least number of each model's replicas (1)"
    )
    parser.add_argument("--max-replicas", type=int, default=4, help="most replicas of each model (4)")
    parser.add_argument("--cache-mb", type=int, default=1024, help="MB of each replica's KV cache (1024)")
    parser.add_argument("--running", type=int, default=16, help="running requests of each replica (16)")
    parser.add_argument(
        "--idle", type=float, default=300, help="seconds of lower load after which a replica ends (300)"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks of each replica (1)")
    parser.add_argument(
        "--pipeline-parallel-size", type=int, default=1, help="stages of each replica, in place of ranks (1)"
    )
    parser.add_argument(
        "--distributed-executor-backend",
        choices=setting_named(EngineConfig, "distributed_executor_backend").kind.choices,
        default="mp",
        help="what starts the ranks: mp, on the replica's machine; ray, as actors of the cluster (mp)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="TCP port to listen at (8000)")
    options = parser.parse_args()
    engine = {
        "kv_cache_memory": options.cache_mb << 20,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "distributed_executor_backend": options.distributed_executor_backend,
    }
    names = ("cores", "min_replicas", "max_replicas", "running", "idle")
    given = {name: getattr(options, name) for name in names}
    try:
        app = application([RayModel(source, engine=engine, **given) for source in options.model])
    except ValueError as error:
        parser.error(str(error))
    ray.init()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's would end it at once
    serve.start(http_options={"host": options.host, "port": options.port})
    serve.run(app)
    address = f"http://{options.host}:{options.port}/v1"
    print(f"serving {', '.join(options.model)} at {address}; Ctrl-C ends it", flush=True)
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
