"""The one check of what a reader found in a checkpoint: what is missing, and what nobody reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from torch_armllm.checkpoint.tensor_headers import TensorHeader

_SCALES = (
    (re.compile(r"weight_scale_inv$"), "float8 in blocks, as DeepSeek stores it"),
    (re.compile(r"\.(weight_)?scale_inv$"), "float8 in blocks"),
    (re.compile(r"(weight|input|output|k|v)_scale(_2|_ub)?$"), "float8 or integers, as compressed-tensors"),
    (re.compile(r"\.scales?$"), "float8 or integers"),
    (re.compile(r"\.(SCB|weight_format)$"), "bitsandbytes of 8 bits"),
    (re.compile(r"\.(absmax|quant_map|nested_absmax|nested_quant_map)$|\.quant_state\."), "bitsandbytes"),
    (re.compile(r"\.(qweight|qzeros|g_idx)$"), "GPTQ or AWQ"),
    (re.compile(r"_(blocks|scales)$"), "MXFP4"),
    (re.compile(r"weight_(packed|shape|zero_point|g_idx)$"), "compressed-tensors"),
)
"""Names of tensors without which a quantized weight is another one, and the tools that write them."""
ACTIVATION_SCALES = r"(^|[._])(input|output|[qkvp])_(scale|zero_point)$"
"""Names of scales of activations, keys and values, which this package computes for each token."""
_COMPUTED = re.compile(r"\.num_batches_tracked$")
"""Missing tensors without which a model computes the same."""
BIAS = re.compile(r"(^|[._])bias$")
"""Names of biases, which change nothing if they are 0."""

_DRAFTING = re.compile(r"^(?:(.*\.)?eh_proj\.|((?:.*\.)?mtp(?:_layers)?\.))")
"""Begins the names of layers that draft tokens: those beside an ``eh_proj``, or those of a part ``mtp``."""


@dataclass(frozen=True)
class Incoming:
    """The findings of a reader in a checkpoint.

    Attributes:
        source: the folder, file or hub name.
        model: the model's class or architecture, for messages.
        missing: the model's tensors that no file holds.
        unread: stored tensors that the reader has no use for, by the names in the files.
        fields: settings of a header or a config.json, such as ``rope.scaling.type``, that nobody reads.
        plain: headers of the tensors that are read by value, as floats.
        stored: headers of all tensors, for the names of files in messages.
        optional: patterns of ``missing`` that the model computes itself or never uses.
        irrelevant: patterns of ``unread`` and ``fields`` that change no output.
        read: reads a tensor of ``unread``: a bias of zeros changes no output; None: it cannot be read.
    """

    source: str
    model: str = "the model"
    missing: Iterable[str] = ()
    unread: Iterable[str] = ()
    fields: Iterable[str] = ()
    plain: Mapping[str, TensorHeader] = field(default_factory=dict)
    stored: Mapping[str, TensorHeader] = field(default_factory=dict)
    optional: Sequence[str] = ()
    irrelevant: Sequence[str] = ()
    read: Callable[[str], Tensor] | None = None


def check_incoming(found: Incoming) -> None:
    """Refuses a checkpoint that would be loaded otherwise than it says.

    Every reader calls it, whatever the format: with the tensors that it has no use for and those that it
    looked for in vain.  What is known to change no output passes without a word.

    Raises:
        ValueError: a tensor is missing, or one is stored that nobody reads; a weight is stored in float8, or
            beside scales, though config.json names no quantization; or a setting is read by nobody.
    """
    unread = _without_drafting(name for name in found.unread if not _matches(name, found.irrelevant))
    unread = [name for name in unread if not _is_zero_bias(found, name)]
    _refuse_quantized(found, unread)
    missing = [n for n in found.missing if not _matches(n, found.optional) and not _COMPUTED.search(n)]
    if missing:
        raise ValueError(
            f"the checkpoint has no {_some(missing)}: a file is missing, or config.json belongs to another "
            f"model ({found.model} in {found.source})"
        )
    if unread:
        place = found.stored[unread[0]].file if unread[0] in found.stored else found.source
        raise ValueError(
            f"{place} holds {_some(unread)}, and {found.model} has no such tensor: config.json belongs to "
            "another checkpoint, or names fewer layers, experts, norms or biases than there are"
        )
    if fields := [name for name in found.fields if not _matches(name, found.irrelevant)]:
        raise ValueError(
            f"{found.source} sets {_some(fields)}, which nobody reads: {found.model} would compute something "
            "else than the file says; use a transformers checkpoint of the model instead"
        )


def _refuse_quantized(found: Incoming, unread: Sequence[str]) -> None:
    """Raises ValueError if weights need scales, and no quantization_config says which."""
    for name in unread:
        scheme = next((scheme for pattern, scheme in _SCALES if pattern.search(name)), None)
        if scheme is not None:
            raise ValueError(
                f"{found.source} holds {name}, which looks like a part of a weight quantized by {scheme}, "
                "and nothing reads it: the quantization_config in config.json is missing, or belongs to "
                "another checkpoint; get the config.json that belongs to this one, or a bfloat16 checkpoint"
            )
    for name, header in found.plain.items():
        if not header.is_float:
            raise ValueError(
                f"{name} is {header.dtype} in {header.file}, and a float is expected: config.json has no "
                "quantization_config that says how it is scaled; get the config.json that belongs to it, or "
                "a bfloat16 checkpoint of the model"
            )


def _without_drafting(names: Iterable[str]) -> list[str]:
    """Returns the names without those of layers that draft: the model verifies what they propose."""
    listed = list(names)
    found = (_DRAFTING.match(name) for name in listed)
    drafting = tuple({match[1] or match[2] or match[0] for match in found if match})
    return [name for name in listed if not name.startswith(drafting)]


def _is_zero_bias(found: Incoming, name: str) -> bool:
    """True for a bias of zeros, as tools write it for layers that have none."""
    if found.read is None or name not in found.stored or not BIAS.search(name):
        return False
    return not bool(found.read(name).any())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _some(names: Iterable[str]) -> str:
    """Returns the first names of several, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return f"{', '.join(ordered[:3])}{more}"
