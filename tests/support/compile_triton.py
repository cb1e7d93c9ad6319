"""Compiles every Triton kernel for a GPU and launches none: ``python -m tests.support.compile_triton``."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

backends["cpu"] = backends["nvidia"]  # the stock wheel compiles for GPUs only

from torch_armllm.ops.activation import ACTIVATIONS  # noqa: E402
from torch_armllm.ops.tables import ENUMS  # noqa: E402
from torch_armllm.ops.triton import OPS  # noqa: E402
from torch_armllm.ops.triton.pointwise import Step, pointwise  # noqa: E402

del backends["cpu"]


class Absent:
    """A driver of no device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 80, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    """Calls every op, in every form that has a kernel of its own."""
    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, warmup: bool = False, **options: Any) -> Any:
        print(self.__name__)
        return launch(self, *arguments, warmup=True, **options)

    JITFunction.run = compile_only
    driver.set_active(Absent())
    x, weight, cos, heads = torch.randn(2, 20), torch.randn(20), torch.randn(2, 9), torch.randn(2, 3, 20)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        row = x.to(dtype)
        OPS["rms_norm"](row, weight, 1e-5)
        OPS["add_rms_norm"](row, row, weight, 1e-5)
        OPS["layer_norm"](row, weight, weight, 1e-5)
        OPS["layer_norm"](row, None, None, 1e-5)
        OPS["add_layer_norm"](row, row, weight, None, 1e-5)
        for activation in ACTIVATIONS:
            OPS["gated_act"](row, row, activation)
        for options in ((False, False), (True, False), (True, True)):
            OPS["rope_"](heads.to(dtype), heads[:, :0].to(dtype), cos, cos, *options)
        steps = [Step(op, 0, 1, 2, 0.5) for op in ENUMS["PointwiseOp"]]
        pointwise([row, weight, torch.arange(2)[:, None]], steps, dtype)


if __name__ == "__main__":
    main()
