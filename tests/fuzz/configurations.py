"""Random configurations of model families."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.field_values import ACTIVATIONS, FACTORS, HEADS, HIDDEN, ROPES, SIZES, SWITCHES
from torch_armllm.model_survey.tiny_models import tiny_config, tiny_ids, tiny_model
from torch_armllm.model_survey.tiny_overrides import COUNTS, OVERRIDES

ATTEMPTS = 12
"""Configurations that a seed draws until transformers accepts one."""
_PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@cache
def captured_families() -> list[str]:
    """Returns the families that the page of models lists as plans or graphs."""
    rows = [
        line.split("|")
        for line in _PAGE.read_text().partition("\n## ")[0].splitlines()
        if line.startswith("| `")
    ]
    return [row[1].strip(" `") for row in rows if row[2].strip() in ("plan", "graph")]


@dataclass(frozen=True)
class Case:
    """A seed's family and configuration values."""

    seed: int
    family: str
    overrides: dict[str, Any]

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.overrides.items())
        return f"seed {self.seed}: {self.family}({values})"


def draw(seed: int, family: str | None = None) -> Case:
    """Returns the case of a seed: the first of its configurations that transformers can run, or the last."""
    source = random.Random(seed)
    family = family or source.choice(captured_families())
    config = tiny_config(family)
    for attempt in range(ATTEMPTS):
        case = Case(seed, family, drawn_text(config, source, careful=attempt % 2 == 1))
        if _runs(case):
            break
    return case


def drawn_text(config: Any, source: random.Random, careful: bool) -> dict[str, Any]:
    """Returns the drawn values of a configuration's text model, in the parts that hold them.

    Args:
        config: the family's tiny configuration.
        source: random numbers.
        careful: draw heads that share the hidden size, which some families need.
    """
    text, given = config.get_text_config(), OVERRIDES.get(config.model_type, {})
    path = _path_to(config, text)
    for name in path:
        given = given.get(name, {})
    drawn = _Drawing(text, given, source, careful).values()
    if path:
        drawn = {**given, **drawn}
    for name in reversed(path):
        drawn = {name: drawn}
    return drawn


def _path_to(config: Any, part: Any) -> list[str]:
    """Returns the names by which a part of a configuration is found; none: it is the configuration."""
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is part:
            return [name]
        if inner is not None and (path := _path_to(inner, part)):
            return [name, *path]
    return []


@torch.no_grad()
def _runs(case: Case) -> bool:
    """True if transformers accepts a configuration and runs its model on a few tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            logits = tiny_model(case.family, seed=case.seed, **case.overrides)(tiny_ids(1, 5)).logits
        except Exception:  # noqa: BLE001 - transformers refuses in many ways
            return False
    return bool(logits.isfinite().all())


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


class _Drawing:
    """One drawn configuration.

    Args:
        config: the family's tiny configuration, that of its text model.
        given: values that the tiny configuration was made with.
        source: random numbers.
        careful: draw heads that share the hidden size, which some families need.
    """

    def __init__(self, config: Any, given: dict[str, Any], source: random.Random, careful: bool) -> None:
        self._config = config
        self._given = given
        self._source = source
        self._careful = careful
        self._drawn: dict[str, Any] = {}

    def values(self) -> dict[str, Any]:
        """Returns the configuration values that differ from the tiny model's."""
        for name, choices in SIZES.items():
            if self._has(name) and self._happens(0.5):
                self._drawn[name] = self._source.choice(choices)
        for name, choices in ACTIVATIONS.items():
            if isinstance(self._now(name), str) and self._happens(0.3):
                self._drawn[name] = self._source.choice(choices)
        for name in SWITCHES:
            if isinstance(self._now(name), bool) and self._happens(0.4):
                self._drawn[name] = self._happens(0.5)
        self._draw_factors()
        self._draw_heads()
        self._draw_states()
        self._draw_layers()
        self._draw_rope()
        return self._drawn

    def _has(self, name: str) -> bool:
        return name in vars(self._config)

    def _now(self, name: str) -> Any:
        return self._drawn.get(name, vars(self._config).get(name))

    def _happens(self, probability: float) -> bool:
        return self._source.random() < probability

    def _draw_factors(self) -> None:
        for name, value in sorted(vars(self._config).items()):
            if not name.endswith(FACTORS) or not self._happens(0.5):
                continue
            if isinstance(value, float | int) and not isinstance(value, bool):
                self._drawn[name] = self._source.choice((0.5, 0.75, 1.0, 1.5))
            elif isinstance(value, list) and value and all(isinstance(x, float) for x in value):
                self._drawn[name] = [self._source.choice((0.5, 0.75, 1.5)) for _ in value]
        experts = next((self._now(n) for n in ("n_routed_experts", "num_experts") if self._has(n)), None)
        if self._has("topk_group") and experts is not None:
            groups = next((self._now(n) for n in ("n_group", "num_expert_group") if self._has(n)), None) or 1
            self._drawn["topk_group"] = self._source.randint(1, groups)

    def _draw_heads(self) -> None:
        hidden = next((name for name in HIDDEN if self._has(name)), None)
        heads = next((name for name in HEADS if self._has(name)), None)
        if heads is None or hidden is None or (heads == "num_heads" and self._has("expand")):
            return
        size = self._now(hidden)
        shared = [n for n in (1, 2, 4, 6, 8) if size % (4 * n) == 0]
        free = self._has("head_dim") and not self._careful
        if self._happens(0.6) or size % (4 * self._now(heads)):
            self._drawn[heads] = self._source.choice((2, 4, 6, 8) if free else shared)
        count = self._now(heads)
        if self._careful and self._has("head_dim"):
            self._drawn["head_dim"] = size // count
        if self._has("num_key_value_heads"):
            latent = self._has("kv_lora_rank")
            if latent or count % self._now("num_key_value_heads") or self._happens(0.6):
                self._drawn["num_key_value_heads"] = (
                    count if latent else self._source.choice(_divisors(count))
                )
        if self._has("num_kv_heads"):
            alike = self._has("multi_query") and not self._now("new_decoder_architecture")
            self._drawn["num_kv_heads"] = count if alike else self._source.choice(_divisors(count))
        if self._has("attention_head_dim") and self._has(
            "attention_hidden_size"
        ):  # it reads two hidden states
            self._drawn |= {"attention_hidden_size": 2 * size, "attention_head_dim": 2 * size // count}

    def _draw_states(self) -> None:
        """Draws heads of recurrent layers, whose products have to match other sizes."""
        hidden = next((name for name in HIDDEN if self._has(name)), None)
        if hidden is None:
            return
        inner = int(self._now(hidden) * (self._now("expand") or self._now("mamba_expand") or 1))
        size = self._source.choice((8, 16, 32))
        heads = inner // size
        if self._has("state_size") and self._has("expand") and not self._has("num_heads"):
            self._drawn["intermediate_size"] = inner
        elif self._has("state_size") and self._has("expand"):
            self._drawn |= {"head_dim": size, "num_heads": heads}
        elif self._has("mamba_d_ssm"):
            heads = self._source.choice((2, 4, 8))
            self._drawn |= {"mamba_d_head": size, "mamba_n_heads": heads, "mamba_d_ssm": heads * size}
        elif self._has("mamba_d_head"):
            self._drawn |= {"mamba_d_head": size, "mamba_n_heads": heads}
        elif self._has("mamba_headdim"):
            self._drawn |= {"mamba_headdim": size, "n_mamba_heads": heads}
        elif self._has("mamba_head_dim"):
            heads = self._source.choice((2, 4, 8))
            self._drawn |= {"mamba_head_dim": size, "mamba_num_heads": heads}
        for name in ("n_groups", "mamba_n_groups", "mamba_ngroups"):
            if self._has(name) and heads:
                self._drawn[name] = self._source.choice([n for n in (1, 2, 4) if heads % n == 0])
        if self._has("linear_num_value_heads"):
            keys = self._now("linear_num_key_heads")
            self._drawn["linear_num_value_heads"] = keys * self._source.choice((1, 2, 3))

    def _draw_layers(self) -> None:
        """Draws the number of layers and their kinds, each kind at least once."""
        count = next((name for name in COUNTS if self._has(name)), None)
        if any(name in self._given for name in COUNTS):
            return
        now = vars(self._config)
        lists = {
            name: value
            for name, value in now.items()
            if isinstance(value, list) and value and all(isinstance(x, str) for x in value)
        }
        lists.pop("architectures", None)
        layers = max(len(value) for value in lists.values()) if lists else self._now(count) if count else 0
        if not layers or not self._happens(0.5):
            return
        layers += self._source.randint(0, 2)
        for name, value in lists.items():
            kinds = list(dict.fromkeys(value))
            drawn = kinds + self._source.choices(kinds, k=max(0, layers - len(kinds)))
            self._source.shuffle(drawn)
            if name != "mtp_layers_block_type":
                self._drawn[name] = drawn
        if count is not None:
            self._drawn[count] = layers

    def _draw_rope(self) -> None:
        ropes = self._now("rope_parameters")
        if isinstance(ropes, dict) and "rope_theta" in ropes and self._happens(0.5):
            theta = self._source.choice((1e3, 1e4, 1e6))
            rope = {"rope_type": "default"} if self._careful else self._source.choice(ROPES)
            kept = {**ropes, **rope} if ropes.get("rope_type") == "default" else ropes
            self._drawn["rope_parameters"] = {**kept, "rope_theta": theta}
            if "partial_rotary_factor" in ropes:
                self._drawn["rope_parameters"]["partial_rotary_factor"] = self._source.choice(
                    (0.25, 0.5, 1.0)
                )
