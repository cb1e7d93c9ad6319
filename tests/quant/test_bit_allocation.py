"""Schemes are assigned to layers within a size, and no other assignment loses much less."""

from __future__ import annotations

import itertools

import pytest
import torch

from torch_armllm.quant.bit_allocation import Choice, allocate, joined

SCHEMES = ("small", "medium", "large")


def random_choices(seed: int, count: int) -> list[Choice]:
    """Layers of random sizes and losses; a larger scheme loses a random fraction of the smaller's loss."""
    rng = torch.Generator().manual_seed(seed)
    choices = []
    for index in range(count):
        weights, loss, first, second = torch.rand(4, generator=rng).tolist()
        size = dict(zip(SCHEMES, (4 * weights + 1, 6 * weights + 1, 8 * weights + 1), strict=True))
        losses = dict(zip(SCHEMES, (loss, loss * first, loss * first * second), strict=True))
        choices.append(Choice((f"layer{index}",), size, losses))
    return choices


def totals(choices: list[Choice], chosen: dict[str, str]) -> tuple[float, float]:
    """Size and loss of an assignment."""
    schemes = [chosen[x.names[0]] for x in choices]
    pairs = list(zip(choices, schemes, strict=True))
    return sum(x.size[s] for x, s in pairs), sum(x.loss[s] for x, s in pairs)


@pytest.mark.parametrize("seed", range(20))
def test_the_assignment_fits_and_is_nearly_the_best(seed: int) -> None:
    choices = random_choices(seed, 6)
    least = sum(min(x.size.values()) for x in choices)
    most = sum(max(x.size.values()) for x in choices)
    size = least + (most - least) * (0.2 + 0.03 * seed)
    got_size, got_loss = totals(choices, allocate(choices, size))
    assert got_size <= size
    best = min(
        (
            totals(choices, {x.names[0]: s for x, s in zip(choices, schemes, strict=True)})
            for schemes in itertools.product(SCHEMES, repeat=len(choices))
        ),
        key=lambda pair: (pair[0] > size, pair[1]),
    )
    everything_small = sum(x.loss["small"] for x in choices)
    assert got_loss - best[1] <= 0.15 * everything_small


def test_a_scheme_that_loses_more_is_never_taken() -> None:
    choice = Choice(("a",), {"small": 4.0, "large": 8.0}, {"small": 0.5, "large": 0.6})
    assert allocate([choice], 100.0) == {"a": "small"}


def test_everything_that_fits_is_used() -> None:
    choices = random_choices(1, 8)
    assert set(allocate(choices, 1e6).values()) == {"large"}


def test_too_small_a_size_is_an_error() -> None:
    choices = random_choices(2, 3)
    least = sum(min(x.size.values()) for x in choices)
    assert set(allocate(choices, least).values()) == {"small"}
    with pytest.raises(ValueError, match="less than"):
        allocate(choices, least - 1)


def test_layers_of_a_unit_get_the_same_scheme() -> None:
    choices = random_choices(3, 6)
    units = joined(choices, [0, 0, 1, 2, 2, 2])
    assert [x.names for x in units] == [("layer0", "layer1"), ("layer2",), ("layer3", "layer4", "layer5")]
    assert units[0].loss["medium"] == choices[0].loss["medium"] + choices[1].loss["medium"]
    chosen = allocate(units, 0.7 * sum(x.size["large"] for x in choices))
    assert chosen["layer0"] == chosen["layer1"]
    assert chosen["layer3"] == chosen["layer4"] == chosen["layer5"]
    assert len(chosen) == 6
