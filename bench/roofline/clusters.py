"""Tensor parallel ranks on several nodes: their links, and the exchanges between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.roofline.figures import Figures
from bench.roofline.machines import Machine, machine_named
from bench.roofline.models import Attention, Experts, Model, Part, Product, Recurrence
from bench.roofline.predict import Work, predict


@dataclass(frozen=True)
class Link:
    """The way between two nodes; both values are assumed.

    Attributes:
        name: what it is.
        gb_s: 10⁹ bytes a second that a node receives.
        latency_us: microseconds of an exchange of few bytes.
    """

    name: str
    gb_s: float
    latency_us: float


@dataclass(frozen=True)
class Cluster:
    """Nodes of one kind, with one rank each.

    Attributes:
        name: of the whole.
        node: cores and memory of a node.
        nodes: their number.
        link: between them.
    """

    name: str
    node: Machine
    nodes: int
    link: Link


@dataclass(frozen=True)
class RankPrediction:
    """Seconds of a step.

    Attributes:
        one: on one node.
        parts: of a rank's part, without exchanges.
        exchanges: of all exchanges.
    """

    one: float
    parts: float
    exchanges: float

    @property
    def speedup(self) -> float:
        """Rate of all nodes relative to one."""
        return self.one / (self.parts + self.exchanges)


def _quarter(machine: Machine) -> Machine:
    return replace(machine, cores=machine.cores // 4, gb_s=machine.gb_s / 4)


_SOCKETS = Link("between sockets", 80.0, 3.0)
_NETWORK = Link("25 Gbit/s", 25 / 8, 40.0)

CLUSTERS = (
    Cluster("2 x Graviton4", machine_named("Graviton4"), 2, _SOCKETS),
    Cluster("2 x Graviton3", machine_named("Graviton3"), 2, _SOCKETS),
    Cluster("2 x Altra, 8 nodes", _quarter(machine_named("Altra")), 8, Link("between nodes", 40.0, 3.0)),
    Cluster("4 x Graviton3", machine_named("Graviton3"), 4, _NETWORK),
)
_HEADS = Attention | Recurrence
SHARED = 5e-2
"""Time of a prompt's step that every rank spends alike, relative to one rank's part: norms, rotations, and
quantization of the gathered rows.  Measured: prompts on two ranks take 1 / 0.95 of two threads' time, in the
middle of five models."""


def predict_ranks(model: Model, cluster: Cluster, work: Work, figures: Figures) -> RankPrediction:
    """Predicts a step on all nodes of a cluster, and on one of them."""
    one = predict(model, cluster.node, work, figures).seconds
    part = predict(_divided(model, cluster.nodes), cluster.node, work, figures).seconds
    if not work.decodes:
        part *= 1 + SHARED
    received = (cluster.nodes - 1) / cluster.nodes
    seconds = 0.0
    for count, columns in _exchanges(model):
        size = 2 * columns * work.tokens * received
        seconds += count * (cluster.link.latency_us * 1e-6 + size / (cluster.link.gb_s * 1e9))
    return RankPrediction(one, part, seconds)


def _divided(model: Model, ranks: int) -> Model:
    """Returns a rank's part of a model; latents are whole on every rank."""

    def own(part: Part) -> Part:
        if isinstance(part, Product):
            return replace(part, rows=-(-part.rows // ranks))
        if isinstance(part, Experts):
            return replace(part, intermediate=-(-part.intermediate // ranks))
        if isinstance(part, Attention):
            return replace(part, heads=-(-part.heads // ranks), kv_heads=max(1, part.kv_heads // ranks))
        if isinstance(part, Recurrence):
            return replace(part, heads=-(-part.heads // ranks))
        return part

    layers = tuple((count, tuple(map(own, parts))) for count, parts in model.layers)
    head = own(model.head)
    assert isinstance(head, Product)
    return Model(model.name, layers, head)


def _exchanges(model: Model) -> Iterator[tuple[int, float]]:
    """Yields the number of exchanges and the columns that each gathers."""
    for count, parts in model.layers:
        for part, following in zip(parts, (*parts[1:], None), strict=True):
            if isinstance(part, Experts):
                yield count, part.top_k * 2 * part.intermediate  # in float32
                yield count, part.hidden
            elif isinstance(part, Recurrence) or (isinstance(part, Attention) and not part.latent):
                yield count, part.heads * part.value
            elif isinstance(part, Product) and not part.keeps_heads and not isinstance(following, _HEADS):
                yield count, part.rows
    yield 1, 0.0  # the best tokens: few bytes
