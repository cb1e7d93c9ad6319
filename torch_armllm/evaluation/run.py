"""All tasks in all schemes, one scheme at a time in memory."""

from __future__ import annotations

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
from torch_armllm.evaluation.distributions import Comparison, Reference
from torch_armllm.evaluation.loading import bits_of, load_scheme
from torch_armllm.evaluation.results_file import Store
from torch_armllm.evaluation.task_results import TaskResult
from torch_armllm.evaluation.variant import Scheme

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How tasks are run.

    Attributes:
        limit: rows of each task; None: all.
        max_length: tokens that a model reads at most; longer texts are cut into windows.
        batch_size: of what goes through `HFLM` itself, such as generated answers.
        num_fewshot: examples before each question; None: as the task says.
        apply_chat_template: questions are put as the model's chats are.
        kl_tokens: of each text, positions whose distributions are compared.
        dtype: of the weights that are loaded, where a scheme does not say.
        calibration: a text for methods that calibrate.
        off_grid: see `move_off_grid`.
        plain: leaves everything to `HFLM`, for comparison.
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
    schemes: Sequence[Scheme],
    store: Store,
    options: Options,
    scratch: Path | None = None,
    progress: bool = True,
) -> None:
    """Fills a store.  What fails is noted with its reason, and the next scheme runs.

    Args:
        model: see `load_scheme`.
        tasks: of lm-eval, by name.
        schemes: the first one is the baseline.
        store: of results.
        options: of all schemes.
        scratch: a folder for the baseline's logits, which a later run may need; None: a temporary one.
        progress: shows bars.
    """
    with ExitStack() as stack:
        place = scratch or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place.mkdir(exist_ok=True)
        for scheme in schemes:
            result = store.begin(scheme.name)
            missing = [name for name in tasks if name not in result.tasks]
            if not missing:
                continue
            try:
                _run_scheme(model, tasks, scheme, schemes[0], store, options, place, progress)
            except Exception as error:
                logger.exception("%s failed", scheme.name)
                result.error = f"{type(error).__name__}: {error}"
            store.save()
            gc.collect()


def _run_scheme(
    source: str,
    tasks: Mapping[str, Any],
    scheme: Scheme,
    baseline: Scheme,
    store: Store,
    options: Options,
    place: Path,
    progress: bool,
) -> None:
    from torch_armllm.evaluation.harness import ArmLM

    result = store.schemes[scheme.name]
    model, layers = load_scheme(
        source, scheme, options.dtype, options.calibration, options.off_grid, progress
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
        file = place / f"{name}.logits"
        base = store.schemes[baseline.name].tasks.get(name)
        watch = _watch(file, scheme is baseline, base, options) if _is_text(task) else None
        lm.watch = watch.take if watch else None
        begin, cpu_begin = time.perf_counter(), time.process_time()
        found = TaskResult.of(name, task, _evaluate(lm, task, options))
        found.seconds, found.cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        if watch is not None:
            found.distributions = watch.result()
        result.tasks[name] = found
        store.save()


def _is_text(task: Any) -> bool:
    return str(task.OUTPUT_TYPE) == "loglikelihood_rolling"


def _watch(
    file: Path, is_baseline: bool, base: TaskResult | None, options: Options
) -> Reference | Comparison | None:
    """What the logits of a text are told; None where there is nothing to compare with."""
    if is_baseline:
        return Reference(file, options.kl_tokens)
    if base is None or not file.exists() or not base.distributions.get("tokens"):
        return None
    return Comparison(file, base.distributions["dtype"])


def _evaluate(lm: Any, task: Any, options: Options) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found: dict[str, Any] = simple_evaluate(
        model=lm,
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        apply_chat_template=options.apply_chat_template,
        bootstrap_iters=0,
        log_samples=True,
    )
    return found
