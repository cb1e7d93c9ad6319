"""Random calls of ops that choose tokens by logits."""

from __future__ import annotations

from random import Random

import torch

from tests.fuzz.ops.arguments import Call, Spec
from tests.fuzz.ops.calls.draws import TOKENS, WIDTHS, Makers, any_float, maybe


def _sample_probabilities(draw: Random) -> Call:
    rows, vocabulary = draw.choice((0, 1, 1, 2, 3)), draw.choice((1, 2, 5, 63, 64, 65, 200, 300))
    if draw.random() < 0.03:
        vocabulary = 9000  # more than one chunk
    row = lambda dtype, values: Spec((rows,), dtype, values)  # noqa: E731
    call: Call = {
        "logits": Spec((rows, vocabulary), any_float(draw)),
        "temperature": row(torch.float32, draw.choice(("unit", "zeros"))),
        "top_k": row(torch.int64, (0, vocabulary + 3)),
        "top_p": row(torch.float32, "unit"),
        "min_p": row(torch.float32, draw.choice(("unit", "zeros"))),
        "repetition_penalty": maybe(draw, row(torch.float32, (1, 3))),
        "presence_penalty": maybe(draw, row(torch.float32, "normal")),
        "frequency_penalty": maybe(draw, row(torch.float32, "normal")),
    }
    for name in ("prompt", "output"):
        if draw.random() < 0.5:
            offsets = [0]
            for _ in range(rows):
                offsets.append(offsets[-1] + draw.choice((0, 1, 5, 20)))
            call[f"{name}_ids"] = Spec((offsets[-1],), torch.int64, (0, vocabulary - 1))
            call[f"{name}_offsets"] = Spec((rows + 1,), torch.int64, offsets)
    return call


def _sample(draw: Random) -> Call:
    call = _sample_probabilities(draw)
    temperature = call["temperature"]
    assert isinstance(temperature, Spec)
    seeds = {name: Spec(temperature.shape, torch.int64, (0, 1 << 40)) for name in ("seeds", "steps")}
    return call | seeds | {"logprobs": draw.random() < 0.5}


def _best_tokens(draw: Random) -> Call:
    return {"logits": Spec((draw.choice(TOKENS), draw.choice((*WIDTHS, 5000, 20_000))), any_float(draw))}


def _top_logprobs(draw: Random) -> Call:
    rows, vocabulary = draw.choice(TOKENS), draw.choice((*WIDTHS, 300, 9000))
    return {
        "logits": Spec((rows, vocabulary), any_float(draw)),
        "ids": Spec((rows,), torch.int64, (0, vocabulary - 1)),
        "count": draw.randint(0, min(vocabulary, 100)),
    }


SAMPLING: Makers = {
    "sample": _sample,
    "sample_probabilities": _sample_probabilities,
    "best_tokens": _best_tokens,
    "top_logprobs": _top_logprobs,
}
