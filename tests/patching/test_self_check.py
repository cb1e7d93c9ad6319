"""`patch` compares the plan with the captured graph, and leaves out what makes them differ."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import torch_armllm
from torch_armllm import passes
from torch_armllm.capture.sample import STEPS, Sample, sample_ids
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.patching import build_plan
from torch_armllm.patching.forwards.forward import PatchedForward
from torch_armllm.patching.self_check import Texts, tolerance
from torch_armllm.plan.make import GraphPlan
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.step import StepInputs

IDS = tiny_ids(1, 30)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Logits of a prompt and of a chunk after it."""
    first = model(IDS[:, :20], use_cache=True)
    return torch.cat([first.logits, model(IDS[:, 20:], past_key_values=first.past_key_values).logits], 1)


def halve_last(graph: fx.Graph, kind: str) -> None:
    """Makes a graph wrong: halves the results of its last layer of a kind."""
    node = [n for n in graph.nodes if kind in str(n.target)][-1]
    with graph.inserting_after(node):
        half = graph.call_function(torch.ops.aten.mul.Tensor, (node, 0.5))
    half.meta = dict(node.meta)
    node.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)


def break_pass(monkeypatch: pytest.MonkeyPatch, name: str, kind: str = "linear") -> None:
    def broken(module: fx.GraphModule, context: PassContext) -> int:
        count = dict(before)[name](module, context)
        halve_last(module.graph, kind)
        return count

    before = passes.PASSES
    monkeypatch.setattr(passes, "PASSES", tuple((n, broken if n == name else run) for n, run in before))


@pytest.mark.parametrize(
    ("name", "quantization"), [("norm", None), ("rope", "int4"), ("gated_mlp", None), ("qkv", "int4")]
)
def test_broken_pass_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, name: str, quantization: str | None
) -> None:
    twin = tiny_model("qwen3")
    torch_armllm.patch(twin, quantization, progress=False)
    expected = logits(twin)
    break_pass(monkeypatch, name)
    model = tiny_model("qwen3")
    report = torch_armllm.patch(model, quantization, progress=False)
    assert report.captured
    assert any(f"the rewrite {name!r} is left out" in note for note in report.notes), report.notes
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=2e-2 if quantization else 1e-4)


def test_two_broken_passes_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(tiny_model("llama"))
    break_pass(monkeypatch, "rope")
    break_pass(monkeypatch, "add_norm")
    model = tiny_model("llama")
    report = torch_armllm.patch(model, None, progress=False)
    named = [name for name in ("rope", "add_norm") if any(f"{name!r} is left out" in n for n in report.notes)]
    assert named == ["rope", "add_norm"]
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-4)


def test_modules_run_where_a_required_pass_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(tiny_model("llama"))
    break_pass(monkeypatch, "clean")
    model = tiny_model("llama")
    report = torch_armllm.patch(model, None, progress=False)
    assert not report.captured
    assert "'clean' computes other hidden states than the model" in str(report.capture_reason)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("tokens", [13, 7, 1])
def test_wrong_native_plan_is_replaced(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """The plan is wrong in the prompt, in the chunk after it, or in decode steps only."""
    run = NativePlan.run
    wrong = lambda self, inputs: run(self, inputs) * (1.5 if inputs.tokens == tokens else 1.0)  # noqa: E731
    expected = logits(tiny_model("llama"))
    with monkeypatch.context() as patches:
        patches.setattr(NativePlan, "run", wrong)
        model = tiny_model("llama")
        report = torch_armllm.patch(model, None, progress=False)
    assert any(
        "the graph runs node by node: its native plan computes other values" in n for n in report.notes
    )
    forward = model.base_model.forward
    assert isinstance(forward, PatchedForward) and isinstance(forward.plan, GraphPlan)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-4)


def test_rewrite_is_left_out_that_is_wrong_where_rounding_changes_one_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An early token of this model may get other experts by the right rewrite of its rotation."""
    break_pass(monkeypatch, "qkv", "layer_norm")
    report = torch_armllm.patch(tiny_model("phimoe", torch.bfloat16), None, progress=False)
    named = [note for note in report.notes if "is left out" in note]
    assert len(named) == 1 and "the rewrite 'qkv' is left out" in named[0], report.notes


def test_one_text_of_five_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    run, runs = NativePlan.run, []

    def wrong_for_first_text(self: NativePlan, inputs: StepInputs) -> Tensor:
        runs.append(inputs.tokens)
        return run(self, inputs) * (1.5 if len(runs) <= len(STEPS) else 1.0)

    monkeypatch.setattr(NativePlan, "run", wrong_for_first_text)
    report = torch_armllm.patch(tiny_model("llama", torch.bfloat16), None, progress=False)
    assert report.captured and not report.notes, report.notes
    assert runs[: 5 * len(STEPS)] == 5 * list(STEPS)


def test_wrong_plan_is_found_where_rounding_changes_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding changes this model's hidden states by a tenth, and the plan's are wrong by a half."""
    run = NativePlan.run
    monkeypatch.setattr(NativePlan, "run", lambda self, inputs: run(self, inputs) * 1.5)
    bounds = []

    def recorded(sample: Sample, *options: Any) -> float:
        bounds.append((sample.rounding, tolerance(sample, *options)))
        return bounds[-1][1]

    monkeypatch.setattr(build_plan, "tolerance", recorded)
    report = torch_armllm.patch(tiny_model("gemma4_unified", torch.bfloat16), "int4", progress=False)
    assert bounds[0][0] > 0.05 and bounds[0][1] < 0.45
    assert any("its native plan computes other values" in note for note in report.notes), report.notes


def test_modules_run_where_no_plan_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(tiny_model("llama"))
    monkeypatch.setattr(NativePlan, "run", lambda self, inputs: torch.zeros(inputs.tokens, 64))
    monkeypatch.setattr(GraphPlan, "run", lambda self, inputs: torch.full((inputs.tokens, 64), torch.nan))
    model = tiny_model("llama")
    report = torch_armllm.patch(model, None, progress=False)
    assert "the plan computes other hidden states than the model" in str(report.capture_reason)
    assert torch.equal(logits(model), expected)


def test_small_unexplained_difference_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (NativePlan, GraphPlan):
        run = kind.run
        monkeypatch.setattr(kind, "run", lambda self, inputs, run=run: run(self, inputs) * 1.1)
    report = torch_armllm.patch(tiny_model("llama"), None, progress=False)
    assert report.captured
    assert any("hidden states differ from the model's by 0.1" in note for note in report.notes)


def test_tied_experts_are_chosen_as_by_the_model() -> None:
    """A fresh AFMoE router is zero: all experts tie, and the model's own top-k decides."""
    model = tiny_model("afmoe")
    for name, parameter in model.named_parameters():
        if "router.gate" in name:
            parameter.data.zero_()
    for name, buffer in model.named_buffers():
        if "expert_bias" in name:
            buffer.zero_()
    expected = logits(model)
    report = torch_armllm.patch(model, None, progress=False)
    assert report.captured
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_compiled_graph_is_checked_on_request(
    monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    model = tiny_model("llama")
    options = {"check": True, "quantization": quantization}

    def compiled() -> Tensor:
        torch._dynamo.reset()
        with torch.no_grad():
            run = torch.compile(model, backend="armllm", options=options)
            return torch.stack([run(IDS, use_cache=False).logits for _ in range(2)])

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        expected = compiled()
    break_pass(monkeypatch, "gated_mlp")
    with pytest.warns(RuntimeWarning, match="the rewrite 'gated_mlp' changes this graph's results") as caught:
        got = compiled()
    assert sum(issubclass(w.category, RuntimeWarning) for w in caught) == 1  # the second call runs without it
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-2 if quantization else 1e-4)


def test_compiled_graph_may_send_tokens_to_other_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, a right rewrite sends tokens of this model to others; a wrong one is still reported."""
    model = tiny_model("phimoe", torch.bfloat16, seed=1)

    def compiled() -> None:
        torch._dynamo.reset()
        run = torch.compile(model, backend="armllm", options={"check": True, "quantization": None})
        with torch.no_grad():
            run(sample_ids(model.config.vocab_size, sum(STEPS)), use_cache=False)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        compiled()
    break_pass(monkeypatch, "gated_mlp", "layer_norm")
    with pytest.warns(RuntimeWarning, match="the rewrite 'gated_mlp' changes this graph's results"):
        compiled()


def test_sample_error() -> None:
    hidden = torch.randn(23, 8)
    sample = Sample(torch.zeros(1, 23), torch.zeros(1, 23), hidden)
    assert sample.error(hidden[None]) == 0
    one_token = hidden.clone()
    one_token[4] *= -1
    assert sample.error(one_token) == 0
    decode = hidden.clone()
    decode[-3:] *= 1.5
    assert sample.error(decode) == pytest.approx(0.5, rel=1e-4)
    decode[-3:] = torch.nan
    assert sample.error(decode) == float("inf")
    assert sample.strict_error(one_token) == 0
    one_token[11] *= -1
    assert sample.strict_error(one_token) == pytest.approx(2, rel=1e-4)


def test_texts_agree_where_one_differs_and_the_others_are_close() -> None:
    samples = [Sample(torch.full((1, 1), n), torch.zeros(1, 1), torch.zeros(1, 1)) for n in range(5)]
    texts = Texts(samples[0], lambda _: 0.1, lambda: samples[1:])

    def agree(*errors: float) -> bool:
        return texts.agree(errors[0], lambda sample: errors[int(sample.input_ids)])

    assert agree(0.1, 9, 9, 9, 9)
    assert agree(0.8, 0.01, 0.05, 0.01, 9)
    assert not agree(0.8, 0.01, 9, 0.01, 9)
    assert not agree(0.11, 0.09, 0.09, 0.09, 0.09)  # as large as the bound on each
    assert not agree(float("inf"), 0, 0, 0, 0)
    assert not agree(0.8, 0.01, 0.01, float("nan"), float("nan"))
    assert not Texts(samples[0], lambda _: 0.1).agree(0.11, lambda _: 0.0)
