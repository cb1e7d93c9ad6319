"""The table of model families: the result of `patch` on a tiny model of each."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from torch_armllm.model_survey.attention_support import reach_of
from torch_armllm.model_survey.media import MEDIA, media_of, tiny_with_processor
from torch_armllm.model_survey.stacks import stack_families, tiny_stacks
from torch_armllm.model_survey.tiny_models import families, tiny_model
from torch_armllm.model_survey.tiny_processors import multimodal_families
from torch_armllm.patching.build_plan import NODE_BY_NODE
from torch_armllm.patching.patch import patch
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.report import Report

NATIVE = "plan"
GRAPH = "graph"
MODULES = "modules"
REFUSED = "refused"
NONE = "-"


@dataclass(frozen=True)
class Family:
    """The result of a family.

    Attributes:
        family: transformers' ``model_type``.
        runs: ``plan`` (one native call per step), ``graph`` (fused ops, node by node), ``modules`` (quantized
            modules in the model's own forward), ``refused`` (`patch` names the reason), or ``-`` if no tiny
            model could be built or run.
        why: the reason for not running in the next better way; empty for a plan.
        ops: the fused ops of a step, the most frequent first.
        share: quantized share of the weight bytes.
        reach: the kind of model, see `reach_of`; or `ENCODER`, `ENCODER_DECODER` or `MEDIA`.
        media: ``yes``, or the reason why not, for images, videos and sound that its processor takes.
    """

    family: str
    runs: str
    why: str
    ops: tuple[str, ...]
    share: float
    reach: str
    media: dict[str, str] = field(default_factory=dict)

    @property
    def captured(self) -> bool:
        """True if its forward is a graph of fused ops."""
        return self.runs in (NATIVE, GRAPH)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as JSON types."""
        return {**asdict(self), "captured": self.captured}


def describe(family: str, report: Report, kind: str | None = None) -> Family:
    """Returns the row of a family from the report of its patched model.

    Args:
        family: a model type.
        report: of its patched model.
        kind: `ENCODER` or `ENCODER_DECODER`; None: a causal language model.
    """
    node_by_node = [note for note in report.notes if note.startswith(NODE_BY_NODE)]
    runs = MODULES if not report.captured else GRAPH if node_by_node else NATIVE
    why = report.capture_reason or "".join(node_by_node).removeprefix(NODE_BY_NODE).partition(";")[0]
    ops = tuple(op for op, _ in Counter(report.ops).most_common() if op != "aten.linear")
    return Family(family, runs, _one_line(why), ops, round(report.share, 2), kind or reach_of(family))


def _untried(family: str, kind: str | None, error: Exception) -> Family:
    why = _one_line(f"{type(error).__name__}: {error}")
    return Family(family, NONE, why, (), 0.0, kind or reach_of(family))


def _patched(family: str, kind: str | None, model: nn.Module, recipe: Recipe | str) -> Family:
    """Returns the row of a tiny model, which is patched or refused."""
    try:
        return describe(family, patch(model, recipe, progress=False), kind)
    except ValueError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__")).startswith("torch_armllm."):
            return _untried(family, kind, error)  # of transformers' code, as below
        return Family(family, REFUSED, _one_line(str(error)), (), 0.0, kind or reach_of(family))
    except Exception as error:  # noqa: BLE001 - forwards of some families fail without patching, too
        return _untried(family, kind, error)


def survey(family: str, kind: str | None = None) -> Family:
    """Builds a tiny model of a family, patches it and returns the row; see `describe`."""
    if kind == MEDIA:
        return _survey_media(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model: nn.Module = tiny_model(family) if kind is None else tiny_stacks(family)
        except Exception as error:  # noqa: BLE001 - any error is a reason
            return _untried(family, kind, error)
        return _patched(family, kind, model, Recipe(importance=False) if kind is None else "int8")


def _survey_media(family: str) -> Family:
    """Returns the row of a family that takes images, videos or sound."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, processor, why = tiny_with_processor(family)
        except Exception as error:  # noqa: BLE001 - any error is a reason
            return _untried(family, MEDIA, error)
        row = _patched(family, MEDIA, model, Recipe(importance=False))
        if row.runs in (REFUSED, NONE):
            return row
        try:
            media = media_of(model, processor, why)
        except Exception as error:  # noqa: BLE001 - likewise
            media = {"image": f"{type(error).__name__}: {error}"}
    return replace(row, media={name: _one_line(each) for name, each in media.items()})


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)


def survey_all(
    names: Sequence[str] = (), processes: int | None = None, only_media: bool = False
) -> Iterable[Family]:
    """Yields the rows of these families, or of all: causal language models, stacks, then those of media.

    Args:
        names: model types, which may be of several kinds; empty: all of transformers.
        processes: number of processes; None: one per core.
        only_media: leave out those of texts alone.

    Raises:
        ValueError: transformers has no such family.
    """
    kinds: list[tuple[str, str | None]] = [(family, None) for family in families()]
    kinds += stack_families().items()
    kinds += [(family, MEDIA) for family in multimodal_families()]
    kinds = [each for each in kinds if each[1] == MEDIA] if only_media else kinds
    unknown = sorted(set(names) - {family for family, _ in kinds})
    if unknown:
        raise ValueError(
            "transformers has no language model, encoder, or model of an encoder and a decoder of "
            f"type {', '.join(unknown)}"
        )
    chosen = [(family, kind) for family, kind in kinds if not names or family in names]
    if len(chosen) <= 2:
        _quiet()
        for family, kind in chosen:
            yield survey(family, kind)
        return
    # spawned, not forked: torch's threads do not survive a fork
    with torch.multiprocessing.get_context("spawn").Pool(processes, _quiet) as pool:
        yield from pool.imap(_survey_one, chosen)


def _survey_one(chosen: tuple[str, str | None]) -> Family:
    return survey(*chosen)


def _one_line(text: str) -> str:
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= 110 else line[:107] + "..."
