"""llama.cpp's part, run by a Python that has llama-cpp-python (and no torch): quantizes files, writes logits.

    python bench/quality/llama_side.py quantize FLOAT.gguf OUT.gguf q4_0|q4_k_m
    python bench/quality/llama_side.py logits MODEL.gguf TOKENS.npy FOLDER

Logits are float32 (length, vocabulary), one file ``<n>.npy`` per row of TOKENS.  Each file is written
after the reader has removed the file before it, so that the disk holds one at a time.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np

_KINDS = {"q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}


def quantize(source: str, target: str, kind: str) -> None:
    """Quantizes as llama.cpp's own tool does without an importance matrix."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = _KINDS[kind], 2
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), options):
        raise RuntimeError(f"llama.cpp cannot quantize {source}")


def logits(model: str, tokens: str, folder: str) -> None:
    """Writes the logits of each row of tokens."""
    rows = np.load(tokens)
    options = {"n_ctx": rows.shape[1], "n_batch": rows.shape[1], "n_threads": 2, "n_threads_batch": 2}
    llama = llama_cpp.Llama(model, logits_all=True, verbose=False, **options)
    for index, row in enumerate(rows):
        llama.reset()
        llama.eval(row.tolist())
        scratch = Path(folder) / "writing.npy"
        np.save(scratch, np.asarray(llama.scores[: rows.shape[1]], dtype=np.float32))
        scratch.rename(Path(folder) / f"{index}.npy")
        while index + 1 < len(rows) and (Path(folder) / f"{index}.npy").exists():
            time.sleep(0.01)


if __name__ == "__main__":
    {"quantize": quantize, "logits": logits}[sys.argv[1]](*sys.argv[2:])
