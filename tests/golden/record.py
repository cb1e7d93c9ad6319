"""Golden values: hashes of logits, of a saved folder, of help texts and of public names.

A refactoring that changes no behavior leaves all of them as they are.  A change that is meant to change one
records it anew and says so in its commit:

    python tests/golden/record.py          prints what differs from golden.json
    python tests/golden/record.py --write  records today's values
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("golden.json")
FAMILIES = ("llama", "qwen3_moe", "gemma3_text", "gpt_oss")
"""Dense; routed experts; sliding windows with norms of ``1 + w``; sinks with clamped experts."""
VARIANTS = ("scalar", "avx2") if os.uname().machine in ("x86_64", "AMD64") else ("scalar", "neon")
COMMANDS = (
    (),
    *((name,) for name in ("demo", "chat", "serve", "quantize", "eval", "doctor", "env", "models", "bench")),
    *(("bench", name) for name in ("latency", "throughput", "serve", "report")),
)
PROMPT, NEW_TOKENS = 40, 8


def _recipe() -> Any:
    """Returns a recipe without statistics: their last bits depend on how torch divides products."""
    from torch_armllm import Recipe

    return Recipe(importance=False)


def digest(data: bytes) -> str:
    """The first 16 hexadecimal digits of SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def logits() -> dict[str, dict[str, str]]:
    """Hashes of a prompt's logits and of decoded tokens, by kernel variant and family."""
    import torch

    import torch_armllm
    from tests.support.models import tiny, token_ids
    from torch_armllm.ops import variants

    found: dict[str, dict[str, str]] = {}
    ids = token_ids(length=PROMPT)
    for variant in VARIANTS:
        with variants.use(variant), torch.no_grad():
            for family in FAMILIES:
                model = tiny(family)
                torch_armllm.patch(model, _recipe(), progress=False)
                prompt = model(ids).logits
                tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
                hashed = digest(prompt.numpy().tobytes() + tokens.numpy().tobytes())
                found.setdefault(variant, {})[family] = hashed
    return found


def saved_folder() -> dict[str, str]:
    """Hashes of the files that ``save_pretrained`` writes of a patched model."""
    import torch_armllm
    from tests.support.models import tiny

    model = tiny("qwen3_moe")
    torch_armllm.patch(model, _recipe(), progress=False)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {file.name: digest(content(file)) for file in sorted(Path(folder).iterdir())}


def content(file: Path) -> bytes:
    """A file's bytes; tensors by name, as the order of the metadata in their header is random."""
    if file.suffix != ".safetensors":
        return file.read_bytes()
    from safetensors.torch import load_file

    tensors = sorted(load_file(file).items())
    named = [f"{name} {t.dtype} {tuple(t.shape)}".encode() + t.numpy().tobytes() for name, t in tensors]
    return b"".join(named)


def help_texts() -> dict[str, str]:
    """Hashes of every ``--help``."""
    from torch_armllm.cli.main import build_parser

    os.environ["COLUMNS"] = "100"
    found = {}
    for command in COMMANDS:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            build_parser().parse_args([*command, "--help"])
        found[" ".join(command)] = digest(text.getvalue().encode())
    return found


def public_names() -> list[str]:
    """The names that ``import torch_armllm`` promises."""
    import torch_armllm

    return sorted(torch_armllm.__all__)


def environment() -> dict[str, str]:
    """Everything beyond this checkout on which the values depend.

    Weights are searched with regard to the float model's activations, whose bits are those of the CPU's own
    matrix products in torch.
    """
    from torch_armllm.system.host import cpu_name

    return {
        "cpu": cpu_name(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    }


def values() -> dict[str, Any]:
    """All golden values of this checkout."""
    return {
        "environment": environment(),
        "logits": logits(),
        "saved folder": saved_folder(),
        "help": help_texts(),
        "public names": public_names(),
    }


def main(arguments: list[str]) -> int:
    """Compares, or records with ``--write``; returns 1 where something differs."""
    found = values()
    if arguments == ["--write"]:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    expected = json.loads(FILE.read_text())
    differing = [part for part in found if found[part] != expected.get(part)]
    for part in differing:
        print(f"{part}: {found[part]}\n  golden: {expected.get(part)}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
