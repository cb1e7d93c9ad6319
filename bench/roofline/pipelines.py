"""Pipelines of several nodes: steps that are under way at the same time, and the rows between stages."""

from __future__ import annotations

from dataclasses import replace

from bench.roofline.clusters import Cluster
from bench.roofline.figures import Figures
from bench.roofline.models import Model
from bench.roofline.predict import Work, predict

CHUNK = 128
"""Tokens of a step of a prompt, of which several are under way."""


def pipeline_seconds(model: Model, cluster: Cluster, work: Work, figures: Figures) -> float:
    """Returns the seconds that a pipeline of a cluster's nodes takes for a step's tokens.

    Stages have equal parts of the layers, and rows are sent while a stage computes the next step.  Sequences
    that decode are shared out among the steps under way; each waits for its own step to pass all stages.

    Args:
        model: to compute.
        cluster: with a stage on each node.
        work: of one step of a single process.
        figures: of kernels.
    """
    stages = cluster.nodes
    if work.decodes:
        under_way = min(stages, work.sequences)
        sequences = -(-work.sequences // under_way)
        part = replace(work, tokens=sequences, sequences=sequences)
    else:
        under_way = -(-work.tokens // CHUNK)
        part = replace(work, tokens=min(work.tokens, CHUNK))
    stage = predict(model, cluster.node, part, figures).seconds / stages
    sending = 2 * model.head.columns * part.tokens / (cluster.link.gb_s * 1e9)
    hop = cluster.link.latency_us * 1e-6 + sending
    passing = stages * (stage + hop)
    slot = max(stage, sending)
    if work.decodes:
        return max(passing, under_way * slot)
    return passing + (under_way - 1) * slot


def pipeline_speedup(model: Model, cluster: Cluster, work: Work, figures: Figures) -> float:
    """Returns the rate of a pipeline relative to one node."""
    one = predict(model, cluster.node, work, figures).seconds
    return one / pipeline_seconds(model, cluster, work, figures)
