"""The loop of ``generate`` for greedy and sampled tokens, on a patched model's plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from torch_armllm.hf.cache_names import cache_of, taken_names, usual_name
from torch_armllm.hf.output_layer import output_layer_of
from torch_armllm.patching.cache.paged_cache import PagedCache
from torch_armllm.patching.forwards.watched_modules import has_hooks
from torch_armllm.patching.generation.decode_steps import DecodeSteps
from torch_armllm.patching.generation.token_rows import TokenRows
from torch_armllm.patching.lm_head import LMHead, weights_of
from torch_armllm.plan.fused_head import FusedHead
from torch_armllm.plan.native import native_plan

if TYPE_CHECKING:
    from torch_armllm.patching.forwards.decoder_calls import DecoderCalls
    from torch_armllm.patching.forwards.forward import PatchedForward

_KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"}
"""Arguments of a step that the loop continues by itself, beside the cache; models with others use
transformers' loop."""


class TokenLoop:
    """transformers' sampling loop, without transformers between the steps.

    transformers checks and prepares the call, computes the prompt, and makes the logits processors and
    stopping criteria; from the second token on, steps run on the plan.  Tokens, scores, streams and the
    cache are those of transformers' own loop, which still runs what this one does not serve.

    Args:
        model: a patched causal language model.
        forward: the patched forward of its base model.
    """

    def __init__(self, model: Any, forward: PatchedForward[DecoderCalls]) -> None:
        self._forward = forward
        self._weights = None
        if (plan := native_plan(forward.plan)) is not None:
            program = plan.program
            like = torch.empty(0, program.columns, dtype=program.dtype)
            self._weights = LMHead(model, forward).weights(like)
        self._idle: list[FusedHead] = []

    def serves(self, model: Any) -> bool:
        """True if the output layer is quantized, as `patch` left it, and has nothing after it.

        The product of a float layer rounds differently in a batch of another size.  Hooks run in calls only.
        """
        layer = output_layer_of(model)
        if any(map(has_hooks, (model, self._forward.base, layer))):
            return False
        mine, now = self._weights, weights_of(layer)
        if mine is None or mine.scheme is None or now is None:
            return False
        same = now.weight.data_ptr() == mine.weight.data_ptr()
        same = same and (now.digits, now.rotated) == (mine.digits, mine.rotated)
        return same and (now.bias is None) == (mine.bias is None)

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Generates tokens; the arguments and the result are those of transformers' decoding methods."""
        if synced_gpus or not self._knows(generation_config, model_kwargs):
            rest = (logits_processor, stopping_criteria, generation_config)
            return type(model)._sample(model, input_ids, *rest, synced_gpus, streamer, **model_kwargs)
        generation = _Generation(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
        output = model._prefill(input_ids, generation_config, model_kwargs)
        output.logits = output.logits[:, -1:].clone()  # those of a prompt may be large
        finished = generation.choose(output.logits[:, -1], None)
        cache = cache_of(output)
        head = None
        if not finished and type(cache) is PagedCache and cache.next_positions is not None:
            head = self._head()
        if head is not None:
            try:
                steps = DecodeSteps(self._forward.calls, head, cache)
                while not finished and steps.has_room:
                    result = steps.decode(generation.last)
                    finished = generation.choose(result.logits, result.best)
            finally:
                self._idle.append(head)
        if not finished:
            cache = _continue(model, generation, output, model_kwargs)
        return generation.result(cache)

    def _knows(self, config: Any, kwargs: dict[str, Any]) -> bool:
        """True if the loop knows every setting and argument of a call."""
        records = config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states)
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        return (
            not records
            and bool(kwargs.get("use_cache"))
            and config.prefill_chunk_size is None
            and not getattr(config, "is_assistant", False)
            and (positions is None or positions.dim() == 2)
            and (mask is None or mask.dim() == 2)
            and _KNOWN.union(taken_names()).issuperset(
                name for name, value in kwargs.items() if value is not None
            )
        )

    def _head(self) -> FusedHead:
        """Returns a head that no other thread uses."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._new_head()

    def _new_head(self) -> FusedHead:
        weights, plan = self._weights, native_plan(self._forward.plan)
        assert weights is not None and plan is not None
        return FusedHead(plan, weights, weights.out_features)


def _continue(model: Any, generation: _Generation, output: Any, model_kwargs: dict[str, Any]) -> Any:
    """Goes on by the model's ``forward``, past the tokens that a plan supports or without a paged cache.

    Args:
        model: the model.
        generation: the call; at least one token is chosen.
        output: the model's for the prompt.
        model_kwargs: what transformers passes from step to step.

    Returns:
        The cache.
    """
    chosen = generation.rows.length - generation.prompt_length
    finished = False
    while not finished:
        model_kwargs = model._update_model_kwargs_for_generation(
            output, model_kwargs, is_encoder_decoder=False, num_new_tokens=chosen
        )
        inputs = model.prepare_inputs_for_generation(
            generation.rows.ids, next_sequence_length=1, **model_kwargs
        )
        output = model(**inputs, return_dict=True)
        finished = generation.choose(output.logits[:, -1], None)
        chosen = 1
    return cache_of(output)


class _Generation:
    """One call: its tokens, and the choice of each next one."""

    def __init__(
        self, prompt: Tensor, logits_processor: Any, stopping_criteria: Any, config: Any, streamer: Any
    ) -> None:
        pad = getattr(config, "_pad_token_tensor", None)
        self.prompt_length = prompt.shape[1]
        self.rows = TokenRows(prompt, stopping_criteria, None if pad is None else int(pad))
        self.streamer = streamer
        self.last: list[int] = []
        self._processors = logits_processor
        self._samples = bool(config.do_sample)
        self._returns_dict = bool(config.return_dict_in_generate)
        self._scores: list[Tensor] | None = [] if self._returns_dict and config.output_scores else None
        self._logits: list[Tensor] | None = [] if self._returns_dict and config.output_logits else None
        self._only_best = not (self._samples or self._processors or self._scores is not None)

    def choose(self, logits: Tensor, best: Any) -> bool:
        """Chooses a token for each row; returns True if all rows have ended.

        Args:
            logits: ``(batch, vocab_size)``.
            best: the most probable tokens, if they are known.
        """
        rows = self.rows
        if best is not None and self._only_best and self._logits is None:
            tokens = rows.padded(best)
        else:
            tokens = rows.padded(self._chosen(logits.to(torch.float32, copy=True)))
        column = torch.tensor(tokens)
        self.last = tokens
        finished = rows.append(column, tokens, self._seen)
        if self.streamer is not None:
            self.streamer.put(column)
        return finished

    @property
    def _seen(self) -> tuple[Tensor, ...] | None:
        return None if self._scores is None else tuple(self._scores)

    def _chosen(self, logits: Tensor) -> list[int]:
        scores = self._processors(self.rows.ids, logits) if self._processors else logits
        if self._scores is not None:
            self._scores.append(scores)
        if self._logits is not None:
            self._logits.append(logits)
        if not self._samples:
            best: list[int] = scores.argmax(-1).tolist()
            return best
        drawn: list[int] = torch.multinomial(torch.softmax(scores, -1), 1)[:, 0].tolist()
        return drawn

    def result(self, cache: Any) -> Any:
        """Returns what ``generate`` returns."""
        if self.streamer is not None:
            self.streamer.end()
        if not self._returns_dict:
            return self.rows.ids
        return GenerateDecoderOnlyOutput(
            sequences=self.rows.ids,
            scores=self._seen,
            logits=None if self._logits is None else tuple(self._logits),
            **{usual_name(): cache},
        )
