"""Hidden states and logits of draft layers, compared with references in plain floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.draft_engines import (
    EAGLE_LAYERS,
    SEVERAL,
    TIMES,
    drafter_of,
    loaded,
    sampled,
)
from tests.support.draft_folders import FAMILIES
from tests.support.draft_references import eagle3_reference, mtp_reference
from tests.support.exact_outputs import exact_outputs, prompt, small_engine
from torch_armllm.checkpoint.load import load_model
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.speculative.layer_runner import LayerResult, LayerRunner


def recorded(engine: LLMEngine) -> list[list[Any]]:
    """Returns a list of each draft layer's results, to which every draft of the only request adds."""

    def record(runner: LayerRunner) -> list[Any]:
        found: list[Any] = []
        compute = runner.compute
        runner.may_fuse = False

        def run(scheduled: Any, given: Tensor, rows: list[int], best: bool) -> LayerResult:
            result = compute(scheduled, given, rows, best)
            if result.logits is not None:
                (sequence,) = engine._requests["0"].sequences
                found.append(
                    (list(sequence.token_ids), result.following[rows].clone(), result.logits.clone())
                )
            return result

        runner.compute = run  # type: ignore[method-assign]
        return found

    return [record(runner) for runner in drafter_of(engine).runners]


@pytest.mark.parametrize("family", SEVERAL)
@torch.no_grad()
def test_each_of_several_layers_drafts_a_token(family: str, folders: Any) -> None:
    folder, model, settings = folders(family)
    engine = small_engine(loaded(folder, None), max_num_batched_tokens=16, speculative_config=settings)
    first, second = recorded(engine)
    assert engine.speculative_decoder is not None
    engine.speculative_decoder._draft_length = lambda _: 3  # type: ignore[method-assign]
    params = sampled(temperature=0.0, logprobs=None)
    ((tokens, _),) = exact_outputs(engine, [text := prompt(40, 1)], params)[0]
    whole = torch.tensor([*text, *tokens])
    hidden = (
        load_model(str(folder), torch.float32).base_model(whole[None], use_cache=False).last_hidden_state[0]
    )
    name = family.partition(TIMES)[0]
    states, _ = mtp_reference(name, folder, model)(whole[1:], hidden[:-1])
    compute = mtp_reference(name, folder, model, 1)
    drafted = {len(known): logits[0].argmax() for known, _, logits in first}
    lengths: set[int] = set()
    ids, given = whole[:0], states[:0]
    for known, of_layer, logits in second:
        length = len(known)
        if length not in lengths:
            ids, given = torch.cat([whole[2:length], drafted[length][None]]), states[: length - 1]
        expected_states, expected = compute(ids, given)
        torch.testing.assert_close(of_layer[0], expected_states[-1], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(logits[0], expected[-1], rtol=2e-3, atol=2e-3)
        lengths.add(length)
        ids, given = torch.cat([ids, logits[0].argmax()[None]]), torch.cat([given, of_layer])
    assert len(lengths) > 15 and len(second) > len(lengths)


@pytest.mark.parametrize("family", [*FAMILIES, "eagle3"])
@torch.no_grad()
def test_layers_compute_what_references_do(family: str, folders: Any) -> None:
    folder, model, settings = folders(family)
    engine = small_engine(loaded(folder, None), max_num_batched_tokens=16, speculative_config=settings)
    (found,) = recorded(engine)
    params = sampled(temperature=0.0, logprobs=None)  # the head is fused with the plan after the first step
    ((tokens, _),) = exact_outputs(engine, [text := prompt(40, 1)], params)[0]
    assert family != "eagle3" or engine.runner.executor.layers.fused_head is not None  # type: ignore[attr-defined]
    whole = torch.tensor([*text, *tokens])
    target = load_model(str(folder), torch.float32)
    out = target.base_model(whole[None], output_hidden_states=True, use_cache=False)
    if family == "eagle3":
        compute = eagle3_reference(Path(settings["model"]), model)
        fc = load_file(Path(settings["model"]) / "model.safetensors")["fc.weight"]
        layers = (2, EAGLE_LAYERS // 2, EAGLE_LAYERS - 3)
        hidden = torch.cat([out.hidden_states[n][0] for n in layers], -1) @ fc.T
    else:
        compute, hidden = mtp_reference(family, folder, model), out.last_hidden_state[0]
    states, expected = compute(whole[1:], hidden[:-1])
    lengths: set[int] = set()
    for known, of_layer, logits in found:
        length = len(known)
        if length in lengths:
            continue  # a further token of a draft
        lengths.add(length)
        torch.testing.assert_close(of_layer[0], states[length - 2], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(logits[0], expected[length - 2], rtol=2e-3, atol=2e-3)
    assert len(lengths) > 15
    # the second token of the first draft reads the layer's own hidden state
    (known, of_layer, logits), (_, _, second) = found[:2]
    ids = torch.tensor([*known[1:], int(logits[0].argmax())])
    _, expected = compute(ids, torch.cat([hidden[: len(known) - 1], of_layer]))
    torch.testing.assert_close(second[0], expected[-1], rtol=2e-3, atol=2e-3)
