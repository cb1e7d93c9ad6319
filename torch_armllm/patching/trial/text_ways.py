"""Ways of calling a model that predicts no tokens: an encoder or a bare decoder, or what is made of one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from torch_armllm.capture.sample import sample_ids
from torch_armllm.hf.cache_names import CACHE_NAMES
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.patching.trial.judge import Judge, Results, tensors_of
from torch_armllm.patching.trial.token_ways import padded_pair

_TOKENS, _SHORTER = 8, 5


class TextWays:
    """A text, padded pairs, and a loop with the returned cache if there is one.

    Args:
        kind: of a patched model.
        judge: compares.
    """

    def __init__(self, kind: ModelKind, judge: Judge) -> None:
        self._model = kind.model
        self._kind = kind
        self._inner = f"the last hidden states of its {type(kind.base).__name__}"
        self._judge = judge
        self._ids = sample_ids(kind.vocab_size, 2 * _TOKENS).view(2, _TOKENS)

    def faults(self) -> Iterator[str | None]:
        """Yields the fault of each way; None if it has none."""
        with self._judge.by_modules():
            expected = self._model(input_ids=self._ids)
        yield self._text_fault(tensors_of(expected))
        for side in ("left", "right"):
            yield self._judge.fault(f"a pair padded on the {side}", partial(self._padded, side == "left"))
        hidden = tensors_of(expected).get("last_hidden_state")
        for name in CACHE_NAMES:
            if hidden is not None and getattr(expected, name, None) is not None:
                step = [hidden[:, -1]]
                yield self._judge.fault(f"a loop with {name}", partial(self._loop, name), step)

    def _text_fault(self, expected: dict[str, Tensor]) -> str | None:
        """Returns what the model does with a text but to read the last hidden states; None if nothing."""
        try:
            found = tensors_of(self._model(input_ids=self._ids))
        except Exception as error:  # noqa: BLE001 - it may fail in any way where a result is missing
            return f"{self._kind.name} reads more than {self._inner}: {error}"
        for name, value in expected.items():
            if name not in found:
                return f"{self._kind.name} returns {name}, which no plan computes"
            if self._judge.is_far([found[name].reshape(1, -1)], [value.reshape(1, -1)]):
                return f"{self._kind.name} computes another {name} from {self._inner}"
        return None

    def _padded(self, is_left: bool) -> Results:
        ids, mask = padded_pair(self._kind, self._ids, _SHORTER, is_left)
        kept = mask != 0
        found = []
        for _, value in sorted(tensors_of(self._model(input_ids=ids, attention_mask=mask)).items()):
            if value.shape[:2] == ids.shape:
                found.append(value[kept].reshape(1, -1))
            elif not is_left:  # of padding on the left, heads that read position 0 make something by modules
                found.append(value.reshape(1, -1))
        return found

    def _loop(self, name: str) -> Results:
        out = self._model(input_ids=self._ids[:, :-1], use_cache=True)
        step = self._model(input_ids=self._ids[:, -1:], use_cache=True, **{name: getattr(out, name)})
        return [step.last_hidden_state[:, -1].float()]
