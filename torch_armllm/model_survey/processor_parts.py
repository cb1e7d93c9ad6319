"""Processors of tiny models, made offline from the classes that transformers maps to a family."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from transformers.utils import is_torchvision_available

from torch_armllm.model_survey.tiny_tokenizers import WishingTokenizer, literal_tokens, tiny_tokenizer
from torch_armllm.model_survey.tiny_towers import IMAGE_SIZE, PATCH_SIZE, PINPOINTS

_AREA = 4096
"""A larger size counts pixels, not edges."""
_EDGES = ("size", "crop_size", "max_image_size", "high_res_size", "tile_size", "video_size")
_ALIASES = {"img_size": "image_size", "pooling_ratio": "projector_pooling_ratio"}
"""Attributes of configurations by the arguments of processors that name them otherwise."""
_TIMES = ("temporal_patch_size", "patch_temporal", "temporal_merge_size")
_MERGES = ("spatial_merge_size", "merge_size", "merge_kernel_size")
_BORROWED = {
    "cosmos3_omni": "qwen3_vl",
    "fast_vlm": "llava",
    "glm_ocr": "glm46v",
    "glmga": "glm46v",
    "kosmos-2": "kosmos2",
    "kosmos-2.5": "kosmos2_5",
}
"""Families whose checkpoints name the processor of another, which transformers does not map."""


def processor_class(config: Any) -> Any:
    """Returns the class of the processor of a configuration.

    Raises:
        ValueError: transformers has none.
    """
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES as names
    from transformers.models.auto.processing_auto import processor_class_from_name

    for family in _families(config):
        if (name := names.get(family)) is not None and (kind := processor_class_from_name(name)) is not None:
            return kind
    for family in _families(config):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"transformers.models.{family}.processing_{family}")
            return next(v for n, v in vars(module).items() if n in module.__all__ and n.endswith("Processor"))
    raise ValueError(f"transformers maps no processor to {config.model_type}")


def _families(config: Any, processor: Any = None) -> list[str]:
    """Returns the families by which parts are looked for: its own, its whole's, the lender's."""
    own = config.model_type
    of = [] if processor is None else [processor.__module__.split(".")[-2]]
    found = [own, type(config).__module__.split(".")[-2], _BORROWED.get(own), *of]
    return [family for family in dict.fromkeys(found) if family is not None]


def _image_processor_class(families: Iterable[str]) -> Any:
    from transformers.models.auto import image_processing_auto as auto

    backends = ("torchvision", "pil") if is_torchvision_available() else ("pil",)
    for family in families:
        names = auto.IMAGE_PROCESSOR_MAPPING_NAMES.get(family) or {}
        for backend in backends:
            if (name := names.get(backend)) is not None:
                return auto.get_image_processor_class_from_name(name)
    raise ValueError(f"transformers maps no image processor to {', '.join(families)}{_WITHOUT}")


def _video_processor_class(families: Iterable[str]) -> Any:
    from transformers.models.auto import video_processing_auto as auto

    for family in families:
        if (name := (auto.VIDEO_PROCESSOR_MAPPING_NAMES.get(family) or {}).get("torchvision")) is not None:
            return auto.video_processor_class_from_name(name)
    raise ValueError(f"transformers maps no video processor to {', '.join(families)}{_WITHOUT}")


def _feature_extractor_class(families: Iterable[str]) -> Any:
    from transformers.models.auto import feature_extraction_auto as auto

    for family in families:
        if (name := auto.FEATURE_EXTRACTOR_MAPPING_NAMES.get(family)) is not None:
            return auto.feature_extractor_class_from_name(name)
    raise ValueError(f"transformers maps no feature extractor to {', '.join(families)}")


_WITHOUT = "" if is_torchvision_available() else " without torchvision"


def configs_of(config: Any) -> Iterator[Any]:
    """Yields a configuration and its parts, outer ones first."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if hasattr(part, "to_diff_dict"):
            yield from configs_of(part)


def _first(configs: Iterable[Any], name: str) -> Any:
    """Returns the first value of an attribute that is not None."""
    return next((value for each in configs if (value := getattr(each, name, None)) is not None), None)


def _edge(value: Any) -> int:
    return int(value[0] if isinstance(value, (list, tuple)) else value)


def _tower_sizes(config: Any) -> dict[str, int]:
    """Returns the sizes of a configuration's vision tower by which images are cut."""
    towers = [each for each in configs_of(config) if getattr(each, "patch_size", None)]
    patch = _edge(_first(towers, "patch_size") or PATCH_SIZE)
    edge = _edge(_first(towers, "image_size") or IMAGE_SIZE)
    merges = (_first([*towers, config], name) for name in _MERGES)
    merge = _edge(next(filter(None, merges), 1))
    patches = dict.fromkeys(("patch_size", "encoder_patch_size", "vision_patch_size"), patch)
    return {**patches, "image_size": edge, "merge_size": merge}


def _image_arguments(kind: Any, config: Any) -> dict[str, Any]:
    """Returns arguments of an image or a video processor, for images of a tiny tower."""
    sizes = _tower_sizes(config)
    edge, unit = sizes["image_size"], sizes["patch_size"] * sizes["merge_size"]
    arguments: dict[str, Any] = {}
    for name, default in _defaults_of(kind).items():
        if name in _EDGES and default:
            arguments[name] = _sized(default, edge, unit)
        elif name in ("min_pixels", "max_pixels") and isinstance(default, int):
            arguments[name] = unit**2 if name == "min_pixels" else 16 * unit**2
        elif name == "image_grid_pinpoints":
            arguments[name] = PINPOINTS
        elif name == "overlap_margins" and edge // sizes["patch_size"] <= 2 * sum(default):
            arguments[name] = [1, 1]  # of patches: a crop must show more than what it shares
        elif name == "temporal_patch_size" and not any(_first(configs_of(config), each) for each in _TIMES):
            arguments[name] = 1  # the tower reads frames one by one
        elif name in sizes:
            arguments[name] = sizes[name]
        elif isinstance(default, int) and not isinstance(default, bool):
            found = _first(configs_of(config), name)
            if isinstance(found, int):
                arguments[name] = found
    return arguments


def _defaults_of(kind: Any) -> dict[str, Any]:
    """Returns what a class of image processors can be given, with its defaults."""
    given = {name: each.default for name, each in inspect.signature(kind.__init__).parameters.items()}
    names = set(given) - {"self", "kwargs"}
    for each in kind.__mro__:
        for base in getattr(vars(each).get("valid_kwargs"), "__mro__", ()):
            names |= set(vars(base).get("__annotations__", {}))
        names |= set(getattr(vars(each).get("valid_kwargs"), "__annotations__", {}))
    found = {name: getattr(kind, name, given.get(name)) for name in sorted(names)}
    late = vars(kind()) if None in (found.get("size", 0), found.get("crop_size", 0)) else {}  # set when made
    found |= {name: late[name] for name in found if found[name] is None and late.get(name) is not None}
    return {name: value for name, value in found.items() if value is not inspect.Parameter.empty}


def _sized(default: Any, edge: int, unit: int) -> Any:
    if not hasattr(default, "keys"):
        return edge if isinstance(default, int) else default
    areas = any((default[key] or 0) > _AREA for key in default)
    values = {"shortest_edge": unit**2, "longest_edge": 16 * unit**2} if areas else {}
    return {key: values.get(key, edge) for key in default if default[key] is not None}


def tiny_processor(config: Any, **arguments: Any) -> Any:
    """Returns the processor of a tiny configuration, with a tokenizer of its own.

    Args:
        config: the configuration.
        arguments: of the processor, in place of those that are found.

    Raises:
        ValueError: transformers has no processor for it, or none without packages that are missing.
    """
    kind = processor_class(config)
    wishes = _wishes(kind, config, arguments)
    return _made(kind, config, tiny_tokenizer(wishes, literal_tokens(kind)), arguments)


def _wishes(kind: Any, config: Any, arguments: dict[str, Any]) -> dict[str, str]:
    """Returns the special tokens that a processor needs, by trying: its errors name what is missing."""
    names: set[str] = set()
    while True:
        wishing = WishingTokenizer(sorted(names))
        try:
            processor = _made(kind, config, wishing, arguments)
            missing = {
                name for name, value in vars(processor).items() if name.endswith("_token") and not value
            }
        except (AttributeError, ValueError) as error:
            missing = set(re.findall(r"(\w+_token)(?:_ids?)?\b", str(error)))
            if not missing - names:
                raise
        if not missing - names:
            return dict(wishing.wishes)
        names |= missing


def _made(kind: Any, config: Any, tokenizer: Any, arguments: dict[str, Any]) -> Any:
    given: dict[str, Any] = {}
    attributes = kind.get_attributes()
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name in attributes:
            given[name] = _part(name, config, _families(config, kind), tokenizer)
        elif name in arguments:
            given[name] = arguments[name]
        elif name not in ("self", "kwargs", "chat_template") and _is_size(parameter.default):
            found = _first(configs_of(config), _ALIASES.get(name, name))
            given[name] = found if found is None or isinstance(found, str) else _edge(found)
    return kind(**{name: value for name, value in given.items() if value is not None})


def _is_size(default: Any) -> bool:
    return default is None or (isinstance(default, int) and not isinstance(default, bool))


def _part(name: str, config: Any, families: list[str], tokenizer: Any) -> Any:
    if "tokenizer" in name:
        return tokenizer
    if "image" in name or "video" in name:
        kind = (_image_processor_class if "image" in name else _video_processor_class)(families)
        images = kind(**_image_arguments(kind, config))
        sizes = _tower_sizes(config)
        merge = _first(configs_of(config), "downsample_factor")
        if merge and hasattr(images, "max_patches") and "patch_size" not in images.to_dict():
            images.patch_size = sizes["image_size"] // (sizes["patch_size"] * merge)  # tokens a side
        images.image_seq_length = (
            sizes["image_size"] // sizes["patch_size"]
        ) ** 2  # some processors look for it
        return images
    kind = _feature_extractor_class(families)
    return kind(**_audio_arguments(kind, config))


def _audio_arguments(kind: Any, config: Any) -> dict[str, Any]:
    """Returns arguments of a feature extractor, for sound of a tiny tower."""
    names = inspect.signature(kind.__init__).parameters
    found: dict[str, Any] = {}
    bins = [_first(configs_of(config), name) for name in ("num_mel_bins", "n_mel_bins", "input_feat_size")]
    if "feature_size" in names and any(bins):
        found["feature_size"] = next(filter(None, bins))
    if "chunk_length" in names and (most := _first(configs_of(config), "max_source_positions")) is not None:
        found["chunk_length"] = max(1, 2 * most // 100)
    return found
