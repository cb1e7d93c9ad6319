"""Mutations of checkpoints that know their structure: configurations, headers, tensors."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

CONTENT = "content"
"""Values of tensors differ: the model may answer otherwise."""
STRUCTURE = "structure"
"""Values of tensors are those of the valid checkpoint."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 5, 8, 16, 48, 64, 128, 2**31, 2**32, 2**63, 2**70, -(2**40)),
    *(
        0.5,
        -1.5,
        1e300,
        float("nan"),
        float("inf"),
        "",
        "x",
        "int4",
        "float16",
        "../../etc/passwd",
        "é" * 300,
    ),
    *([], [1], [1, 2, 3], ["x"], {}, {"a": 1}, [[[]]], {"weights": None}, [None]),
)
SCHEMES = (
    "g32i",
    "g32",
    "g64",
    "g128",
    "row",
    "rowz",
    "g32z",
    "g32zb",
    "g32b",
    "int8",
    "g64z",
    "g32m",
    "tied",
)
DTYPES = (
    "BOOL",
    "U8",
    "I8",
    "F8_E4M3",
    "F8_E5M2",
    "I16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "F64",
    "I64",
    "F4",
    "X",
)
_UNRELATED = ("dtype", "torch_dtype", "transformers_version", "architectures")


def mutate(folder: Path, random_: random.Random) -> str:
    """Mutates a folder in place once or twice; returns `STRUCTURE` or `CONTENT`."""
    count = random_.choice((1, 1, 1, 2))
    before = _tensors(folder) if count == 2 else {}
    kinds = [_mutate_once(folder, random_) for _ in range(count)]
    return CONTENT if CONTENT in kinds or (count == 2 and _differ(before, _tensors(folder))) else STRUCTURE


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of all files that can be read, by name."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except Exception:  # a damaged file is refused as a whole
            continue
    return found


def _differ(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    """True if a tensor has other values, as one that was transposed and then got its shape back."""
    return any(
        one.shape == other.shape and one.dtype == other.dtype and not torch.equal(one, other)
        for name, one in before.items()
        if (other := after.get(name)) is not None
    )


def _mutate_once(folder: Path, random_: random.Random) -> str:
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    choice = random_.random()
    if choice < 0.45:
        return _json(folder / "config.json", random_)
    if choice < 0.5 and index.exists():
        return _json(index, random_)
    file = random_.choice(files)
    if choice < 0.75:
        return _header(file, random_)
    if choice < 0.8:
        return _raw(file, random_)
    return _tensor(file, random_)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        found += _paths(part, (*path, key))
    return found


def _json(file: Path, random_: random.Random) -> str:
    """Changes, deletes, renames or copies a field at any depth."""
    try:
        content = json.loads(file.read_text())
        paths = _paths(content)
        quantized = [path for path in paths if path[0] == "quantization_config"]
    except (ValueError, AttributeError):
        return STRUCTURE
    if not paths:
        return STRUCTURE
    path = random_.choice(quantized if quantized and random_.random() < 0.4 else paths)
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    old, key = parent[path[-1]], path[-1]
    action = random_.random()
    if action < 0.1:
        del parent[key]
    elif action < 0.15 and isinstance(parent, dict):
        parent[random_.choice((f"{key}x", "", "layers", "x.y"))] = parent.pop(key)
    elif action < 0.4 and isinstance(old, (int, float)) and not isinstance(old, bool):
        parent[key] = random_.choice((old + 1, old - 1, old * 2, old // 2, -old, old + 0.5, str(old)))
    elif action < 0.5:
        parent[key] = random_.choice(SCHEMES)
    elif action < 0.6:
        other = content
        for step in random_.choice(paths):
            other = other[step] if isinstance(other, (dict, list)) else other
        parent[key] = json.loads(json.dumps(other))
    else:
        parent[key] = random_.choice(VALUES)
    file.write_text(json.dumps(content))
    chosen = path == ("quantization_config", "scheme") and content.get("model_type") == "gpt_oss"
    return CONTENT if chosen or any(name in _UNRELATED for name in path) else STRUCTURE


def _read(file: Path) -> tuple[dict[str, Any], bytes]:
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    return json.loads(whole[8 : 8 + size]), whole[8 + size :]


def _write(file: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _header(file: Path, random_: random.Random) -> str:
    """Changes names, dtypes, shapes and offsets in a header."""
    try:
        header, data = _read(file)
    except ValueError:
        return STRUCTURE
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return STRUCTURE
    name = random_.choice(names)
    info = header[name]
    if not isinstance(info, dict) or "shape" not in info:
        return STRUCTURE
    kind = STRUCTURE
    action = random_.randrange(9)
    if action == 0:
        del header[name]
    elif action == 1:
        new = random_.choice((f"{name}x", name.replace("layers.0", "layers.7"), "x", random_.choice(names)))
        kind = CONTENT if new in header else STRUCTURE  # the tensor of that name is another now
        header[new] = header.pop(name)
    elif action == 2:
        kind = _same_floats(info["dtype"], new := random_.choice(DTYPES))
        info["dtype"] = new
    elif action == 3:
        shape = info["shape"]
        random_.shuffle(shape)
    elif action == 4:
        info["shape"] = [
            random_.choice((0, 1, 2, 3, 64, 2**31, 2**62, -1)) for _ in range(random_.randrange(5))
        ]
    elif action == 5 and info["shape"]:
        place = random_.randrange(len(info["shape"]))
        info["shape"][place] = max(1, info["shape"][place] // 2)
        info["shape"].insert(0, 2)
    elif action == 6:
        place = random_.randrange(2)
        info["data_offsets"][place] += random_.choice((-8, -1, 1, 8, 2**40, -(2**40)))
    elif action == 7:
        other = header[random_.choice(names)]
        if isinstance(other, dict) and "data_offsets" in info and "data_offsets" in other:
            sizes = {end - begin for begin, end in (info["data_offsets"], other["data_offsets"])}
            kind = CONTENT if len(sizes) == 1 else STRUCTURE  # each has the other's bytes, which fit
            info["data_offsets"], other["data_offsets"] = other["data_offsets"], info["data_offsets"]
    else:
        metadata = header.setdefault("__metadata__", {})
        key = random_.choice(list(metadata) or ["x"])
        metadata[key] = random_.choice(
            ("", "x", "[]", "{}", "[1]", '{"x": 1}', "null", metadata.get(key, "")[:-5])
        )
        if random_.random() < 0.3:
            metadata.pop(key, None)
    _write(file, header, data)
    return kind


def _same_floats(old: str, new: str) -> str:
    """Two float formats of one size look alike."""
    return CONTENT if {old, new} <= {"F16", "BF16"} else STRUCTURE


def _raw(file: Path, random_: random.Random) -> str:
    """Flips bytes of a header, or cuts or extends the file."""
    whole = bytearray(file.read_bytes())
    size = min(int.from_bytes(whole[:8], "little"), len(whole) - 8)
    action = random_.random()
    if action < 0.6 and size > 0:
        for _ in range(random_.choice((1, 1, 4))):
            whole[random_.randrange(8 + size)] ^= 1 << random_.randrange(8)
        file.write_bytes(whole)
        return CONTENT  # a name or a dtype may have become another valid one
    file.write_bytes(whole[: random_.randrange(len(whole))] if action < 0.9 else bytes(whole) + b"\0" * 64)
    return STRUCTURE


def _tensor(file: Path, random_: random.Random) -> str:
    """Replaces, removes or adds a tensor; the file stays well formed."""
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except Exception:
        return STRUCTURE
    if not state:
        return STRUCTURE
    name = random_.choice(list(state))
    value = state[name]
    edits: tuple[Callable[[], Tensor | None], ...] = (
        lambda: None,
        lambda: _spoiled(value, random_),
        lambda: _spoiled(value, random_),
        lambda: _entry_changed(value, random_),
        lambda: _entry_changed(value, random_),
        lambda: value[..., : max(1, value.shape[-1] // 2)] if value.dim() else value,
        lambda: value.t() if value.dim() == 2 and value.shape[0] != value.shape[1] else value[:0],
        lambda: value.flatten(),
        lambda: value[None],
        lambda: value.repeat(2, *(1 for _ in value.shape[1:])) if value.dim() else value,
        lambda: value.to(random_.choice((torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool))),
        lambda: value.contiguous().view(torch.uint8) if value.dim() else value,
    )
    action = random_.randrange(len(edits) + 1)
    if action == len(edits):
        state[random_.choice((name.replace("layers.0", "layers.9"), "model.x.weight", f"{name}.weight"))] = (
            value
        )
        new: Tensor | None = value
    else:
        new = edits[action]()
        state.pop(name)
        if new is not None:
            state[name] = new
    save_file({key: one.clone().contiguous() for key, one in state.items()}, file, metadata)
    return CONTENT if action in (1, 2, 3, 4) else STRUCTURE


def _spoiled(value: Tensor, random_: random.Random) -> Tensor:
    """Returns a tensor with a NaN or an infinity; of integers, with random bytes."""
    spoiled = value.clone()
    if value.numel() and value.is_floating_point():
        wrong = random_.choice((float("nan"), float("inf"), -float("inf")))
        spoiled.view(-1)[random_.randrange(value.numel())] = wrong
    elif value.numel() and value.dtype == torch.uint8:
        at = random_.randrange(max(1, value.numel() - 64))
        spoiled.view(-1)[at : at + 64] = random_.choice((255, 127))
    return spoiled


def _entry_changed(value: Tensor, random_: random.Random) -> Tensor:
    changed = value.clone()
    if value.numel():
        at, other = (random_.randrange(value.numel()) for _ in range(2))
        flat = changed.view(-1)
        choice = random_.random()
        if choice < 0.5 or value.dtype == torch.bool or value.is_floating_point():
            flat[at] = flat[other].clone()
        else:
            bounds = torch.iinfo(value.dtype)
            flat[at] = random_.choice((bounds.min, bounds.max, 0, 1, 97 if bounds.max > 97 else 1))
    return changed


def mutate_gguf(file: Path, random_: random.Random) -> str:
    """Mutates a GGUF file in place: fields, tensor descriptions, bytes of the header or of a tensor."""
    whole = bytearray(file.read_bytes())
    reader: Any = gguf.GGUFReader(file)
    start = int(min(tensor.data_offset for tensor in reader.tensors))
    tensors = {tensor.name: int(tensor.field.offset) for tensor in reader.tensors}
    spans = {tensor.name: (int(tensor.data_offset), int(tensor.n_bytes)) for tensor in reader.tensors}
    keys = {name: int(field.offset) for name, field in reader.fields.items() if "." in name}
    del reader
    action, kind = random_.randrange(7), STRUCTURE
    name = random_.choice(list(tensors))
    at = tensors[name] + 8 + len(name)
    (rank,) = struct.unpack_from("<I", whole, at)
    dims, type_, offset = at + 4, at + 4 + 8 * rank, at + 8 + 8 * rank
    if action == 0:
        place = dims + 8 * random_.randrange(rank)
        (old,) = struct.unpack_from("<Q", whole, place)
        wrong = random_.choice((0, 1, old // 2, old * 2, old + 32, 2**31, 2**40, 2**63))
        struct.pack_into("<Q", whole, place, wrong)
    elif action == 1:
        (old,) = struct.unpack_from("<Q", whole, offset)
        others = [begin - start for begin, _ in spans.values()]
        wrong = random_.choice((old + 32, max(0, old - 32), old + 1, 2**40, 2**64 - 32, *others))
        struct.pack_into("<Q", whole, offset, wrong)
    elif action == 2:
        struct.pack_into("<I", whole, type_, random_.choice((*range(45), 2**31)))
        kind = CONTENT
    elif action == 3:
        struct.pack_into("<I", whole, at, random_.choice((0, 1, 2, 3, 4, 5, 2**31)))
    elif action == 4:
        key = random_.choice(list(keys))
        place = keys[key] + 8 + len(key)
        width = "<I" if random_.random() < 0.6 else "<Q"
        (old,) = struct.unpack_from("<I", whole, place + 4)
        value = random_.choice((0, 1, 2, 3, 8, old * 2, old // 2, old + 1, 2**31, 2**32 - 1)) % 2**32
        struct.pack_into(width, whole, place + random_.choice((0, 4, 4, 4)), value)
    elif action == 5:
        for _ in range(random_.choice((1, 1, 3))):
            whole[random_.randrange(start)] ^= 1 << random_.randrange(8)
        kind = CONTENT  # a type may have become one of the same size
    elif random_.random() < 0.5:
        begin, size = spans[name]
        place = begin + random_.randrange(size) // 2 * 2
        whole[place : place + 2] = struct.pack("<H", random_.choice((0x7C00, 0x7E00, 0xFC00, 0x7F80)))
        kind = CONTENT
    else:
        whole = whole[: random_.randrange(len(whole))]
    file.write_bytes(whole)
    return kind
