"""Reading of a GGUF file's matrices as integers, or as floats."""

from __future__ import annotations

from torch import Tensor

from torch_armllm.checkpoint.formats.gguf_file import GgufFile
from torch_armllm.checkpoint.formats.gguf_types import scheme_of, with_zero_offsets
from torch_armllm.checkpoint.formats.gguf_values import Values
from torch_armllm.checkpoint.formats.integer_weight import IntegerWeight, stacked
from torch_armllm.checkpoint.formats.requantizer import Requantizer

_FLOATS = ("F32", "F16", "BF16", "F64")
_NARROW_BITS = 4.4
"""Types with fewer bits per weight are rounded to 4 bits, others to 8."""


class WeightReader:
    """Reads tensors in transformers' order of rows and columns."""

    def __init__(self, file: GgufFile, values: Values, requantizer: Requantizer, dequantize: bool) -> None:
        self._file, self._values, self._requantizer = file, values, requantizer
        self._dequantize = dequantize

    def scheme(self, name: str) -> str | None:
        """Returns the scheme of a tensor: the smallest that holds it exactly; None if it stays floats."""
        kind = self._file.type_name(name)
        shape = self._file.shape(name)
        if self._dequantize or kind in _FLOATS or len(shape) < 2 or shape[-2] == 1:
            return None
        return scheme_of(kind) or ("g32m" if self._file.bits(name) < _NARROW_BITS else "int8g32")

    def read(self, name: str, scheme: str | None) -> IntegerWeight | Tensor:
        """Reads a tensor into a scheme; None: as floats."""
        file = self._file
        file.release()  # the tensors before it are packed
        kind = file.type_name(name)
        if scheme is None:
            return self._values.floats(name, file.floats(name))
        exact = scheme_of(kind)
        if exact == scheme:
            weight = file.integers(name)
        elif exact is not None and f"{exact}m" == scheme:
            weight = IntegerWeight(with_zero_offsets(file.integers(name).quantized))
        else:
            weight = self._requantized(name, scheme, kind)
        return self._values.integers(name, weight) if len(weight.shape) == 2 else weight

    def _requantized(self, name: str, scheme: str, kind: str) -> IntegerWeight:
        """Requantizes a tensor of a type that no scheme holds, a few rows at a time."""
        file, (*experts, rows, columns) = self._file, self._file.shape(name)
        if not experts:
            return self._requantizer.requantize_rows(
                lambda part: file.floats(name, part), (rows, columns), scheme, kind
            )
        matrices = (file.floats(name, slice(expert, expert + 1))[0] for expert in range(experts[0]))
        return stacked([self._requantizer.requantize(expert, scheme, kind) for expert in matrices])
