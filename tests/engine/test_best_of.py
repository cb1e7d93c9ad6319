"""`best_of` returns the best of several sequences."""

from __future__ import annotations

import pytest

from tests.support.engines import drain, make_engine, submit
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams
from torch_armllm.engine.text.preprocess import NewRequest

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
DRAWN = {"temperature": 1.5, "seed": 3, "max_tokens": 9, "ignore_eos": True}


def test_best_of_returns_the_best_in_order() -> None:
    engine = make_engine()
    submit(engine, PROMPTS, SamplingParams(n=5, logprobs=0, **DRAWN))  # type: ignore[arg-type]
    every = drain(engine)
    for kind in RequestOutputKind:
        submit(engine, PROMPTS, SamplingParams(n=2, best_of=5, output_kind=kind, **DRAWN))  # type: ignore[arg-type]
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert [o.request_id for o in outputs] == ["0", "1"] and all(o.finished for o in outputs)
        for output, whole in zip(outputs, every, strict=True):
            best = sorted(
                whole.outputs, key=lambda completion: completion.cumulative_logprob or 0, reverse=True
            )
            assert [a.token_ids for a in output.outputs] == [a.token_ids for a in best[:2]]
            assert [a.index for a in output.outputs] == [0, 1]
            assert all(a.logprobs is None for a in output.outputs)
    assert any(w.outputs[0].token_ids != o.outputs[0].token_ids for w, o in zip(every, outputs, strict=True))


def test_best_of_n_selects_nothing() -> None:
    assert not SamplingParams(n=2, best_of=2).selects_best
    engine = make_engine()
    submit(engine, PROMPTS, SamplingParams(n=2, best_of=2, **DRAWN))  # type: ignore[arg-type]
    assert not engine.step()[0].finished


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"n": 3, "best_of": 2}, "best_of is 2; generate at least n = 3 sequences"),
        ({"best_of": True}, "best_of must be a whole number"),
        ({"best_of": 2, "temperature": 0}, "best_of is 2, but temperature 0 makes all completions the same"),
    ],
)
def test_invalid_best_of_is_rejected(settings: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_all_generated_sequences_need_slots() -> None:
    with pytest.raises(ValueError, match="wants 4 sequences; max_num_seqs is 3"):
        make_engine(max_num_seqs=3).add_request(NewRequest("a", [5], SamplingParams(n=1, best_of=4)))
