"""The table of model families as text and as a page of the documentation."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence

from torch_armllm.model_survey.attention_support import ATTENTION
from torch_armllm.model_survey.media import MEDIA, TAKEN, media_counts
from torch_armllm.model_survey.stacks import ENCODER, ENCODER_DECODER
from torch_armllm.model_survey.table import GRAPH, MODULES, NATIVE, NONE, REFUSED, Family
from torch_armllm.model_survey.tiny_processors import MODALITIES


def summary(rows: Sequence[Family]) -> str:
    """Returns the counts of rows as a sentence."""
    counts = Counter(row.runs for row in rows)
    return (
        f"{len(rows)} families: {counts[NATIVE]} run as a native plan, {counts[GRAPH]} as a graph of fused"
        f" ops, {counts[MODULES]} by their own modules; {counts[REFUSED]} are refused by name, {counts[NONE]}"
        " were not tried"
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
        + "".join(f"\n{'':<28}{name}: {answer}" for name, answer in row.media.items())
        for row in rows
    ]
    if media := [row.media for row in rows if row.reach == MEDIA]:
        lines.append(f"{len(media)} families of images, videos or sound: {media_counts(media)}")
    return "\n".join([*lines, f"{summary(rows)}; {goal(rows)}"])


_PAGE = """# Models

This page lists the result of `torch_armllm.patch` for every causal language model family of transformers
{version}, each tried with a tiny random model, and below for [encoders and decoders](#encoders-and-decoders),
for [encoders](#encoders), and for models that take [images, videos or sound](#images-videos-and-sound).
`make models` writes this page; `torch-armllm models` prints the table for the installed version of
transformers.

* **plan**: a step is one native call.
* **graph**: a step is a graph of fused ops that runs node by node.
* **modules**: the weights are quantized, and the model's own forward calls the quantized modules.  This
  includes families with recurrent or linear-attention state, families that do not use transformers' attention
  interface, and multimodal wrappers.
* **refused**: `patch` raises a ValueError that states the reason, before it changes the model.
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

## Images, videos and sound

Models that take them beside texts: [how to use them](how-to/pictures.md).  Texts are quantized to INT4;
each of the others is "yes" where the product takes it and its trial equals the model's own modules.

{media_summary}

{media}
"""


def as_page(rows: Sequence[Family]) -> str:
    """Returns the page of model families."""
    import transformers

    both, encoders = ([row for row in rows if row.reach == kind] for kind in (ENCODER_DECODER, ENCODER))
    media = [row for row in rows if row.reach == MEDIA]
    causal = [row for row in rows if row.reach not in (ENCODER_DECODER, ENCODER, MEDIA)]
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
        media_summary=_wrap(f"{summary(media)}. {media_counts([row.media for row in media])}."),
        media=media_markdown(media),
    ).rstrip()


def media_markdown(rows: Sequence[Family]) -> str:
    """Formats the table of families that take images, videos or sound in Markdown."""
    lines = ["| family | texts run as | image | video | audio | reason |", "|---|---|---|---|---|---|"]
    for row in rows:
        answers = ((name, row.media.get(name)) for name in MODALITIES)
        cells = ["" if why is None else TAKEN if why == TAKEN else "no" for _, why in answers]
        reasons = dict.fromkeys(why for why in (row.why, *row.media.values()) if why not in ("", TAKEN))
        lines.append(f"| `{row.family}` | {row.runs} | {' | '.join(cells)} | {'; '.join(reasons)} |")
    return "\n".join(lines)


def as_markdown(rows: Sequence[Family]) -> str:
    """Formats the table in Markdown."""
    lines = ["| family | runs as | quantized | reason | ops |", "|---|---|---|---|---|"]
    for row in rows:
        ops = ", ".join(f"`{op}`" for op in row.ops)
        lines.append(f"| `{row.family}` | {row.runs} | {100 * row.share:.0f} % | {row.why} | {ops} |")
    return "\n".join(lines)
