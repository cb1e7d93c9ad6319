"""Predicted rates of large Arm servers from counted instructions; no measurements.

    python -m bench.roofline [--model Llama --machine Graviton4] [--arm build/bench/arm.json] [--json]

Cycles are those of the model in docs/performance/tables.md, weights and caches count by their bytes,
machines by their data sheets and the assumptions that machines.py names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from bench.case import Row, run
from bench.records import table
from bench.roofline.clusters import CLUSTERS, predict_ranks
from bench.roofline.figures import Figures, read_records
from bench.roofline.machines import BARRIER_US, MACHINES, SHARE, Machine, machine_named
from bench.roofline.models import MODELS, Model, model_named
from bench.roofline.pipelines import pipeline_speedup
from bench.roofline.predict import Work, predict
from bench.roofline.published import PUBLISHED

WORKS = {
    "prompt 512": Work(512, 0, 1),
    "prompt 2048": Work(2048, 0, 1),
    "decode, 1": Work(1, 1024, 1),
    "decode, 8": Work(8, 1024, 8),
    "decode, 16": Work(16, 1024, 16),
    "decode, 64": Work(64, 1024, 64),
}
"""Context of decode steps, in tokens."""


def records(models: Iterable[Model], machines: Iterable[Machine], figures: Figures) -> list[dict[str, Any]]:
    """Return a prediction for each model, machine and workload."""
    results = []
    for model in models:
        for machine in machines:
            for name, work in WORKS.items():
                prediction = predict(model, machine, work, figures)
                results.append(
                    {
                        "model": model.name,
                        "machine": machine.name,
                        "cores": machine.cores,
                        "work": name,
                        "tok_s": prediction.tok_s,
                        "memory": prediction.memory_s / prediction.seconds,
                        "compute": prediction.compute_s / prediction.seconds,
                        "barriers": prediction.barriers_s / prediction.seconds,
                        "kind": "prediction",
                    }
                )
    return results


def rates(results: list[dict[str, Any]]) -> str:
    """Return a table of tokens a second, one row per model and machine."""
    rows: dict[tuple[str, str, int], dict[str, float]] = {}
    for r in results:
        rows.setdefault((r["model"], r["machine"], r["cores"]), {})[r["work"]] = r["tok_s"]
    body = [[*key, *(row[name] for name in WORKS)] for key, row in rows.items()]
    return table(["model", "machine", "cores", *WORKS], body)


def compare_published(figures: Figures) -> str:
    """Return a table of predictions and published figures: prompts at 512 tokens, decode steps at 128."""
    body = []
    for published in PUBLISHED:
        machine, model = machine_named(published.machine), model_named(published.model)
        work = WORKS["prompt 512"] if published.prompt else Work(1, 128, 1)
        prediction = predict(model, machine, work, figures, published.threads)
        what = "prompt" if published.prompt else "decode, 1"
        ratio = prediction.tok_s / published.tok_s
        threads = published.threads or machine.cores
        body.append(
            [
                model.name,
                machine.name,
                threads,
                what,
                prediction.tok_s,
                published.tok_s,
                ratio,
                published.engine,
                published.source,
            ]
        )
    header = ["model", "machine", "threads", "work", "predicted", "published", "ratio", "by", "source"]
    return table(header, body)


def speedups(models: Iterable[Model], figures: Figures) -> str:
    """Return a table of ranks: rates relative to one node, and the share of exchanges in a step."""
    works = ("prompt 512", "decode, 1", "decode, 8")
    body = []
    for model in models:
        for cluster in CLUSTERS:
            found = [predict_ranks(model, cluster, WORKS[name], figures) for name in works]
            shares = [p.exchanges / (p.parts + p.exchanges) for p in found]
            cells = [f"{p.speedup:.2f} ({s:.0%})" for p, s in zip(found, shares, strict=True)]
            body.append([model.name, cluster.name, cluster.link.name, cluster.nodes, *cells])
    return table(["model", "cluster", "link", "ranks", *works], body)


def pipelines(models: Iterable[Model], figures: Figures) -> str:
    """Return a table of pipelines: rates relative to one node, on machines that a network connects."""
    works = ("prompt 512", "decode, 1", "decode, 8", "decode, 64")
    body = []
    for model in models:
        for cluster in CLUSTERS[-1:]:
            cells = [f"{pipeline_speedup(model, cluster, WORKS[name], figures):.2f}" for name in works]
            body.append([model.name, cluster.name, cluster.link.name, cluster.nodes, *cells])
    return table(["model", "cluster", "link", "stages", *works], body)


def roofline(
    *,
    arm: Annotated[tuple[Path, ...], "records of make bench-arm"] = (),
    model: Annotated[tuple[str, ...], "beginnings of names"] = (),
    machine: Annotated[tuple[str, ...], "beginnings of names"] = (),
    json: Annotated[bool, "records instead of tables"] = False,
) -> Iterator[Row]:
    figures = read_records(arm)
    models = [model_named(name) for name in model] or MODELS
    machines = [machine_named(name) for name in machine] or MACHINES
    results = records(models, machines, figures)
    if json:
        yield from results
        return
    print(f"Predictions (tok/s): {SHARE:.0%} of the data sheet's bandwidth, {BARRIER_US} µs a phase\n")
    print(rates(results), end="\n\n")
    for each in machines:
        if each.assumed:
            print(f"{each.name}: assumed are {each.assumed}")
    print("\nCompared with published figures of other engines\n")
    print(compare_published(figures))
    print("\nTensor parallel ranks: rate relative to one node (share of exchanges)\n")
    print(speedups(models, figures))
    print("\nPipelines: rate relative to one node\n")
    print(pipelines(models, figures))


if __name__ == "__main__":
    run(roofline)
