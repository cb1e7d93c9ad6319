"""Ways of calling a model of an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from torch_armllm.capture.sample import sample_ids
from torch_armllm.capture.step_inputs import step_arguments
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.patching.trial.judge import Judge, Results, centered
from torch_armllm.patching.trial.token_ways import TokenWays, padded_pair

_TOKENS, _SHORTER = 6, 4


class StackWays(TokenWays):
    """The ways of `TokenWays` for a decoder's tokens, and padded texts of the encoder.

    Args:
        kind: of a patched model.
        judge: compares.
    """

    ids_name = "decoder_input_ids"

    def __init__(self, kind: ModelKind, judge: Judge) -> None:
        super().__init__(kind, judge)
        self._takes_ids = kind.encoder.takes_ids
        reader = kind.encoder if self._takes_ids else kind.decoder
        self._texts = sample_ids(reader.vocab_size, 2 * _TOKENS).view(2, _TOKENS)
        self._states: Tensor | None = None
        if not self._takes_ids:  # an encoder of audio, whose shortest input may be long
            self._states = step_arguments(kind.decoder, self._texts)["encoder_hidden_states"]

    def arguments(self) -> dict[str, Any]:
        """Returns the encoder's texts, or its results."""
        if self._states is not None:
            return {"encoder_outputs": BaseModelOutput(last_hidden_state=self._states)}
        return {"input_ids": self._texts}

    def generate(self) -> Tensor | None:
        """Returns what ``generate`` returns for the encoder's texts; None if the encoder takes none."""
        if not self._takes_ids:
            return None
        generated: Tensor = self.model.generate(**self.arguments())
        return generated

    def padded_faults(self) -> Iterator[str | None]:
        """Yields the fault of padded texts of the encoder."""
        if self._takes_ids:
            yield self.judge.fault("a pair of padded texts", self._padded_texts)

    def _padded_texts(self) -> Results:
        texts, mask = padded_pair(self.kind, self._texts, _SHORTER, is_left=False)
        ids = self._ids[:, :_SHORTER]
        return list(centered(self.model(input_ids=texts, attention_mask=mask, decoder_input_ids=ids).logits))
