"""Evaluation of all tasks in all variants, with one variant in memory at a time."""

from __future__ import annotations

import errno
import gc
import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_armllm.checkpoint.load import load_tokenizer
from torch_armllm.evaluation.bfcl import is_rendered
from torch_armllm.evaluation.distributions import BaselineLogits, LogitComparison
from torch_armllm.evaluation.harness import ArmLM
from torch_armllm.evaluation.loading import bits_of, load_variant
from torch_armllm.evaluation.results_file import ResultsFile, VariantResult
from torch_armllm.evaluation.task_results import TaskResult
from torch_armllm.evaluation.variant import Variant

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk."""


@dataclass(frozen=True)
class Options:
    """Settings of an evaluation.

    Attributes:
        limit: most rows of each task; None: all.
        max_length: most input tokens of a model; longer texts are split into windows.
        batch_size: batch size of requests that `HFLM` itself computes, such as generation by an unpatched
            model.
        num_fewshot: examples before each question; None: as the task says.
        apply_chat_template: formats questions by the model's chat template.
        kl_tokens: positions of a task's first texts whose distributions are compared.
        dtype: dtype of the loaded weights, unless a variant names one.
        calibration: a text file for calibrating methods.
        off_grid: see `move_off_grid`.
        plain: computes everything by `HFLM`, for comparison.
    """

    limit: int | None = None
    max_length: int | None = 2048
    batch_size: int = 8
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    kl_tokens: int = 4096
    dtype: str = "bfloat16"
    calibration: Path | None = None
    off_grid: bool = False
    plain: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON types."""
        return {**asdict(self), "calibration": None if self.calibration is None else str(self.calibration)}


def run(
    model: str,
    tasks: Mapping[str, Any],
    variants: Sequence[Variant],
    results: ResultsFile,
    options: Options,
    scratch: Path | None = None,
    progress: bool = True,
) -> None:
    """Evaluates all variants; a failure is recorded with its reason, and the next variant runs.

    A text that was compared with nothing, since the baseline had failed, is evaluated again once the baseline
    has succeeded.  The baseline is evaluated on a text again if further variants are to be compared with it.

    Args:
        model: see `load_variant`.
        tasks: lm-eval's tasks by name.
        variants: the first one is the baseline.
        results: collects the results.
        options: settings of all variants.
        scratch: a folder for the baseline's logits, which a resumed run needs; None: a temporary one.
        progress: shows bars.

    Raises:
        OSError: the disk is full, so later results would be lost; a resumed run has the earlier ones.
    """
    with ExitStack() as stack:
        folder = scratch or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        for variant in variants:
            result = results.begin(variant.name)
            if variant is variants[0]:
                for name in _lost_logits(result, variants[1:], results, folder):
                    logger.info("%s: %s is evaluated once more, as its logits are gone", variant.name, name)
                    del result.tasks[name]
            else:
                base = results.variants[variants[0].name]
                for name in [n for n in result.tasks if _lacks_comparison(n, result, base, folder)]:
                    del result.tasks[name]
            if all(name in result.tasks for name in tasks):
                continue
            try:
                _evaluate_variant(model, tasks, variant, variants[0], results, options, folder, progress)
            except Exception as error:
                if isinstance(error, OSError) and error.errno in _FULL:
                    raise
                logger.exception("%s failed", variant.name)
                result.error = f"{type(error).__name__}: {error}"
            results.save()
            gc.collect()


def _evaluate_variant(
    source: str,
    tasks: Mapping[str, Any],
    variant: Variant,
    baseline: Variant,
    results: ResultsFile,
    options: Options,
    folder: Path,
    progress: bool,
) -> None:
    result = results.variants[variant.name]
    model, layers = load_variant(
        source, variant, options.dtype, options.calibration, options.off_grid, progress
    )
    result.bits = bits_of(layers)
    result.bytes = sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    lm = ArmLM(
        model,
        tokenizer=load_tokenizer(source),
        batch_size=options.batch_size,
        max_length=options.max_length,
        plain=options.plain,
    )
    for name, task in tasks.items():
        if name in result.tasks:
            continue
        file = _logits_file(folder, name)
        base = results.variants[baseline.name].tasks.get(name)
        watch = _logit_observer(file, variant is baseline, base, options) if _is_text(task) else None
        lm.watch = watch.add if watch else None
        lm.keeps_special_tokens = is_rendered(task)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        task_result = TaskResult.of(name, task, _evaluate(lm, task, options))
        task_result.seconds, task_result.cpu_seconds = (
            time.perf_counter() - begin,
            time.process_time() - cpu_begin,
        )
        if watch is not None:
            task_result.distributions = watch.result()
        result.tasks[name] = task_result
        results.save()


def _lost_logits(
    base: VariantResult, others: Sequence[Variant], results: ResultsFile, folder: Path
) -> list[str]:
    """Returns the texts whose logits are gone with an earlier run, and which others are to be compared on."""
    return [
        name
        for name, task in base.tasks.items()
        if task.distributions.get("tokens")
        and not _logits_file(folder, name).exists()
        and not all(results.has_comparison(other.name, name) for other in others)
    ]


def _lacks_comparison(name: str, result: VariantResult, base: VariantResult, folder: Path) -> bool:
    """True if a task's distributions were not compared, but can be."""
    task, of_base = result.tasks[name], base.tasks.get(name)
    if task.distributions or of_base is None or not of_base.distributions.get("tokens"):
        return False
    return _logits_file(folder, name).exists()


def _logits_file(folder: Path, task: str) -> Path:
    return folder / f"{task}.logits"


def _is_text(task: Any) -> bool:
    return str(task.OUTPUT_TYPE) == "loglikelihood_rolling"


def _logit_observer(
    file: Path, is_baseline: bool, base: TaskResult | None, options: Options
) -> BaselineLogits | LogitComparison | None:
    """Returns the observer of a text's logits; None if there is no baseline to compare with."""
    if is_baseline:
        return BaselineLogits(file, options.kl_tokens)
    if base is None or not file.exists() or not base.distributions.get("tokens"):
        return None
    return LogitComparison(file, base.distributions["dtype"])


def _evaluate(lm: Any, task: Any, options: Options) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    rendered = is_rendered(task)
    results: dict[str, Any] = simple_evaluate(
        model=lm,
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        num_fewshot=None if rendered else options.num_fewshot,
        limit=options.limit,
        apply_chat_template=options.apply_chat_template and not rendered,
        bootstrap_iters=0,
        log_samples=True,
        confirm_run_unsafe_code=True,  # `load_tasks` returns such tasks only where that was accepted
    )
    return results
