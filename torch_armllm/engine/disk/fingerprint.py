"""The fingerprint of a model and its caches: files of blocks are read only where it is the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from torch_armllm._version import __version__
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.kv_cache.disk.record import FORMAT
from torch_armllm.kv_cache.disk.rows import Bytes, Rows
from torch_armllm.ops import variants
from torch_armllm.plan.expert_store import ExpertStore
from torch_armllm.plan.native import native_plan

_SAMPLES = 16
"""Places of a tensor that are read."""
_SAMPLE_BYTES = 256
_LARGEST_COPY = 1 << 20
"""Elements of a tensor that is not contiguous and yet read as a whole."""


def fingerprint(executor: StepExecutor, blocks: Rows, states: Rows) -> str:
    """Returns 32 hexadecimal digits that differ if a block's bits may differ, or lie elsewhere in it.

    They depend on the plan (operators, shapes, constants such as those of rotary embeddings), on the dtype,
    shape, sum and bytes at sixteen places of each of its weights, on the layout of a block and of the states,
    on the kernels, and on the versions of torch and of this package. They do not depend on the name or the
    place of the model's folder. The sum finds a change at any other place; experts on disk have none.

    Args:
        executor: of an engine, or of a rank of it; has a native plan.
        blocks: of its KV cache.
        states: of its recurrent layers.
    """
    plan = native_plan(executor.plan)
    assert plan is not None
    program = plan.program
    digest = hashlib.blake2b(digest_size=16)
    known = {
        "format": FORMAT,
        "versions": [__version__, torch.__version__],
        "kernels": variants.machine().compiled,
        "shape": repr(executor.shape),
        "block": [executor.block_size, *blocks.description],
        "states": states.description,
        "program": program.without_handles().encode()[1:],
        "first_position": executor.model.first_position,
    }
    digest.update(json.dumps(known, default=str).encode())
    for constant in program.constants:
        digest.update(f"{constant.dtype} {tuple(constant.shape)}".encode())
        for sample in _samples(constant, plan.experts):
            digest.update(sample)
    return digest.hexdigest()


def _samples(tensor: Tensor, experts: ExpertStore | None) -> Iterator[bytes]:
    """Yields bytes of places that are spread over a tensor."""
    if not tensor.numel():
        return
    stored = None if experts is None else experts.stored(tensor)
    if stored is not None:  # its memory holds only what steps needed so far
        with stored.file.open("rb") as file:
            for begin in _places(tensor.numel() * tensor.element_size()):
                file.seek(stored.offset + begin)
                yield file.read(_SAMPLE_BYTES)
        return
    if not tensor.is_contiguous():
        if tensor.dim() > 1 and tensor.numel() > _LARGEST_COPY:
            for index in sorted({0, len(tensor) // 2, len(tensor) - 1}):
                yield from _samples(tensor[index], None)
            return
        tensor = tensor.contiguous()
    flat: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
    yield _sum(flat)
    for begin in _places(len(flat)):
        yield flat[begin : begin + _SAMPLE_BYTES].tobytes()


def _sum(flat: Bytes) -> bytes:
    """Returns the sum of all words of 8 bytes, and the bytes after the last one."""
    whole = len(flat) // 8 * 8
    total = int(flat[:whole].view(np.uint64).sum(dtype=np.uint64))
    return total.to_bytes(8, "little") + flat[whole:].tobytes()


def _places(nbytes: int) -> Iterator[int]:
    last = max(0, nbytes - _SAMPLE_BYTES)
    yield from sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)})
