"""The comparison of quantization's accuracy cost: its start models and its divergence measure."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.gguf_writer import write_float
from bench.quality.comparison import Comparison
from bench.quality.divergence import Divergence
from bench.quality.results import Results, Row, read
from bench.quality.starts import _halves, padded
from tests.support.models import tiny, token_ids
from torch_armllm.checkpoint.load import load_model


def test_zero_padding_does_not_change_logits() -> None:
    model, ids = tiny("llama"), token_ids(2, 24)
    model.tie_weights()
    wide = padded(model)
    assert wide.config.hidden_size == wide.config.intermediate_size == 256
    assert wide.model.layers[0].self_attn.o_proj.weight.shape == (256, 256)
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_float_gguf_file_round_trips(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra gguf")
    model = tiny("llama", tie_word_embeddings=True)
    write_float(tmp_path / "model.gguf", model)
    read = load_model(str(tmp_path / "model.gguf"), torch.float32, dequantize=True)
    ids = token_ids(2, 24)
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-6)


def test_rotary_pairs_become_halves() -> None:
    rows = torch.arange(8.0).view(1, 8, 1)  # two heads of two pairs
    assert _halves(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_divergence_perplexity_and_agreement() -> None:
    tokens = torch.tensor([0, 1, 1])
    wanted = torch.tensor([[0.0, 0.0]]).expand(3, 2)
    found = Divergence()
    found.add(wanted, wanted, tokens)
    assert found.kl.value == 0
    assert found.perplexity.value == pytest.approx(2)
    assert found.ratio.value == 1
    assert found.agreement.value == 1
    other = Divergence()
    other.add(wanted, _log([0.25, 0.75]), tokens)
    assert other.kl.value == pytest.approx(_kl(0.25, 0.75))
    assert other.perplexity.value == pytest.approx(1 / 0.75)
    assert other.ratio.value == pytest.approx(1 / 0.75 / 2)
    assert other.agreement.value == 0
    assert math.isnan(other.kl.stderr)


def test_standard_errors_are_those_of_texts() -> None:
    tokens, wanted = torch.tensor([0, 1, 1]), torch.zeros(3, 2)
    found = Divergence()
    found.add(wanted, _log([0.25, 0.75]), tokens)
    found.add(wanted, _log([0.75, 0.25]), tokens)
    found.add(wanted, _log([0.1, 0.9]), tokens)
    kl = statistics.stdev([_kl(0.25, 0.75)] * 2 + [_kl(0.1, 0.9)]) / 3**0.5
    assert found.kl.stderr == pytest.approx(kl, rel=1e-5)
    losses = [math.log(1 / chance) for chance in (0.75, 0.25, 0.9)]
    middle = statistics.mean(losses)
    error = statistics.stdev(losses) / 3**0.5
    assert found.perplexity.value == pytest.approx(math.exp(middle))
    assert found.perplexity.stderr == pytest.approx(math.exp(middle) * error, rel=1e-5)
    assert found.ratio.value == pytest.approx(math.exp(middle) / 2)
    assert found.ratio.stderr == pytest.approx(math.exp(middle) / 2 * error, rel=1e-5)
    assert found.agreement == pytest.approx((1 / 3, 1 / 3))  # the first of equal tokens is the float model's


def test_long_texts_weigh_more() -> None:
    found = Divergence()
    found.add(torch.zeros(3, 2), _log([0.25, 0.75]), torch.tensor([0, 1, 1]))
    found.add(torch.zeros(1, 2), _log([0.25, 0.75])[:1] * 0, torch.tensor([0]))
    assert found.kl.value == pytest.approx(0.75 * _kl(0.25, 0.75))
    assert found.perplexity.value == pytest.approx(1 / 0.75)  # the text of one token predicts nothing


def _kl(a: float, b: float) -> float:
    return 0.5 * math.log(0.5 / a) + 0.5 * math.log(0.5 / b)


def _log(chances: list[float]) -> Tensor:
    return torch.tensor([chances]).log().expand(3, 2)


@pytest.mark.parametrize("texts", [1, 2])
def test_results_are_written_row_by_row_and_read(
    texts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    divergence = Divergence()
    for chance in (0.25, 0.4)[:texts]:
        divergence.add(torch.zeros(3, 2), _log([chance, 1 - chance]), torch.tensor([0, 1, 1]))
    row = Row.of("g32i, mse", "ours, mse", 4.3, None, divergence)
    results = Results("tiny", texts, 3 * texts, 2, tmp_path / "rows.json")
    results.begin()
    results.add(row)
    assert len(read(tmp_path / "rows.json").rows) == 1
    results.add(Row.of("g32i, mse, floats", "ours, mse, floats", None, 9.5, divergence))
    again = read(tmp_path / "rows.json")
    assert "NaN" not in (tmp_path / "rows.json").read_text()
    assert again.to_dict() == results.to_dict()
    assert again.rows[0].name == "g32i, mse" and again.rows[0].kl.value == divergence.kl.value
    assert math.isnan(again.rows[0].kl.stderr) == (texts == 1)
    header, rule, first, second = capsys.readouterr().out.splitlines()
    assert header.count("|") == rule.count("|") == first.count("|") == second.count("|")
    assert first.startswith(
        "| g32i, mse | 4.30 |  | 0.1438" if texts == 1 else "| g32i, mse | 4.30 |  | 0.0821"
    )
    assert ("±" in first) == (texts == 2)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"rows": [{"name": "Q4_0"}]}', '{"rows": []}'])
def test_other_files_are_no_results(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other.json is not a file of .*quality_peers"):
        read(tmp_path / "other.json")


def test_comparison_measures_a_quantized_copy(tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    comparison = Comparison("tiny", model, token_ids(3, 24), token_ids(2, 24), tmp_path / "rows.json")
    comparison.ours("g32i", "rtn")
    comparison.ours("g32", "rtn")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    floats, int8, weights, other, _ = read(tmp_path / "rows.json").rows
    assert floats.kl.value == 0 and floats.ratio.value == 1
    assert 0 < weights.kl.value < int8.kl.value
    assert int8.kl.stderr > 0 and int8.bits != other.bits
    assert weights.bits is None and weights.series == "ours, rtn, floats"
