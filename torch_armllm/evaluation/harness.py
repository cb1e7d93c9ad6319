"""lm-eval's view of our models: its own `HFLM`, with log-likelihoods computed where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_armllm.evaluation.module_scorer import ModuleScorer
from torch_armllm.evaluation.plan_scorer import PlanScorer
from torch_armllm.evaluation.spans import Answer, Text, log_probabilities
from torch_armllm.evaluation.variant import Scheme
from torch_armllm.system.extras import require_extra
from torch_armllm.system.progress import progress_bar

require_extra("lm_eval", "eval", "evaluation")

from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

Watch = Callable[[Tensor], None]
"""Is given the logits ``(R, vocabulary)`` of the positions of rolling windows, in order."""


@register_model("armllm")
class ArmLM(HFLM):  # type: ignore[misc]
    """A model in some scheme; ``--model armllm`` of lm-eval's command line.

    Contexts that several requests share are read once, nothing is padded, and logits are computed where a
    continuation begins.  The answers are those of `HFLM` on the same model in float32 softmax.

    Args:
        pretrained: what `torch_armllm.LLM` takes as model, or a model that is there already.
        quantization: see `Scheme.parse`; of a name.
        method: how weights are rounded, where the variant does not say.
        calibration: a text for methods that calibrate.
        plain: leaves everything to `HFLM`.
        options: of `HFLM`.
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
            from torch_armllm.checkpoint.load import load_tokenizer
            from torch_armllm.evaluation.loading import load_scheme

            options.setdefault("tokenizer", load_tokenizer(pretrained))
            text = None if calibration is None else Path(calibration)
            pretrained = load_scheme(pretrained, Scheme.parse(quantization, method), dtype, text)[0]
        options.setdefault("softmax_dtype", "float32")
        options["device"] = "cpu"
        super().__init__(pretrained=pretrained, **options)
        self.watch: Watch | None = None
        self._plain = plain
        self._scorer = None if plain else PlanScorer.of(self.model) or _by_modules(self.model)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[Answer]:
        """Answers of (strings, context, continuation), in their order."""
        texts = [Text.of(context, continuation, self.max_length) for _, context, continuation in requests]
        scorer = self._scorer
        if isinstance(scorer, PlanScorer) and not scorer.serves(texts):
            scorer = None
        rolling = bool(requests) and requests[0][0] is None
        if rolling and not self._plain:
            return [self._answer_whole(text) for text in texts]
        if scorer is None:
            answers: list[Answer] = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
            return answers
        with progress_bar(total=len(texts), show=not disable_tqdm, desc="log-likelihoods") as bar:
            answers = scorer.score(texts, bar.update)
        for (strings, _, _), answer in zip(requests, answers, strict=True):
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, answer)
        return answers

    def _answer_whole(self, text: Text) -> Answer:
        """A window of a long text: all of its positions, and none is shared."""
        found, same, at = torch.empty(len(text.targets)), True, 0
        for logits in self._rows(text):
            scores = log_probabilities(logits)
            if self.watch is not None:
                self.watch(logits)
            begin, at = max(at, text.first), at + len(scores)
            if begin < at:
                rows = scores[begin - at :]
                targets = torch.tensor(text.targets[begin - text.first : at - text.first])
                found[begin - text.first : at - text.first] = rows.gather(1, targets[:, None])[:, 0]
                same = same and bool((rows.argmax(-1) == targets).all())
        return float(found.sum()), same

    def _rows(self, text: Text) -> Iterator[Tensor]:
        if isinstance(self._scorer, PlanScorer) and self._scorer.serves([text]):
            return self._scorer.rows(text.ids)
        return ModuleScorer(self.model).rows(text.ids)


def _by_modules(model: Any) -> ModuleScorer | None:
    scorer = ModuleScorer(model)
    return scorer if scorer.of_cache() else None
