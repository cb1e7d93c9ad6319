"""Computes the steps of models without a plan: one sequence after another, by the model's own forward."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, MutableMapping
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache

from torch_armllm.engine.errors import OnFailure
from torch_armllm.engine.execution.message import Message
from torch_armllm.engine.execution.thread_team import ThreadTeam
from torch_armllm.engine.reports.trace import NO_TRACE, Trace
from torch_armllm.engine.request import Sequence, Status
from torch_armllm.engine.scheduling.step import Scheduled, Step
from torch_armllm.hf.cache_names import STATE_NAMES, cache_argument
from torch_armllm.plan.step import Plan, StepResult


class Text:
    """State of a model after the first ``length`` tokens of a sequence, as arguments of its own forward."""

    def __init__(self, arguments: dict[str, Any], length: int) -> None:
        self.arguments = arguments
        self.length = length


class ModuleRunner:
    """Counterpart of `PlanRunner` for models without a plan, such as those with a recurrent state.

    Each sequence has the cache that the model itself creates. A prompt is prefilled in one piece, when its
    last token is scheduled: not every model can continue a recurrent state in the middle of a prompt. Blocks
    are only counted, so requests share nothing; sequences of the same request start from copies of the
    prompt's cache.

    Args:
        model: a causal language model.
        block_size: positions per block, as the scheduler counts them.
        trace: records the phases of steps.
        team: compute threads; None: torch's own.
    """

    kv_bytes: int = 0
    """Always 0: the model's own caches are not counted."""
    stages: int = 1
    """One step at a time."""
    plan: Plan | None = None
    """There is none."""

    def release_cache(self) -> int:
        """Releases nothing: the model's own caches end with their sequences."""
        return 0

    def rows_are_exact(self) -> bool:
        """Always False: nothing is known of other modules' arithmetic."""
        return False

    def on_failure(self, method: OnFailure) -> None:
        """Does nothing: no other process computes with it."""

    def tell(self, messages: Iterable[Message]) -> None:
        """Does nothing: no other process computes with it."""

    def __init__(
        self, model: Any, block_size: int = 32, trace: Trace = NO_TRACE, team: ThreadTeam | None = None
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self._trace = trace
        self._at_work = nullcontext() if team is None else team.at_work()
        self._parameters = set(inspect.signature(model.forward).parameters)
        self._texts: MutableMapping[Sequence, Text] = WeakKeyDictionary()
        self._logits_of_step: Tensor | None = None

    def begin(self, step: Step, best: bool = False) -> None:
        """Computes a step; see `PlanRunner.begin`."""
        self._logits_of_step = self.execute(step)

    def finish(self) -> StepResult:
        """Returns the logits of the step; the most probable tokens are never known."""
        logits, self._logits_of_step = self._logits_of_step, None
        assert logits is not None
        return StepResult(logits)

    @torch.no_grad()
    def execute(self, step: Step) -> Tensor:
        """Computes a step; see `PlanRunner.execute`."""
        assert not step.swaps_out and not step.swaps_in
        with self._at_work:
            return self._compute(step)

    def _compute(self, step: Step) -> Tensor:
        self._forget(step)
        for s in step.scheduled:
            if s.start and s.sequence not in self._texts:
                self._fork(s)
        self._trace.mark("prepare")
        logits = [self._logits(s) for s in step.scheduled if s.logit_positions]
        self._trace.mark("modules")
        return torch.cat(logits) if logits else torch.empty(0, self.vocab_size)

    def _forget(self, step: Step) -> None:
        for sequence in [a for a in self._texts if a.status is Status.FINISHED]:
            del self._texts[sequence]
        for sequence in [*step.preempted, *(s.sequence for s in step.scheduled if s.start == 0)]:
            self._texts.pop(sequence, None)

    def _fork(self, s: Scheduled) -> None:
        """Copies the state of another sequence of the request, before that sequence is computed further."""
        for other in s.sequence.request.sequences:
            text = self._texts.get(other)
            if text is not None and text.length == s.start:
                self._texts[s.sequence] = copy.deepcopy(text)
                return

    def _logits(self, s: Scheduled) -> Tensor:
        """Returns the logits of a sequence's `Scheduled.logit_positions`."""
        sequence, positions = s.sequence, s.logit_positions
        tokens = torch.tensor([(sequence.token_ids + sequence.draft)[: s.end]])
        text = self._texts.pop(sequence, None)
        begins = text is None or text.length != s.end - 1 or len(positions) > 1
        if text is None or begins:
            text = Text(self._first_arguments(s.end), 0)
        # Without it a model computes logits of the whole prompt, which can take more memory than its weights.
        last_only = (
            {"logits_to_keep": 1} if len(positions) == 1 and "logits_to_keep" in self._parameters else {}
        )
        inputs = self.model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=None if begins else 1,
            is_first_iteration=begins,
            **text.arguments,
            **last_only,
        )
        out = self.model(**inputs, return_dict=True)
        logits: Tensor = out.logits[0, -len(positions) :]
        arguments = self.model._update_model_kwargs_for_generation(
            out, text.arguments, is_encoder_decoder=False
        )
        if any(arguments.get(name) is not None for name in STATE_NAMES):
            self._texts[sequence] = Text(arguments, s.end)
        return logits

    def _first_arguments(self, length: int) -> dict[str, Any]:
        """Returns the arguments that `generate` passes to a model with the tokens of a new prompt."""
        arguments: dict[str, Any] = {"use_cache": True}
        if "attention_mask" in self._parameters:
            arguments["attention_mask"] = torch.ones(1, length, dtype=torch.int64)
        if "position_ids" in self._parameters:
            arguments["position_ids"] = torch.arange(length)[None]
        if self.model._supports_default_dynamic_cache():
            name = cache_argument(self.model.forward)
            arguments[name] = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        return arguments
