"""Rates of a model whose linear layers rotate their inputs, beside the same model without rotation.

    python -m bench.rotation_rates --shape 1b [--rounds 15]

Weights are random: both models hold the same integers, so that they compute different values in the same time
but for the rotation.  Steps of the two take turns.  Prints a JSON line for each kind of step: tokens a second
(medians) without and with rotation, and the median of the ratios of neighboring steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import torch_armllm  # noqa: F401  registers the format of saved models
from bench.peers.shapes import SHAPES
from torch_armllm.benchmark.random_model import save_random_model
from torch_armllm.benchmark.step_profile import step_inputs
from torch_armllm.hf.names import TIED
from torch_armllm.patching.state import patched_forward
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.step import StepInputs

KINDS = {"prompt 512": (1, 512), "decode 1": (1, 0), "decode 8": (8, 0), "decode 16": (16, 0)}


def rotate_folder(folder: Path, rotated: Path) -> None:
    """Describes the weights of a folder as rotated ones, in another folder."""
    rotated.mkdir()
    for file in folder.iterdir():
        if file.name != "config.json":
            (rotated / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    for module in config["quantization_config"]["modules"].values():
        if module["scheme"] != TIED:
            module["rotated"] = True
    (rotated / "config.json").write_text(json.dumps(config))


def _loaded(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return model


def _seconds(model: PreTrainedModel, inputs: StepInputs) -> float:
    forward = patched_forward(model)
    assert forward is not None and isinstance(forward.plan, NativePlan)
    began = time.perf_counter()
    forward.plan.run(inputs)
    return time.perf_counter() - began


def compare(models: tuple[PreTrainedModel, PreTrainedModel], kind: str, rounds: int) -> dict[str, float]:
    """Returns rates of both models in tokens a second, and the median ratio of second to first."""
    count, prompt = KINDS[kind]
    inputs = []
    for model in models:
        forward = patched_forward(model)
        assert forward is not None
        inputs.append(step_inputs(forward.shape, model, count, 128, prompt))
    pairs = []
    with torch.no_grad():
        for number in range(rounds + 2):
            order = (0, 1) if number % 2 else (1, 0)
            times = {at: _seconds(models[at], inputs[at]) for at in order}
            pairs.append((times[0], times[1]))
    tokens = prompt or count
    plain, rotated = zip(*pairs[2:], strict=True)
    ratios = [a / b for a, b in zip(plain, rotated, strict=True)]
    return {
        "plain": round(tokens / median(plain), 1),
        "rotated": round(tokens / median(rotated), 1),
        "ratio": round(median(ratios), 3),
    }


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        plain, rotated = Path(temporary) / "plain", Path(temporary) / "rotated"
        save_random_model(AutoConfig.for_model(**SHAPES[options.shape].config), plain)
        rotate_folder(plain, rotated)
        models = _loaded(plain), _loaded(rotated)
        for kind in KINDS:
            rounds = options.rounds * (1 if KINDS[kind][1] else 10)
            print(json.dumps({"kind": kind, **compare(models, kind, rounds)}), flush=True)


if __name__ == "__main__":
    main()
