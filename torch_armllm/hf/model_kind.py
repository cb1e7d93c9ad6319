"""The kind of a model: what of it a plan stands for, and what a step is given.  Found once, and carried."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch_armllm.hf.base_model import base_model_of, first_position_of, max_length_of, position_limit
from torch_armllm.hf.output_layer import output_layer_of
from torch_armllm.hf.token_by_token import check_token_by_token

_TOKEN_INPUTS = {"token_type_ids": "type_vocab_size"}
"""Arguments of base models with a number for each token, and the field of the configuration that counts the
numbers."""


@dataclass(frozen=True)
class TokenInput:
    """An input of a step beside token ids and positions: a number for each token, 0 where none is given.

    Attributes:
        argument: its name in the base model's ``forward``.
        count: numbers are less.
    """

    argument: str
    count: int


@dataclass(frozen=True)
class ModelKind:
    """The kind of a model.

    Attributes:
        model: the model.
        base: its part from token ids to hidden states, which a plan stands for; see `base_model_of`.
        generates: it has a ``generate`` of its own.
        predicts_tokens: it predicts next tokens; False for encoders, bare decoders and what is made of them.
        has_two_stacks: it generates with a decoder that attends to an encoder's tokens.
        takes_ids: its inputs are token ids.
        attends_to_encoder: it is a decoder whose steps are given what an encoder has computed.
        token_input: a further input of a step; None for most models.
    """

    model: Any
    base: Any
    generates: bool = False
    predicts_tokens: bool = False
    has_two_stacks: bool = False
    takes_ids: bool = True
    attends_to_encoder: bool = False
    token_input: TokenInput | None = None

    @property
    def name(self) -> str:
        """Name of the model's class."""
        return type(self.model).__name__

    @property
    def is_bare(self) -> bool:
        """True if the model is its base model."""
        return self.base is self.model

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.base.get_input_embeddings().num_embeddings)

    @cached_property
    def first_position(self) -> int:
        """Position id of the first token."""
        return first_position_of(self.base)

    @property
    def position_limit(self) -> int | None:
        """Most positions; None if there is no limit.  The configuration of a loaded model may change."""
        return position_limit(self.base.config)

    @property
    def stated_positions(self) -> int | None:
        """Most positions by the configuration, whatever the rotary embedding does; None if it states none."""
        return getattr(self._text_config, "max_position_embeddings", None)

    @property
    def hidden_size(self) -> int | None:
        """Width of the hidden states; None if the configuration does not say."""
        return getattr(self._text_config, "hidden_size", None)

    @property
    def pad_token(self) -> int | None:
        """Token id of padding by the configuration; None if it names none."""
        return getattr(self._text_config, "pad_token_id", None)

    @property
    def family(self) -> str:
        """Model type of transformers; empty if the configuration has none."""
        return str(getattr(self.model.config, "model_type", ""))

    @property
    def sees(self) -> bool:
        """True if it has a vision tower."""
        return getattr(self.model.config, "vision_config", None) is not None

    @property
    def chunk_size(self) -> int | None:
        """Size of the chunks of attention; None: it is not chunked."""
        return max_length_of(self.base)

    @cached_property
    def prompts_look_ahead(self) -> bool:
        """True if all tokens of a prompt with images attend to each other, and later ones to the earlier."""
        return self.sees and getattr(self._text_config, "use_bidirectional_attention", None) is True

    @cached_property
    def encoder(self) -> ModelKind:
        """The kind of the encoder of a model of two stacks."""
        return kind_of(self.model.get_encoder())

    @cached_property
    def decoder(self) -> ModelKind:
        """The kind of the decoder of a model of two stacks."""
        return replace(kind_of(self.model.get_decoder()), attends_to_encoder=True)

    @property
    def _text_config(self) -> Any:
        return self.model.config.get_text_config()

    def check(self) -> None:
        """Raises ValueError unless a model predicts tokens, or is made of one decoder or encoder of text.

        Models of an encoder and a decoder have to generate; all that generate have to do so token by token.
        """
        check_token_by_token("this model", type(self.model))
        if self.predicts_tokens or self.has_two_stacks:
            return
        if is_encoder_decoder(self.model.config) or not self.takes_ids:
            raise ValueError(
                f"{self.name} is neither a causal language model nor a decoder or encoder of text, nor made "
                "of one: load it with AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq,"
                " AutoModel, AutoModelForSequenceClassification, "
                "…ForTokenClassification or, of an encoder, …ForMaskedLM"
            )


def is_encoder_decoder(config: Any) -> bool:
    """True for the configuration of a model of an encoder and a decoder."""
    return bool(getattr(config, "is_encoder_decoder", False))


def kind_of(model: Any) -> ModelKind:
    """Returns the kind of a transformers model, or of modules that stand for a base model."""
    base = base_model_of(model)
    can_generate = getattr(model, "can_generate", None)
    generates = can_generate is not None and bool(can_generate())
    has_two_stacks = generates and is_encoder_decoder(model.config)
    has_head = generates and base is not model and output_layer_of(model) is not None
    return ModelKind(
        model=model,
        base=base,
        generates=generates,
        predicts_tokens=has_head and not has_two_stacks,
        has_two_stacks=has_two_stacks,
        takes_ids="input_ids" in inspect.signature(model.forward).parameters,
        token_input=_token_input_of(base),
    )


def _token_input_of(base: Any) -> TokenInput | None:
    """Returns the further input of an encoder's steps; decoders of the same families are given none."""
    taken = inspect.signature(base.forward).parameters
    for argument, field in _TOKEN_INPUTS.items():
        count = getattr(base.config, field, None)
        if argument in taken and isinstance(count, int) and count > 0:
            return None if getattr(base.config, "is_decoder", False) else TokenInput(argument, count)
    return None
