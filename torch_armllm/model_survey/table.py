"""The table of model families: the result of `patch` on a tiny model of each."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from torch_armllm.model_survey.attention_support import ATTENTION, reach_of
from torch_armllm.model_survey.tiny_models import families, tiny_model
from torch_armllm.patching.build_plan import NODE_BY_NODE
from torch_armllm.patching.patch import patch
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.report import Report

_NATIVE = "plan"
_GRAPH = "graph"
_MODULES = "modules"
_NONE = "-"


@dataclass(frozen=True)
class Family:
    """The result of a family.

    Attributes:
        family: transformers' ``model_type``.
        runs: ``plan`` (one native call per step), ``graph`` (fused ops, node by node), ``modules`` (quantized
            modules in the model's own forward), or ``-`` if no tiny model could be built.
        why: the reason for not running in the next better way; empty for a plan.
        ops: the fused ops of a step, the most frequent first.
        share: quantized share of the weight bytes.
        reach: the kind of model, see `reach_of`.
    """

    family: str
    runs: str
    why: str
    ops: tuple[str, ...]
    share: float
    reach: str

    @property
    def captured(self) -> bool:
        """True if its forward is a graph of fused ops."""
        return self.runs in (_NATIVE, _GRAPH)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as JSON types."""
        return {**asdict(self), "captured": self.captured}


def describe(family: str, report: Report) -> Family:
    """Returns the row of a family from the report of its patched model."""
    node_by_node = [note for note in report.notes if note.startswith(NODE_BY_NODE)]
    runs = _MODULES if not report.captured else _GRAPH if node_by_node else _NATIVE
    why = report.capture_reason or "".join(node_by_node).removeprefix(NODE_BY_NODE).partition(";")[0]
    ops = tuple(op for op, _ in Counter(report.ops).most_common() if op != "aten.linear")
    return Family(family, runs, _one_line(why), ops, round(report.share, 2), reach_of(family))


def _untried(family: str, why: str) -> Family:
    return Family(family, _NONE, _one_line(why), (), 0.0, reach_of(family))


def survey(family: str) -> Family:
    """Builds a tiny model of a family, patches it and returns the row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model: nn.Module = tiny_model(family)
        except Exception as error:  # noqa: BLE001 - any error is a reason
            return _untried(family, f"{type(error).__name__}: {error}")
        try:
            return describe(family, patch(model, Recipe(importance=False), progress=False))
        except ValueError as error:
            return _untried(family, str(error))


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)


def survey_all(names: Sequence[str] = (), processes: int | None = None) -> Iterable[Family]:
    """Yields the rows of these families, or of all, in order.

    Args:
        names: model types; empty: all of transformers.
        processes: number of processes; None: one per core.

    Raises:
        ValueError: transformers has no such family.
    """
    all_families = families()
    unknown = sorted(set(names) - set(all_families))
    if unknown:
        raise ValueError(f"transformers has no causal language model of type {', '.join(unknown)}")
    chosen = names or all_families
    if len(chosen) == 1:
        _quiet()
        yield survey(chosen[0])
        return
    # spawned, not forked: torch's threads do not survive a fork
    with torch.multiprocessing.get_context("spawn").Pool(processes, _quiet) as pool:
        yield from pool.imap(survey, chosen)


def _one_line(text: str) -> str:
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= 110 else line[:107] + "..."


def summary(rows: Sequence[Family]) -> str:
    """Returns the counts as a sentence."""
    counts = Counter(row.runs for row in rows)
    return (
        f"{len(rows)} families: {counts[_NATIVE]} run as a native plan, {counts[_GRAPH]} as a graph of fused"
        f" ops, {counts[_MODULES]} by their own modules; {counts[_NONE]} were not tried"
    )


def goal(rows: Sequence[Family]) -> str:
    """Returns a sentence with the captured share of families that use transformers' attention interface."""
    reached = [row for row in rows if row.reach == ATTENTION]
    captured = sum(row.captured for row in reached)
    share = 100 * captured / len(reached) if reached else 0.0
    return (
        f"{captured} of {len(reached)} families that use the attention interface are captured ({share:.0f} %)"
    )


def _not_captured(rows: Sequence[Family]) -> str:
    """Returns a list of the families that are not captured, by reason."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row.reach == ATTENTION and not row.captured:
            by_reason.setdefault(_without_names(row.why), []).append(f"`{row.family}`")
    items = (f"* {', '.join(names)}: {why}" for why, names in by_reason.items())
    return "\n".join(_wrap(item, indent="  ") for item in items) or "* none"


def _wrap(text: str, indent: str = "") -> str:
    """Wraps prose of the page at 110 columns; lines after the first are indented."""
    return textwrap.fill(text, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _without_names(why: str) -> str:
    """Returns a reason without its class name."""
    return re.sub(r"^(Unsupported\w+: )?[A-Z]\w+(Model|Attention|Experts|Indexer) ", "it ", why)


def as_text(rows: Sequence[Family]) -> str:
    """Formats the table for a terminal."""
    lines = [
        f"{row.family:<26}{row.runs:<9}{100 * row.share:4.0f} %  {row.why or ', '.join(row.ops)}"
        for row in rows
    ]
    return "\n".join([*lines, f"{summary(rows)}; {goal(rows)}"])


_PAGE = """# Models

This page lists the result of `torch_armllm.patch` for every causal language model family of transformers
{version}, each tried with a tiny random model.  `make models` writes this page; `torch-armllm models` prints
the table for the installed version of transformers.

* **plan**: a step is one native call.
* **graph**: a step is a graph of fused ops that runs node by node.
* **modules**: the weights are quantized, and the model's own forward calls the quantized modules.  This
  includes families with recurrent or linear-attention state, families that do not use transformers' attention
  interface, and multimodal wrappers.
* **-**: not tried; the table states the reason.

{summary}

**{goal}.**
These are the families that transformers marks as ready for other attention implementations, except multimodal
wrappers and families whose layers carry a recurrent state.  These families are not captured:

{missing}

{table}
"""


def as_page(rows: Sequence[Family]) -> str:
    """Returns the page of model families."""
    import transformers

    version = transformers.__version__
    return _PAGE.format(
        version=version,
        summary=_wrap(f"{summary(rows)}."),
        goal=goal(rows),
        missing=_not_captured(rows),
        table=as_markdown(rows),
    ).rstrip()


def as_markdown(rows: Sequence[Family]) -> str:
    """Formats the table in Markdown."""
    lines = ["| family | runs as | quantized | reason | ops |", "|---|---|---|---|---|"]
    for row in rows:
        ops = ", ".join(f"`{op}`" for op in row.ops)
        lines.append(f"| `{row.family}` | {row.runs} | {100 * row.share:.0f} % | {row.why} | {ops} |")
    return "\n".join(lines)
