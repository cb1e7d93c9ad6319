"""Error of bfloat16 states of recurrent layers, against float32 ones.

    python -m bench.quality.state_rounding [--tokens 1024 8192]
    python -m bench.quality.state_rounding --text FOLDER [--steps 300] [--tokens 1024 8192]

Without ``--text``: relative errors (root mean square) of the ops' outputs for random tokens, by the share of
the state that a token forgets, over all tokens and over the last eighth of them.

With ``--text``: trains a small Qwen3.5 on the bytes of a folder's Markdown files, and prints the mean
divergence (KL, in nats a byte) of its next-byte distributions on text that it has not seen, and its losses.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_armllm
from torch_armllm.kv_cache.block_pool import BlockPool
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks
from torch_armllm.kv_cache.shapes import with_state_dtype
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.ops import recurrent
from torch_armllm.patching.patched_model import servable_model
from torch_armllm.plan.servable_model import ServableModel
from torch_armllm.plan.step import StepInputs

FORGOTTEN = (0.5, 0.1, 0.01, 0.001, 0.0001)
"""Share of a state that a token forgets; each token draws between none and twice of it."""
HEADS, SIZE, STATES = 4, 128, 16
MODEL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 16384,
}
DTYPES = (torch.float32, torch.bfloat16)


def _gates(tokens: int, *sizes: int, share: float) -> Tensor:
    return torch.log1p(-(2 * share * torch.rand(tokens, *sizes)).clamp(max=0.99))


def _outputs(op: str, tokens: int, share: float, dtype: torch.dtype) -> Tensor:
    """Return the float32 outputs of an op for random tokens, with states of a dtype."""
    torch.manual_seed(0)
    step = torch.zeros(1, dtype=torch.int64), torch.tensor([0, tokens], dtype=torch.int32)
    metadata = *step, torch.tensor([tokens], dtype=torch.int32)
    if op == "selective_scan":
        x, c = torch.randn(tokens, SIZE), torch.randn(tokens, STATES)
        state = torch.empty(1, STATES, SIZE, dtype=dtype)
        a = -torch.ones(STATES, SIZE)
        return recurrent.selective_scan(
            x, -_gates(tokens, SIZE, share=share), a, torch.randn(tokens, STATES), c, state, *metadata
        )
    q, k, v = (torch.randn(tokens, HEADS, SIZE) for _ in range(3))
    state = torch.empty(1, HEADS, SIZE, SIZE, dtype=dtype)
    gate, beta = _gates(tokens, HEADS, share=share), torch.rand(tokens, HEADS)
    return recurrent.gated_delta_rule(
        *(q, k, v, gate, beta, state, *metadata, SIZE**-0.5, True, op == "delta rule")
    )


def _print_ops(lengths: list[int]) -> None:
    print("op, tokens: relative error of all outputs / of the last eighth, for each share forgotten")
    print("op", "tokens", *FORGOTTEN, sep="\t")
    for op in ("delta rule", "no delta", "selective_scan"):
        for tokens in lengths:
            errors = []
            for share in FORGOTTEN:
                exact, rounded = (_outputs(op, tokens, share, dtype) for dtype in DTYPES)
                ends = slice(0, tokens), slice(tokens - tokens // 8, tokens)
                pair = [float((rounded[e] - exact[e]).norm() / exact[e].norm()) for e in ends]
                errors.append(" / ".join(f"{error:.4f}" for error in pair))
            print(op, tokens, *errors, sep="\t", flush=True)


def _trained(data: Tensor, steps: int) -> Any:
    """Return a small model of bytes, trained on random windows."""
    torch.manual_seed(0)
    model = tiny_model("qwen3_5_text", torch.float32, **MODEL)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 20, (steps - step) / (steps / 2))
        starts = torch.randint(0, len(data) - 257, (8,))
        batch = torch.stack([data[i : i + 256] for i in starts.tolist()])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@torch.no_grad()
def _log_probabilities(model: ServableModel, ids: Tensor, dtype: torch.dtype) -> Tensor:
    pool = BlockPool(with_state_dtype(model.shape, dtype))
    sequence = SequenceBlocks(pool)
    positions = torch.arange(len(ids))[None] + model.first_position
    inputs = StepInputs.pack(pool, [sequence], [len(ids)], ids[None], positions)
    return model.head(model.plan.run(inputs)).float().log_softmax(-1)


def _print_model(folder: str, steps: int, lengths: list[int]) -> None:
    text = b"\n".join(path.read_bytes() for path in sorted(Path(folder).rglob("*.md")))
    data = torch.tensor(list(text))
    held = max(lengths) + 1
    assert len(data) > 4 * held, f"{folder} has {len(data)} bytes of Markdown; {4 * held} are needed"
    model = _trained(data[:-held], steps)
    torch_armllm.patch(model, None, progress=False)
    servable = servable_model(model)
    assert servable is not None
    print("bytes", "KL", "loss float32", "loss bfloat16", sep="\t")
    for length in lengths:
        unseen = data[-held:][: length + 1]
        exact, rounded = (_log_probabilities(servable, unseen[:-1], dtype).double() for dtype in DTYPES)
        divergence = float((exact.exp() * (exact - rounded)).sum(-1).mean())
        losses = (-float(p.gather(1, unseen[1:, None]).mean()) for p in (exact, rounded))
        print(length, f"{divergence:.2e}", *(f"{loss:.5f}" for loss in losses), sep="\t")


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--text", help="folder with Markdown files")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    if options.text is None:
        _print_ops(options.tokens)
    else:
        _print_model(options.text, options.steps, options.tokens)


if __name__ == "__main__":
    main()
