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
from torch_armllm.model_survey.stacks import ENCODER, ENCODER_DECODER, stack_families, tiny_stacks
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
        reach: the kind of model, see `reach_of`; or `ENCODER` or `ENCODER_DECODER`.
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


def describe(family: str, report: Report, kind: str | None = None) -> Family:
    """Returns the row of a family from the report of its patched model.

    Args:
        family: a model type.
        report: of its patched model.
        kind: `ENCODER` or `ENCODER_DECODER`; None: a causal language model.
    """
    node_by_node = [note for note in report.notes if note.startswith(NODE_BY_NODE)]
    runs = _MODULES if not report.captured else _GRAPH if node_by_node else _NATIVE
    why = report.capture_reason or "".join(node_by_node).removeprefix(NODE_BY_NODE).partition(";")[0]
    ops = tuple(op for op, _ in Counter(report.ops).most_common() if op != "aten.linear")
    return Family(family, runs, _one_line(why), ops, round(report.share, 2), kind or reach_of(family))


def _untried(family: str, kind: str | None, why: str) -> Family:
    return Family(family, _NONE, _one_line(why), (), 0.0, kind or reach_of(family))


def survey(family: str, kind: str | None = None) -> Family:
    """Builds a tiny model of a family, patches it and returns the row; see `describe`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model: nn.Module = tiny_model(family) if kind is None else tiny_stacks(family)
        except Exception as error:  # noqa: BLE001 - any error is a reason
            return _untried(family, kind, f"{type(error).__name__}: {error}")
        recipe = Recipe(importance=False) if kind is None else "int8"
        try:
            return describe(family, patch(model, recipe, progress=False), kind)
        except ValueError as error:
            return _untried(family, kind, str(error))
        except Exception as error:
            if kind is None:
                raise
            # forwards of some encoders fail without patching, too
            return _untried(family, kind, f"{type(error).__name__}: {error}")


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)


def survey_all(names: Sequence[str] = (), processes: int | None = None) -> Iterable[Family]:
    """Yields the rows of these families, or of all: causal language models, then the others.

    Args:
        names: model types, which may be of several kinds; empty: all of transformers.
        processes: number of processes; None: one per core.

    Raises:
        ValueError: transformers has no such family.
    """
    kinds: list[tuple[str, str | None]] = [(family, None) for family in families()]
    kinds += stack_families().items()
    unknown = sorted(set(names) - {family for family, _ in kinds})
    if unknown:
        raise ValueError(
            "transformers has no causal language model, encoder, or model of an encoder and a decoder of "
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


def summary(rows: Sequence[Family]) -> str:
    """Returns the counts of rows as a sentence."""
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
{version}, each tried with a tiny random model, and below for [encoders and decoders](#encoders-and-decoders)
and for [encoders](#encoders).  `make models` writes this page; `torch-armllm models` prints the table for the
installed version of transformers.

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

## Encoders and decoders

Models that read a whole input and then write, each patched as INT8: [how to use
them](how-to/transcribe-and-translate.md).  A plan computes the encoder, and each step of the decoder.

{both_summary}

{both}

## Encoders

Models that predict masked tokens, loaded with `AutoModel` and patched as INT8: [how to use
them](how-to/embed-and-classify.md).

{encoder_summary}

{encoders}
"""


def as_page(rows: Sequence[Family]) -> str:
    """Returns the page of model families."""
    import transformers

    both, encoders = ([row for row in rows if row.reach == kind] for kind in (ENCODER_DECODER, ENCODER))
    causal = [row for row in rows if row not in both and row not in encoders]
    return _PAGE.format(
        version=transformers.__version__,
        summary=_wrap(f"{summary(causal)}."),
        goal=goal(causal),
        missing=_not_captured(causal),
        table=as_markdown(causal),
        both_summary=_wrap(f"{summary(both)}."),
        both=as_markdown(both),
        encoder_summary=_wrap(f"{summary(encoders)}."),
        encoders=as_markdown(encoders),
    ).rstrip()


def as_markdown(rows: Sequence[Family]) -> str:
    """Formats the table in Markdown."""
    lines = ["| family | runs as | quantized | reason | ops |", "|---|---|---|---|---|"]
    for row in rows:
        ops = ", ".join(f"`{op}`" for op in row.ops)
        lines.append(f"| `{row.family}` | {row.runs} | {100 * row.share:.0f} % | {row.why} | {ops} |")
    return "\n".join(lines)
