"""Published rates of other engines on Arm servers, to compare with predictions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """Tokens a second of one sequence; ``threads`` None where the source does not say."""

    machine: str
    threads: int | None
    model: str
    prompt: bool
    tok_s: float
    engine: str
    source: str


PUBLISHED = (
    Published("Graviton4", None, "Llama-3.1-8B", False, 43.4, "PyTorch + KleidiAI, int4", "pytorch #158250"),
    Published(
        "Graviton4", 16, "Llama-3.1-8B", False, 24.6, "PyTorch + KleidiAI, int4 g32", "pytorch #158250"
    ),
    Published(
        "Graviton3", 32, "gpt-oss-20b", False, 76.3, "llama.cpp, mxfp4 (Graviton3E)", "llama.cpp #28141"
    ),
    Published(
        "Graviton3", 32, "gpt-oss-20b", True, 213.0, "llama.cpp, mxfp4 (Graviton3E)", "llama.cpp #28141"
    ),
    Published("Graviton4", 16, "Qwen3.5-35B-A3B", False, 33.0, "llama.cpp, Q4_K_M", "llama.cpp #27470"),
    Published("Graviton4", 16, "Qwen3.5-35B-A3B", True, 147.0, "llama.cpp, Q4_K_M", "llama.cpp #27470"),
    Published("Graviton4", 16, "Qwen2.5-1.5B", True, 854.0, "llama.cpp, Q4_0", "llama.cpp #27092"),
    Published("Graviton3", 16, "Qwen2.5-1.5B", True, 615.0, "llama.cpp, Q4_0", "llama.cpp #27092"),
)
