"""The comparison of quantization's accuracy cost: its start models and its divergence measure."""

from __future__ import annotations

import ctypes
import importlib
import math
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from bench import quality_peers
from bench.case import run
from bench.gguf_writer import write_float
from bench.quality import comparison as comparison_module
from bench.quality.comparison import Comparison, logits
from bench.quality.divergence import Divergence
from bench.quality.importance import check, importance, save
from bench.quality.llama_kinds import DEFAULT, KINDS, Kind, kinds, without_padding
from bench.quality.peer import Peer
from bench.quality.results import Results, Row, read
from bench.quality.starts import _halves, is_whole, padded
from tests.support.models import tiny, token_ids
from torch_armllm.checkpoint.load import load_model


def test_zero_padding_does_not_change_logits() -> None:
    model, ids = tiny("llama"), token_ids(2, 24)
    model.tie_weights()
    wide = padded(model)
    assert wide.config.hidden_size == wide.config.intermediate_size == 256
    assert wide.model.layers[0].self_attn.o_proj.weight.shape == (256, 256)
    assert is_whole(wide) and not is_whole(model)
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


def test_comparison_measures_quantized_copies(tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    comparison = Comparison("tiny", model, token_ids(3, 24), token_ids(2, 24), tmp_path / "rows.json")
    comparison.ours("g32i", "rtn")
    least = comparison.results.rows[-2].bits
    assert least is not None
    comparison.ours(f"{least + 1:.2f}", "rtn")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    floats, int8, weights, mixed, _ = read(tmp_path / "rows.json").rows
    assert floats.kl.value == 0 and floats.ratio.value == 1
    assert 0 < weights.kl.value < int8.kl.value
    assert int8.kl.stderr > 0
    assert weights.bits is None and weights.series == "ours, rtn, floats"
    assert mixed.name == f"{least + 1:.2f} bits, rtn" and mixed.series == "ours, rtn"
    assert mixed.bits is not None and least + 0.3 < mixed.bits <= least + 1.01


def test_comparison_gives_layers_int16_activations() -> None:
    model = tiny("llama", tie_word_embeddings=True)
    comparison = Comparison("tiny", model, token_ids(2, 24), token_ids(2, 24))
    for layers in ((), ("a16=head",), ("a16=head", "a16=*.down_proj"), ("a16",)):
        comparison.ours("int4", "rtn", *layers)
    _, int8, floats, head, _, both, _, every, _ = comparison.results.rows
    assert head.name == "int4, rtn, INT16 activations in head"
    assert both.name == "int4, rtn, INT16 activations in head and *.down_proj"
    assert every.name == "int4, rtn, INT16 activations"
    assert len({row.kl.value for row in (int8, head, both, every)}) == 4
    assert abs(every.kl.value - floats.kl.value) < abs(int8.kl.value - floats.kl.value)
    with pytest.raises(ValueError, match="a16, a16=LAYERS, tuned and unrotated, not 'a8'"):
        comparison.ours("int4", "rtn", "a8")


def test_comparison_tunes_row_scales_on_its_own_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_module, "TUNING_TEXTS", 8)
    tuned = []
    monkeypatch.setattr(comparison_module, "tune_scales", lambda *arguments, **_: tuned.append(arguments))
    model = tiny("llama", tie_word_embeddings=True)
    comparison = Comparison("tiny", model, token_ids(2, 24), token_ids(2, 24))
    comparison.ours("int4", "rtn")
    comparison.ours("int4", "rtn", "tuned", "a16=head")
    ((quantized, teacher, texts),) = tuned
    assert quantized is not teacher and teacher is model and texts.shape == (8, 24)
    assert comparison.results.rows[-2].name == "int4, rtn, INT16 activations in head, tuned"


def test_importance_is_the_mean_of_squared_inputs() -> None:
    model, tokens = tiny("llama"), token_ids(3, 24)
    found = importance(model, tokens)
    assert len(found) == 7 * model.config.num_hidden_layers
    states: list[Tensor] = []
    layer = model.model.layers[1]
    with torch.no_grad():
        for row in tokens:
            hidden = model.model(row[None], output_hidden_states=True).hidden_states[1]
            rotary = model.model.rotary_emb(hidden, torch.arange(24)[None])
            normed = layer.input_layernorm(hidden)
            mask = torch.full((24, 24), -torch.inf).triu(1)[None, None]
            attended = hidden + layer.self_attn(normed, rotary, mask)[0]
            inner = layer.post_attention_layernorm(attended)
            product = torch.nn.functional.silu(layer.mlp.gate_proj(inner)) * layer.mlp.up_proj(inner)
            states.append(torch.cat([normed[0], inner[0], product[0]], dim=1))
    wanted = torch.cat(states).square().mean(0)
    parts = ("attn_k", 0, 64), ("attn_q", 0, 64), ("ffn_up", 64, 128), ("ffn_down", 128, 224)
    for name, start, end in parts:
        actual = torch.from_numpy(found[f"blk.1.{name}.weight"])
        torch.testing.assert_close(actual, wanted[start:end], rtol=1e-4, atol=1e-6)


def test_importance_of_a_padded_model_has_zeros() -> None:
    model, tokens = tiny("llama"), token_ids(2, 24)
    model.tie_weights()
    plain, wide = importance(model, tokens), importance(padded(model), tokens)
    assert wide.keys() == plain.keys()
    for name, values in plain.items():
        assert wide[name].shape == (256,) and wide[name].dtype == np.float32
        np.testing.assert_allclose(wide[name][: len(values)], values, rtol=1e-3, atol=1e-5)
        assert not wide[name][len(values) :].any()


def test_importance_must_fit_the_file(tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=True)
    matrix = importance(model, token_ids(1, 8))
    write_float(tmp_path / "model.gguf", model)
    save(matrix, tmp_path / "model.npz", tmp_path / "model.gguf")
    assert dict(np.load(tmp_path / "model.npz")).keys() == matrix.keys()
    name = "blk.0.ffn_up.weight"
    with pytest.raises(ValueError, match=f"lacks {name}"):
        save({k: v for k, v in matrix.items() if k != name}, tmp_path / "other.npz", tmp_path / "model.gguf")
    assert not (tmp_path / "other.npz").exists()
    with pytest.raises(ValueError, match=rf"{name} has rows of 64 values, but importance of shape \(63,\)"):
        check(matrix | {name: matrix[name][1:]}, {name: 64})
    with pytest.raises(ValueError, match=f"importance of {name} is not finite"):
        check(matrix | {name: matrix[name] * np.inf}, {name: 64})
    check({}, {"token_embd.weight": 64, "output.weight": 64})


def test_files_of_llama_are_named_by_format_and_ways() -> None:
    chosen = kinds("Q4_K_M,iq4_xs+imatrix,q4_k_s+padded+imatrix,iq4_nl+imatrix+padded")
    assert chosen == [
        Kind("q4_k_m"),
        Kind("iq4_xs", imatrix=True),
        Kind("q4_k_s", imatrix=True, padded=True),
        Kind("iq4_nl", imatrix=True, padded=True),
    ]
    assert [str(kind) for kind in chosen[:3]] == ["Q4_K_M", "IQ4_XS, imatrix", "Q4_K_S, padded, imatrix"]
    assert {kind.format for kind in kinds(DEFAULT)} == set(KINDS)
    assert without_padding(kinds("q4_k_m,q4_k_m+padded,q4_k_m+imatrix")) == kinds("q4_k_m,q4_k_m+imatrix")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q4_k", "q4_k names no format to compare with; use one of q4_0, iq4_nl"),
        ("q4_0+padding", "'padding'; only \\+padded and \\+imatrix"),
        ("+imatrix", "\\+imatrix names no format"),
    ],
)
def test_unknown_files_of_llama_are_refused(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        kinds(text)
    with pytest.raises(SystemExit):
        run(quality_peers.quality_peers, ["--theirs", text])
    assert "argument --theirs: " in capsys.readouterr().err


def test_files_of_llama_need_its_interpreter() -> None:
    with pytest.raises(SystemExit, match="--theirs needs --llama PYTHON"):
        run(quality_peers.quality_peers, ["--theirs", "q4_0"])


def test_importance_is_handed_over_by_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry(ctypes.Structure):
        _fields_ = (
            ("name", ctypes.c_char_p),
            ("data", ctypes.POINTER(ctypes.c_float)),
            ("size", ctypes.c_size_t),
        )

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(llama_model_imatrix_data=Entry))
    monkeypatch.delitem(sys.modules, "bench.quality.llama_side", raising=False)
    side = importlib.import_module("bench.quality.llama_side")
    monkeypatch.delitem(sys.modules, "bench.quality.llama_side")
    values = {"blk.0.ffn_up.weight": [1.0, 2.5], "blk.0.ffn_down.weight": [3.0, 0.0, 0.25]}
    entries = side._entries({name: np.array(row, np.float32) for name, row in values.items()})
    found = {entry.name.decode(): entry.data[: entry.size] for entry in entries[:-1]}
    assert found == values
    assert entries[-1].name is None  # ends the array


def test_message_of_llama_is_shown(tmp_path: Path) -> None:
    write_float(tmp_path / "plain.gguf", tiny("llama", tie_word_embeddings=True))
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('no such library')")
    (tmp_path / "python").write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    message = "(?s)cannot make plain-q4_0-imatrix.gguf: .*no such library"
    with pytest.raises(RuntimeError, match=message):
        Peer(str(tmp_path / "python"), tmp_path).quantize(tmp_path / "plain.gguf", Kind("q4_0", imatrix=True))


class _FloatPeer(Peer):
    """A llama.cpp that rounds nothing and runs files by our own reader."""

    made: ClassVar[list[tuple[str, Kind, bool]]] = []

    def quantize(self, source: Path, kind: Kind) -> Path:
        self.made.append((source.stem, kind, source.with_suffix(".npz").exists()))
        return shutil.copy(source, self.folder / "quantized.gguf")

    def logits(self, model: Path, tokens: Tensor) -> Iterator[Tensor]:
        yield from logits(load_model(str(model), torch.float32, dequantize=True), tokens)


@pytest.mark.parametrize("whole", [False, True])
def test_files_of_llama_are_made_of_the_model_or_of_the_padded_one(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_FloatPeer, "made", [])
    model = tiny("llama", tie_word_embeddings=True)
    comparison = Comparison("tiny", padded(model) if whole else model, token_ids(2, 24), token_ids(2, 24))
    chosen = kinds("q4_0+padded+imatrix,q4_k_m,q4_k_m+padded")
    quality_peers._theirs(comparison, _FloatPeer("python", tmp_path), chosen)
    assert all(row.kl.value == pytest.approx(0, abs=1e-6) for row in comparison.results.rows)
    rows = comparison.results.rows[2:]
    if whole:  # nothing to pad, so that two are the same
        assert [row.name for row in rows] == ["Q4_0, imatrix", "Q4_K_M"]
    else:
        assert [row.name for row in rows] == ["Q4_0, padded, imatrix", "Q4_K_M", "Q4_K_M, padded"]
    assert [row.series for row in rows[:2]] == ["llama.cpp, imatrix", "llama.cpp"]
    assert all(row.bits == 32 for row in rows)
    assert [row.file is None for row in rows] == ([False] * 2 if whole else [True, False, True])
    stems = ["plain"] * 2 if whole else ["wide", "plain", "wide"]
    assert [(stem, weighed) for stem, _, weighed in _FloatPeer.made] == [(stem, True) for stem in stems]
    assert not (tmp_path / "quantized.gguf").exists()
