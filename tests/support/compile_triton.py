"""Compiles every Triton kernel for a GPU, which needs none: ``python -m tests.support.compile_triton``."""

from __future__ import annotations

from typing import Any

from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

backends["cpu"] = backends["nvidia"]  # the stock wheel compiles for GPUs only

from torch_armllm.ops.activation import ACTIVATIONS  # noqa: E402
from torch_armllm.ops.tables import ENUMS  # noqa: E402
from torch_armllm.ops.triton.activation import gated_kernel  # noqa: E402
from torch_armllm.ops.triton.norm import layer_kernel, rms_kernel  # noqa: E402
from torch_armllm.ops.triton.pointwise import pointwise_kernel  # noqa: E402
from torch_armllm.ops.triton.rope import rope_kernel  # noqa: E402

del backends["cpu"]

TYPES: dict[str, Any] = {
    **dict.fromkeys(("x", "residual", "total", "out", "gate", "up"), "*bf16"),
    **dict.fromkeys(("weight", "bias", "cos", "sin"), "*fp32"),
    **dict.fromkeys(("eps", "weight_offset", "limit"), "fp32"),
    "operands": ("*bf16", "*fp32", "*i64"),
    "strides": (("i32",) * 3,) * 3,
}
"""Types of the kernels' arguments by name; the others are i32."""


def compiled(kernel: Any, **constants: Any) -> None:
    """Compiles a kernel; arguments in upper case are constants, and so are those that are None."""
    signature: dict[str, Any] = {name: TYPES.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 80, 32))
    print(kernel.__name__, {name: constants[name] for name in constants if name != "STEPS"})


def main() -> None:
    """Compiles every kernel in every form."""
    alone: dict[str, Any] = {"residual": None, "total": None}
    for given in ({}, alone):
        compiled(rms_kernel, BLOCK=1024, **given)
        compiled(layer_kernel, BLOCK=1024, **given)
    compiled(layer_kernel, BLOCK=1024, weight=None, bias=None)
    for activation in ACTIVATIONS:
        compiled(gated_kernel, BLOCK=1024, ACTIVATION=activation)
    for interleaved, unzip in ((False, False), (True, False), (True, True)):
        compiled(rope_kernel, BLOCK=64, INTERLEAVED=interleaved, UNZIP=unzip)
    steps = tuple((op, 0, 1, 2, 0.5) for op in ENUMS["PointwiseOp"])
    compiled(pointwise_kernel, BLOCK=1024, STEPS=steps)


if __name__ == "__main__":
    main()
