"""The quantizer that transformers finds under ``quant_method: armllm``."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, revert_weight_conversion
from transformers.quantizers.base import HfQuantizer

from torch_armllm._version import __version__
from torch_armllm.quant.config import ArmInt4Config

if TYPE_CHECKING:
    from torch_armllm.checkpoint.layer_loader import LayerLoader
    from torch_armllm.checkpoint.tensor_headers import TensorHeader
    from torch_armllm.quant.report import LayerRecord, Report

_UNWEIGHTED = (
    "weights were quantized as they were read, without measuring the importance of input channels; "
    "ArmInt4Config(Recipe(importance=True)) measures it, and loads the whole float model first"
)

# Quantizing modules are imported in functions: transformers' registry is still being imported with this file.


class ArmInt4Quantizer(HfQuantizer):
    """Loads a model into packed modules: a float checkpoint layer by layer, a saved one unchanged.

    Attributes:
        report: the report of the loaded model; of a saved model, once it is patched.
    """

    requires_calibration = False
    quantization_config: ArmInt4Config

    def __init__(self, quantization_config: ArmInt4Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.report: Report | None = None
        self._loader: LayerLoader | None = None
        self._headers: dict[str, TensorHeader] = {}

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raises ValueError for any device but the CPU."""
        devices = device_map.values() if isinstance(device_map, dict) else [device_map]
        unsupported = [str(device) for device in devices if str(device) not in ("None", "cpu", "auto")]
        if unsupported:
            raise ValueError(
                f"torch_armllm runs on the CPU; device_map asks for {', '.join(unsupported)}: leave it out"
            )

    def update_device_map(self, device_map: Any) -> Any:
        """Returns a map to the CPU for ``auto``, else the map itself."""
        return {"": "cpu"} if device_map == "auto" else device_map

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        from torch_armllm.checkpoint.formats.third_party_loader import ThirdPartyLoader
        from torch_armllm.checkpoint.layer_loader import LayerLoader
        from torch_armllm.checkpoint.model_fit import check_fit
        from torch_armllm.checkpoint.saved_metadata import check_record
        from torch_armllm.checkpoint.tensor_headers import read_headers
        from torch_armllm.quant.skeleton import build_skeleton, forget_ties

        config = self.quantization_config
        with torch.device("cpu"):
            files = checkpoint_files or []
            self._headers = read_headers(files) if config.stored is None else dict(config.stored)
            if self.pre_quantized:
                build_skeleton(model, config)
                check_record(self._headers, config.modules)
            self._check_names(model)
            check_fit(self._headers, model)
            if self.pre_quantized:
                forget_ties(model)
            elif config.source is not None:
                self._loader = ThirdPartyLoader(model, config)
            elif not config.recipe.importance and config.recipe.bits is None:
                self._loader = LayerLoader(model, config)

    def _check_names(self, model: Any) -> None:
        """Raises ValueError if files hold tensors that the model does not have."""
        from torch_armllm.checkpoint.incoming import ACTIVATION_SCALES, BIAS, Incoming, check_incoming
        from torch_armllm.checkpoint.left_out import LeftOut
        from torch_armllm.checkpoint.model_fit import unread_tensors
        from torch_armllm.checkpoint.model_names import ModelNames
        from torch_armllm.checkpoint.tensor_headers import read_tensor

        headers, config = self._headers, self.quantization_config
        unread = unread_tensors(headers, model, ModelNames(model))
        if config.stored is not None:  # its tensors have names of their own in the files: the reader's work
            unread = [name for name in unread if not BIAS.search(name)]
        left_out = LeftOut(model, config.whole or model.config, headers)
        check_incoming(
            Incoming(
                str(model.config.name_or_path) or "the checkpoint",
                type(model).__name__,
                unread=[name for name in unread if name not in left_out],
                stored=headers,
                irrelevant=() if config.stored is None else (ACTIVATION_SCALES,),
                read=lambda name: read_tensor(headers[name], name),
            )
        )

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """True if a weight is quantized as soon as it is read."""
        return self._loader is not None and self._loader.wants(param_name)

    def get_quantize_ops(self) -> ConversionOps:
        """Returns the operation that hands such weights to the loader."""
        assert self._loader is not None
        return _Take(self._loader)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        from torch_armllm.checkpoint.layer_loader import refuse_missing
        from torch_armllm.checkpoint.loaded_values import check_packed, check_small_tensors
        from torch_armllm.hf.model_kind import kind_of
        from torch_armllm.patching.patch import fuse
        from torch_armllm.quant.attach import attach
        from torch_armllm.quant.inplace import quantize
        from torch_armllm.quant.report import Report
        from torch_armllm.quant.skeleton import finish_skeleton

        config = self.quantization_config
        model.eval()
        model.__dict__.pop("hf_quantizer", None)
        del model.config.quantization_config  # type: ignore[union-attr]  # until it is true
        refuse_missing(model)
        records: list[LayerRecord] | None = None
        config.stored = None
        read_by_layer = self._loader is not None
        check_small_tensors(model, self._file_of)
        if self.pre_quantized:
            check_packed(model, self._file_of)
            finish_skeleton(model)
        elif self._loader is not None:
            records = self._loader.finish()
            self._loader = None
        else:
            records = quantize(model, config.recipe, progress=False)
        attach(model, config, self)
        if config.fuse:
            self.report = fuse(kind_of(model), config.kv_cache_dtype, records)
        elif records is not None:
            self.report = Report(records)
        if self.report is not None and config.source is not None:
            self.report.notes.append(f"weights are as {config.source} stored them")
        elif self.report is not None and read_by_layer:
            self.report.notes.append(_UNWEIGHTED)
        return model

    def _file_of(self, name: str) -> str:
        """Returns the file of a tensor; the checkpoint, for one that transformers renamed."""
        return self._headers[name].file if name in self._headers else "the checkpoint"

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns what ``save_pretrained`` writes; views of merged weights become separate tensors.

        Warns if a rotary buffer was rounded: a folder does not hold it.
        """
        _warn_of_rounded_frequencies(model)
        from torch_armllm.checkpoint.saved_metadata import make_record

        state = {
            name: t
            if t.untyped_storage().nbytes() == t.nbytes
            else t.clone(memory_format=torch.contiguous_format)
            for name, t in model.state_dict().items()
        }
        written = revert_weight_conversion(model, dict(state))
        modules = self.quantization_config.modules or {}
        return state, {"torch_armllm": __version__, **make_record(written, modules)}

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        from torch_armllm.patching.patch import unpatch
        from torch_armllm.patching.state import is_patched
        from torch_armllm.quant.restore import restore

        if is_patched(model):
            unpatch(model)
        restore(model)
        return model.to(dtype)

    def remove_quantization_config(self, model: nn.Module) -> None:
        """Removes the quantization config, so that transformers sees a float model."""
        from torch_armllm.quant.attach import detach

        detach(model)

    def is_serializable(self) -> bool:
        """True: ``save_pretrained`` may be called."""
        return True

    @property
    def is_trainable(self) -> bool:
        """False: packed weights cannot be trained."""
        return False


def _warn_of_rounded_frequencies(model: nn.Module) -> None:
    rounded = [
        (name, buffer.dtype)
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and buffer.dtype in (torch.bfloat16, torch.float16)
    ]
    if rounded:
        name, dtype = rounded[0]
        warnings.warn(
            f"torch_armllm: {name} is {dtype}, but a saved folder does not hold it: the loaded model "
            "computes it in float32, and its logits differ; load the float model with from_pretrained("
            f"dtype={dtype}) instead of model.to({dtype}), which rounds it",
            stacklevel=4,
        )


class _Take(ConversionOps):  # type: ignore[misc]
    """Hands weights to the loader instead of their module."""

    def __init__(self, loader: LayerLoader) -> None:
        self._loader = loader

    def convert(
        self, input_dict: dict[str, Any], *args: Any, missing_keys: set[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        left = {}
        for name, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            if self._loader.wants(name):
                self._loader.take(name, tensor)
                if missing_keys is not None:
                    missing_keys.discard(name)
            else:
                left[name] = value
        return left
