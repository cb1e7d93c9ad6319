"""llama.cpp's part, run by a Python that has llama-cpp-python (and no torch): quantizes files, writes logits.

    python bench/quality/llama_side.py quantize FLOAT.gguf OUT.gguf KIND [IMPORTANCE.npz]
    python bench/quality/llama_side.py logits MODEL.gguf TOKENS.npy FOLDER

KIND is a type of file, such as ``q4_k_m``.  Importance is the mean squared inputs of tensors by their name.
Logits are float32 (length, vocabulary), one file ``<n>.npy`` per row of TOKENS.  Each file is written
after the reader has removed the file before it, so that the disk holds one at a time.  OMP_NUM_THREADS is the
number of threads, where it is set.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np

_THREADS = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)


def quantize(source: str, target: str, kind: str, importance: str | None = None) -> None:
    """Quantizes as llama.cpp's own tool does, with or without an importance matrix."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}"), _THREADS
    matrix = {} if importance is None else dict(np.load(importance))
    if matrix:
        options.imatrix = _entries(matrix)
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), options):
        raise RuntimeError(f"llama.cpp cannot quantize {source}")


def _entries(matrix: dict[str, np.ndarray]) -> ctypes.Array[llama_cpp.llama_model_imatrix_data]:
    """Returns an array that points to the matrix' own memory; an entry without a name ends it."""
    floats = ctypes.POINTER(ctypes.c_float)
    entries = (llama_cpp.llama_model_imatrix_data * (len(matrix) + 1))()
    for entry, (name, values) in zip(entries, matrix.items(), strict=False):
        assert values.dtype == np.float32 and values.flags.c_contiguous
        entry.name, entry.data, entry.size = name.encode(), values.ctypes.data_as(floats), values.size
    return entries


def logits(model: str, tokens: str, folder: str) -> None:
    """Writes the logits of each row of tokens."""
    rows = np.load(tokens)
    length, reader = rows.shape[1], os.getppid()
    options = {"n_ctx": length, "n_batch": length, "n_threads": _THREADS, "n_threads_batch": _THREADS}
    llama = llama_cpp.Llama(model, logits_all=True, verbose=False, **options)
    for index, row in enumerate(rows):
        llama.reset()
        llama.eval(row.tolist())
        scratch = Path(folder) / "writing.npy"
        np.save(scratch, np.asarray(llama.scores[:length], dtype=np.float32))
        scratch.rename(Path(folder) / f"{index}.npy")
        while index + 1 < len(rows) and (Path(folder) / f"{index}.npy").exists():
            if os.getppid() != reader:
                return  # the reader was killed
            time.sleep(0.01)


if __name__ == "__main__":
    {"quantize": quantize, "logits": logits}[sys.argv[1]](*sys.argv[2:])
