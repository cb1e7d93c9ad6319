"""Two models on Ray Serve; the number of each one's replicas follows the load.

pip install "torch_armllm[ray]"
serve run docs.examples.ray_serve:app
curl http://127.0.0.1:8000/v1/models
"""

from __future__ import annotations

from torch_armllm.serve_ray.application import RayModel, application

app = application(
    [
        RayModel("smollm2", cores=2, max_replicas=4, engine={"kv_cache_memory": 1 << 30}),
        RayModel("Qwen/Qwen3-0.6B", "qwen", cores=4, max_replicas=2, engine={"kv_cache_memory": 2 << 30}),
    ]
)
