"""The Triton that is installed, and whether it runs kernels on the CPU."""

from __future__ import annotations

import os

_REMEDY = (
    "set TRITON_INTERPRET=1 to run the kernels in Triton's interpreter, or build triton-cpu "
    "(https://github.com/triton-lang/triton-cpu)"
)


def find_backend() -> str:
    """Imports triton; returns the compiler or the interpreter that runs the kernels, with its version.

    Raises:
        RuntimeError: triton cannot be imported, or does not run kernels on the CPU.
    """
    try:
        import triton
        from triton.backends import backends
    except ImportError as error:
        raise RuntimeError(
            f"kernel variant 'triton' needs the package triton ({error}): "
            f'pip install "torch_armllm[triton]" and {_REMEDY}'
        ) from error
    if os.environ.get("TRITON_INTERPRET") == "1":  # where a kernel is defined, it reads this
        return f"interpreter of triton {triton.__version__}"
    if "cpu" in backends:
        return f"triton {triton.__version__}"
    raise RuntimeError(
        "kernel variant 'triton' needs a triton with a CPU backend, and triton "
        f"{triton.__version__} has only {', '.join(sorted(backends)) or 'none'}: {_REMEDY}"
    )
