from __future__ import annotations

import pytest

from bench.report import DOCUMENT
from bench.roofline.__main__ import WORKS, compare_published, pipelines, rates, records, speedups
from bench.roofline.clusters import Cluster, Link, predict_ranks
from bench.roofline.figures import Figures, read_records, shown_records
from bench.roofline.machines import BARRIER_US, SHARE, Machine
from bench.roofline.models import Attention, Experts, Model, Product, Recurrence, model_named
from bench.roofline.pipelines import CHUNK, pipeline_seconds
from bench.roofline.predict import Work, predict

PREDICTIONS = DOCUMENT.parent / "predictions.md"
MACHINE = Machine("M", "V2", "i8mm", 10, 2.0, 100.0, 20.0)


def figures(rate: float = 50.0) -> Figures:
    made = []
    for op, dtype in (("int4_linear", "g32iz"), ("int8_linear", "i8")):
        made += [
            {"op": op, "dtype": dtype, "variant": "i8mm", "cpu": "V2", "shape": f"M={m} N=K=64"}
            | {"mac_per_cycle": rate * scale}
            for m, scale in ((1, 1.0), (16, 4.0))
        ]
    for shape in ("decode 1", "128 queries"):
        made.append(
            {"op": "paged_attention", "dtype": "bf16", "variant": "i8mm", "cpu": "neoverse-v2"}
            | {"shape": shape, "mac_per_cycle": rate}
        )
    for shape, cycles in (("decode 1", 0.5), ("prompt of 32", 0.25)):
        made.append(
            {"op": "gated_delta_rule", "dtype": "bf16", "variant": "i8mm", "cpu": "neoverse-v2"}
            | {"shape": shape, "cycles_per_elem": cycles}
        )
    return Figures(made)


def test_rates_are_interpolated() -> None:
    found = figures()
    assert found.product("V2", "i8mm", 0.5) == 50
    assert found.product("V2", "i8mm", 16) == 200
    assert found.product("V2", "i8mm", 1000) == 200
    assert found.product("V2", "i8mm", 8.5) == pytest.approx(100)
    with pytest.raises(ValueError, match="N1"):
        found.product("N1", "dotprod", 1)


def test_step_is_bound_by_bytes_or_by_cycles() -> None:
    model = Model("one", ((1, (Product(1 << 20, 4096),)),), Product(16, 32, int8=True))
    read = predict(model, MACHINE, Work(1, 0, 1), figures())
    assert read.memory_s == pytest.approx(model.weight_bytes() / (SHARE * 100e9), rel=1e-3)
    computed = predict(model, MACHINE, Work(512, 0, 1), figures())
    assert computed.compute_s == pytest.approx(512 * (1 << 20) * 4096 / (200 * 10 * 2e9), rel=1e-3)
    assert computed.memory_s < 1e-6
    alone = predict(model, MACHINE, Work(1, 0, 1), figures(), threads=2)
    assert alone.memory_s == pytest.approx(model.weight_bytes() / 40e9, rel=1e-3)
    assert alone.barriers_s == pytest.approx(read.barriers_s / 5)
    assert read.barriers_s == pytest.approx((2 + 2 + 3) * BARRIER_US * 1e-6)


def test_experts_that_are_read_grow_with_the_tokens() -> None:
    experts = Experts(8, 2, 64, 32)
    assert experts.touched(1) == pytest.approx(2)
    assert experts.touched(1000) == pytest.approx(8)
    assert 2 < experts.touched(2) < 4


def test_sliding_window_limits_attention_reads() -> None:
    head = Product(16, 32, int8=True)
    whole = Model("whole", ((1, (Attention(8, 8, 64, 64),)),), head)
    window = Model("window", ((1, (Attention(8, 8, 64, 64, window=128),)),), head)
    work = Work(1, 12799, 1)
    ratio = (
        predict(whole, MACHINE, work, figures()).memory_s / predict(window, MACHINE, work, figures()).memory_s
    )
    assert 90 < ratio < 100


def test_states_are_read_and_written_once_a_step() -> None:
    model = Model("state", ((1, (Recurrence(32, 128, 128),)),), Product(16, 32, int8=True))
    assert model.layers[0][1][0].bytes_a_step == 2 * 2 << 20
    one, eight = (predict(model, MACHINE, Work(n, 1000, n), figures()).memory_s for n in (1, 8))
    assert eight == pytest.approx(8 * one, rel=1e-2)
    prompt = predict(model, MACHINE, Work(512, 0, 1), figures())
    assert prompt.compute_s == pytest.approx(512 * (1 << 19) * 0.25 / (10 * 2e9), rel=1e-2)
    slow = Machine("slow", "V2", "i8mm", 10, 0.1, 100.0, 20.0)  # in its steps cycles outlast bytes
    step = predict(model, slow, Work(8, 1000, 8), figures())
    assert step.compute_s == pytest.approx(8 * (1 << 19) * 0.5 / (10 * 0.1e9), rel=1e-2)
    with pytest.raises(ValueError, match="no gated_delta_rule was counted for N1"):
        figures().state("N1", decode=True)


def test_models_have_their_published_sizes() -> None:
    sizes = {"Llama": 8.0e9, "Qwen3": 30.5e9, "gpt-oss": 20.9e9, "DeepSeek": 15.7e9, "Qwen2.5": 1.54e9}
    sizes["Qwen3.5"] = 34.7e9
    for name, parameters in sizes.items():
        weights = 0.0
        for count, part in model_named(name).parts():
            if isinstance(part, Product):
                weights += count * part.rows * part.columns
            elif isinstance(part, Experts):
                weights += count * part.count * sum(m.rows * m.columns for m in part.matrices)
        assert 0.9 * parameters < weights + 0.7e9 and weights < 1.01 * parameters, (
            name
        )  # embeddings are left out
    with pytest.raises(ValueError, match="Mistral"):
        model_named("Mistral")


def test_document_tables_cover_every_model_and_machine() -> None:
    from bench.roofline.machines import MACHINES
    from bench.roofline.models import MODELS

    shown = read_records([])
    found = records(MODELS, MACHINES, shown)
    assert len(found) == len(MODELS) * len(MACHINES) * len(WORKS)
    assert all(r["tok_s"] > 0 and r["kind"] == "prediction" for r in found)
    assert rates(found).count("\n") == 1 + len(MODELS) * len(MACHINES)
    document = PREDICTIONS.read_text()
    assert rates(found) in document and compare_published(shown) in document  # as `python -m bench.roofline`
    assert speedups(MODELS, shown) in document
    assert pipelines(MODELS, shown) in document


def test_ranks_share_weights_and_pay_for_exchanges() -> None:
    model = Model("one", ((4, (Product(1 << 14, 4096), Product(4096, 1 << 14))),), Product(16, 32, int8=True))
    free = Cluster("free", MACHINE, 4, Link("free", 1e9, 0.0))
    work = Work(1, 0, 1)
    alone = predict(model, MACHINE, work, figures())
    shared = predict_ranks(model, free, work, figures())
    assert shared.one == alone.seconds and shared.exchanges < 1e-12
    assert shared.parts == pytest.approx(alone.barriers_s + alone.memory_s / 4, rel=1e-2)
    slow = predict_ranks(model, Cluster("slow", MACHINE, 4, Link("slow", 1.0, 50.0)), work, figures())
    received = 0.75 * 2 * 4 * ((1 << 14) + 4096)
    assert slow.exchanges == pytest.approx(9 * 50e-6 + received / 1e9)
    assert slow.speedup < shared.speedup


def test_pipelines_overlap_steps_and_pay_for_links() -> None:
    model = Model("one", ((4, (Product(1 << 14, 4096), Product(4096, 1 << 14))),), Product(16, 32, int8=True))
    free, slow = (Cluster("4", MACHINE, 4, Link("link", *link)) for link in ((1e9, 0.0), (1.0, 500.0)))
    one, four, prompt = Work(1, 0, 1), Work(4, 0, 4), Work(4 * CHUNK, 0, 1)

    def alone(work: Work) -> float:
        return predict(model, MACHINE, work, figures()).seconds

    assert pipeline_seconds(model, free, one, figures()) == pytest.approx(alone(one))
    assert pipeline_seconds(model, free, four, figures()) == pytest.approx(alone(one))
    chunk = alone(Work(CHUNK, 0, 1)) / 4
    assert pipeline_seconds(model, free, prompt, figures()) == pytest.approx((4 + 3) * chunk)
    hop = 500e-6 + 2 * 32 / 1e9
    assert pipeline_seconds(model, slow, one, figures()) == pytest.approx(alone(one) + 4 * hop)


def test_tables_of_products_and_states_are_read() -> None:
    text = (
        "<!-- table: arm-products -->\n| op | shape | type | variant | instructions/MAC | V2 | N1 |\n"
        "|---|---|---|---|---|---|---|\n"
        "| int4_linear | M=1 N=K=8 | g32i | i8mm | 0.1 | 26.8 | |\n<!-- end -->\n"
        "<!-- table: arm-states -->\n| op | shape | type | variant | core | cycles |\n"
        "|---|---|---|---|---|---|\n"
        "| gated_delta_rule | decode 1 | bf16 | i8mm | V2 | 0.5 |\n<!-- end -->"
    )
    product, state = shown_records(text)
    assert (product["cpu"], product["mac_per_cycle"]) == ("V2", 26.8)
    assert (state["cpu"], state["cycles_per_elem"]) == ("V2", 0.5)
