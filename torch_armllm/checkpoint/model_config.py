"""Reading of a checkpoint's configuration, and of errors that transformers has with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from torch_armllm.checkpoint.config_fields import check_fields, without_choices
from torch_armllm.checkpoint.named_files import check_named_files
from torch_armllm.checkpoint.source_name import not_found
from torch_armllm.hf.model_kind import is_encoder_decoder
from torch_armllm.hf.token_by_token import check_token_by_token
from torch_armllm.system.extras import naming_extra

MOST_LAYERS = 1000
"""No model has more layers; a damaged config may say billions, and building them would never end."""
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MOST = {"experts": 1 << 16, "heads": 1 << 16, "_dim": 1 << 24}
"""Most that a field with this ending says: transformers makes tables and lists of so many entries."""
_OWN = "torch_armllm."
_CODE = "custom code"


def read_config(source: str) -> PreTrainedConfig:
    """Reads the config.json of a folder or hub name; code of a checkpoint is never run.

    Fields that would choose code or kernels are taken out, with a warning.

    Raises:
        ValueError: a field has a value that transformers cannot use, or the model needs code of its own.
        OSError: there is none, or it is no JSON.
        ImportError: the vision tower needs timm, which is not installed.
    """
    with naming_extra("timm", f"the vision tower of {source}"), config_errors(source), not_found(source):
        fields, _ = PreTrainedConfig.get_config_dict(source)
        check_fields(source, fields)
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False)
        check_sizes(source, config)
    check_named_files(source)
    return without_choices(source, config)


def with_overrides(
    source: str, config: PreTrainedConfig | None, overrides: Mapping[str, Any]
) -> PreTrainedConfig:
    """Returns the configuration that a config.json with other values of some fields would have.

    Args:
        source: a folder or hub name.
        config: of that; None: it is a single file.
        overrides: values by name; objects in objects, such as ``text_config``, are merged.

    Raises:
        ValueError: the source has no config.json, or transformers cannot use a value.
        OSError: config.json cannot be read.
    """
    if config is None:
        raise ValueError(f"hf_overrides replace fields of config.json, and {source} is a single file")
    fields, _ = PreTrainedConfig.get_config_dict(source)
    with config_errors(source):
        merged = _merged(fields, overrides)
        check_fields(source, merged)
        made: PreTrainedConfig = type(config).from_dict(merged)
        check_sizes(source, made)
    return without_choices(source, made)


def _merged(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for name, value in overrides.items():
        before = merged.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(before, value) if both else value  # type: ignore[arg-type]
    return merged


def check_sizes(source: str, config: PreTrainedConfig) -> None:
    """Raises ValueError if the number of layers, heads or experts or a dimension is none that a model has."""
    text = config.get_text_config(decoder=True)
    for name in _LAYERS:
        count = getattr(text, name, None)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            raise ValueError(
                f"{name} is {count!r} in the configuration of {source}, and an integer is expected"
            )
        if count is not None and not 0 < count <= MOST_LAYERS:
            raise ValueError(
                f"{name} is {count} in the configuration of {source}, and 1 to {MOST_LAYERS} is expected"
            )
    for name, value in text.to_dict().items():
        most = next((most for ending, most in _MOST.items() if name.endswith(ending)), None)
        if most is not None and isinstance(value, int) and value > most:
            raise ValueError(
                f"{name} is {value} in the configuration of {source}, and at most {most} is expected"
            )


def check_one_stack(source: str, config: PreTrainedConfig | None) -> None:
    """Raises ValueError if a model has an encoder and a decoder: language models have a decoder only.

    Its class has to generate token by token, too.
    """
    if is_encoder_decoder(config):
        raise ValueError(
            f"{source} is a {getattr(config, 'model_type', 'model')} model of an encoder and a decoder, and "
            "this takes language models: load it with transformers and call torch_armllm.patch on it; for "
            "speech there is torch_armllm.Transcriber"
        )
    if (made := _class_of(config)) is not None:
        check_token_by_token(source, made)


def _class_of(config: PreTrainedConfig | None) -> type[Any] | None:
    """Returns the class of a language model that transformers makes of a configuration; None if none."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            made = auto._model_mapping[type(config)]
            found: type[Any] = made[0] if isinstance(made, tuple) else made
            return found
    return None


@contextmanager
def config_errors(source: str) -> Iterator[None]:
    """Turns what transformers raises over a damaged configuration into a ValueError.

    transformers makes a configuration and a model without looking at the values first, so that a wrong one
    ends in any kind of error.  Errors that this package's own code raises within the block pass unchanged.

    Raises:
        ValueError: transformers cannot use the configuration, or the model needs code of its own.
    """
    try:
        yield
    except (ImportError, MemoryError, OSError):
        raise
    except ValueError as error:
        if _CODE in str(error):
            raise ValueError(
                f"{source} needs code of its own (auto_map in config.json), which is never run: load a model "
                "whose class is in transformers"
            ) from error
        raise
    except Exception as error:
        if _passes_own_code(error.__traceback__):
            raise
        said = str(error).strip().replace("\n", " ") or "no message"
        raise ValueError(
            f"transformers cannot make a model of the configuration of {source} ({type(error).__name__}: "
            f"{said}): a field of it is damaged, or it belongs to another checkpoint"
        ) from error


def _passes_own_code(trace: TracebackType | None) -> bool:
    """True if code of this package, other than the callers of `config_errors`, was running."""
    names: list[Any] = []
    while trace is not None:
        names.append(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    entered = next((at for at, name in enumerate(names) if not name.startswith(_OWN)), len(names))
    return any(name.startswith(_OWN) for name in names[entered:])
