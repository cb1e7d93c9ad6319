"""lm-eval's adapter of our models: its own `HFLM` with faster log-likelihoods and generation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_armllm.checkpoint.load import load_tokenizer
from torch_armllm.evaluation.loading import load_variant
from torch_armllm.evaluation.module_scorer import ModuleScorer
from torch_armllm.evaluation.plan_scorer import PlanScorer
from torch_armllm.evaluation.spans import LogLikelihood, Span, log_probabilities
from torch_armllm.evaluation.variant import Variant
from torch_armllm.system.extras import require_extra
from torch_armllm.system.progress import progress_bar

require_extra("lm_eval", "eval", "evaluation")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.models.utils import postprocess_generated_text  # noqa: E402

from torch_armllm.evaluation.engine_generator import EngineGenerator  # noqa: E402

logger = logging.getLogger(__name__)

Watch = Callable[[Tensor], None]
"""Receives the logits ``(R, vocab_size)`` of the positions of rolling windows, in order."""


@register_model("armllm")
class ArmLM(HFLM):  # type: ignore[misc]
    """A model variant; ``--model armllm`` of lm-eval's command line.

    Requests with a common context prefill it once, nothing is padded, and logits are computed for the
    continuations only.  Results equal those of `HFLM` on the same model with a float32 softmax.  A patched
    model generates by the engine.

    Args:
        pretrained: the ``model`` of `torch_armllm.LLM`, or a loaded model.
        quantization: see `Variant.parse`; for a ``pretrained`` name.
        method: the rounding method, unless ``quantization`` names one.
        calibration: a text file for calibrating methods.
        plain: computes everything by `HFLM`.
        options: options of `HFLM`.
    """

    def __init__(
        self,
        pretrained: Any,
        quantization: str = "int4",
        method: str | None = None,
        calibration: str | None = None,
        plain: bool = False,
        dtype: str = "auto",
        **options: Any,
    ) -> None:
        if isinstance(pretrained, str):
            options.setdefault("tokenizer", load_tokenizer(pretrained))
            file = None if calibration is None else Path(calibration)
            pretrained = load_variant(pretrained, Variant.parse(quantization, method), dtype, file)[0]
        options.setdefault("softmax_dtype", "float32")
        options["device"] = "cpu"
        super().__init__(pretrained=pretrained, **options)
        self.watch: Watch | None = None
        self.keeps_special_tokens = False  # in generated texts, for markers of calls
        self._plain = plain
        self._plan_scorer = None if plain else PlanScorer.of(self.model)
        self._scorer = self._plan_scorer or (None if plain else _module_scorer(self.model))
        self._generator: EngineGenerator | None = None

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[LogLikelihood]:
        """Returns the log-likelihoods of (strings, context, continuation), in order."""
        spans = [Span.of(context, continuation, self.max_length) for _, context, continuation in requests]
        scorer = self._scorer
        if self._plan_scorer is not None and not self._plan_scorer.serves(spans):
            scorer = None
        rolling = bool(requests) and requests[0][0] is None
        if rolling and not self._plain:
            return [self._score_window(span) for span in spans]
        if scorer is None:
            scores: list[LogLikelihood] = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
            return scores
        with progress_bar(total=len(spans), show=not disable_tqdm, desc="log-likelihoods") as bar:
            scores = scorer.score(spans, bar.update)
        for (strings, _, _), score in zip(requests, scores, strict=True):
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, score)
        return scores

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the answers to (context, settings), in order, cut at the first stop string."""
        if self._plan_scorer is None:
            return self._generate_plainly(requests, disable_tqdm)
        if self._generator is None:
            self._generator = EngineGenerator(self.model, self.tokenizer, self.max_length)
        generator = self._generator
        try:
            if isinstance(self.think_end_token, int):
                raise ValueError("an engine takes think_end_token as text, not as a token id")
            chosen = [
                replace(
                    generator.params(request.args[1], self.max_gen_toks),
                    skip_special_tokens=not self.keeps_special_tokens,
                )
                for request in requests
            ]
        except ValueError as error:
            logger.warning("answers are generated by transformers, which is slower: %s", error)
            return self._generate_plainly(requests, disable_tqdm)
        prompts = [
            self.tok_encode(request.args[0], left_truncate_len=generator.max_length - (one.max_tokens or 0))
            for request, one in zip(requests, chosen, strict=True)
        ]
        texts = generator.generate(prompts, chosen, not disable_tqdm)
        answers = [
            postprocess_generated_text(text, list(one.stop_strings), self.think_end_token)
            for text, one in zip(texts, chosen, strict=True)
        ]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        """Returns the text of generated tokens."""
        return str(super().tok_decode(tokens, skip_special_tokens and not self.keeps_special_tokens))

    def _generate_plainly(self, requests: list[Instance], disable_tqdm: bool) -> list[str]:
        answers: list[str] = super().generate_until(requests, disable_tqdm)
        return answers

    def _score_window(self, span: Span) -> LogLikelihood:
        """Scores a window of a long text: all of its positions, without sharing."""
        scores, greedy, at = torch.empty(len(span.targets)), True, 0
        for logits in self._rows(span):
            log_probs = log_probabilities(logits)
            if self.watch is not None:
                self.watch(logits)
            begin, at = max(at, span.first), at + len(log_probs)
            if begin < at:
                rows = log_probs[begin - at :]
                targets = torch.tensor(span.targets[begin - span.first : at - span.first])
                scores[begin - span.first : at - span.first] = rows.gather(1, targets[:, None])[:, 0]
                greedy = greedy and bool((rows.argmax(-1) == targets).all())
        return float(scores.sum()), greedy

    def _rows(self, span: Span) -> Iterator[Tensor]:
        if self._plan_scorer is not None and self._plan_scorer.serves([span]):
            return self._plan_scorer.rows(span.ids)
        return ModuleScorer(self.model).rows(span.ids)


def _module_scorer(model: Any) -> ModuleScorer | None:
    scorer = ModuleScorer(model)
    return scorer if scorer.can_share_cache() else None
