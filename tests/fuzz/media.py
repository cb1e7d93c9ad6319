"""Random configurations of families that take images, video or sound: engines against unpatched models.

    python -m tests.fuzz.media --seeds 20                              of every family
    python -m tests.fuzz.media --family qwen2_vl internvl --seeds 50 --first 7

A seed draws a configuration of a family (see `tests.fuzz.media_configurations`) and prompts.  Logits of
greedy tokens are compared with those of the unpatched model's ``generate``, and engines that compute the
prompts alone, batched, in chunks, from the prefix cache and after preemption have to give equal bits.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor

import torch_armllm
from tests.fuzz.configurations import Case
from tests.fuzz.media_configurations import Prompt, draw_media, media_prompts
from tests.support.engines import drain, submit
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.media.video import video_arguments
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.model_survey.tiny_processors import MODALITIES, multimodal_families, tiny_multimodal
from torch_armllm.patching.state import patched_forward

TOLERANCE = 1e-3
"""Largest difference of float32 log-probabilities, relative to the largest one."""
_TOKENS = 6
_PARAMS = SamplingParams(temperature=0.0, max_tokens=_TOKENS, logprobs=-1, ignore_eos=True)
_LENGTH, _CHUNK, _MEMORY = 512, 24, 16 << 20


class Unfit(Exception):
    """Transformers makes no model of the configuration, or the model does not take media here."""


class Refused(Exception):
    """The engine says by name that it does not take what the model takes."""


def run(case: Case) -> dict[str, int]:
    """Compares engines of a case's patched model with its unpatched twin.

    Returns:
        Number of compared prompts by modality.

    Raises:
        Unfit: the unpatched model does not run.
        Refused: see there.
        AssertionError: an engine computes something else.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, processor = tiny_multimodal(case.family, seed=case.seed, **case.overrides)
            twin = copy.deepcopy(model).eval()
        except Exception as error:
            raise Unfit(f"{type(error).__name__}: {error}") from error
        torch_armllm.patch(model, None, progress=False)
        engine = _engine(model, processor)
        prompts = _taken(engine, media_prompts(processor, case.seed))
        prompts, wanted = _with_answers(twin, processor, prompts)
        alone = [_outputs(_engine(model, processor, enable_prefix_caching=False), [each]) for each in prompts]
        for number, (found, (tokens, logits)) in enumerate(zip(alone, wanted, strict=True)):
            worst = _difference(found[0], tokens, logits)
            assert worst < TOLERANCE, f"logits of prompt {number} differ by {worst:.2g}"
        _check_bits(model, processor, prompts, [found[0] for found in alone])
    return Counter(name for prompt in prompts for name in prompt.get("multi_modal_data", {"text": 0}))


def _engine(model: Any, processor: Any, **settings: Any) -> LLMEngine:
    usual = {"kv_cache_memory": _MEMORY, "max_model_len": _LENGTH, "max_num_batched_tokens": _LENGTH}
    limits = dict.fromkeys(MODALITIES, 8)
    config = EngineConfig(**{**usual, "limit_mm_per_prompt": limits, "max_num_seqs": 8, **settings})
    return build_engine(model, processor.tokenizer, config, processor)


def _taken(engine: LLMEngine, prompts: list[Prompt]) -> list[Prompt]:
    """Returns the prompts whose modalities an engine takes.

    Raises:
        Refused: it takes none.
    """
    try:
        taken = engine.preprocessor.picture_reader().taken
    except ValueError as error:
        raise Refused(str(error)) from error
    wanted = {modality for prompt in prompts for modality in prompt.get("multi_modal_data", ())}
    for modality in sorted(wanted - set(taken.limits)):
        print(f"refused: {taken.refusals[modality]}"[:300], flush=True)
    return [each for each in prompts if set(each.get("multi_modal_data", ())) <= set(taken.limits)]


def _with_answers(
    twin: Any, processor: Any, prompts: list[Prompt]
) -> tuple[list[Prompt], list[tuple[list[int], Tensor]]]:
    """Returns the prompts that the unpatched model takes, and what it answers.

    Some processors take no items of several lengths together.

    Raises:
        Unfit: it takes none.
    """
    taken, answers, refusal = [], [], ""
    for prompt in prompts:
        try:
            if (tokens := _inputs(processor, prompt)["input_ids"].shape[1]) + _TOKENS >= _LENGTH:
                refusal = f"a prompt has {tokens} tokens"
                continue
            answers.append(_expected(twin, processor, prompt))
            taken.append(prompt)
        except Exception as error:  # noqa: BLE001 - processors and models refuse in many ways
            refusal = f"{type(error).__name__}: {error}"
    if not any("multi_modal_data" in prompt for prompt in taken):
        raise Unfit(refusal)
    return taken, answers


@torch.no_grad()
def _expected(twin: Any, processor: Any, prompt: Prompt) -> tuple[list[int], Tensor]:
    """Returns greedy tokens of the unpatched model, and their log-probabilities ``(n, vocabulary)``."""
    inputs = _inputs(processor, prompt)
    found = twin.generate(
        **inputs,
        max_new_tokens=_TOKENS,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = found.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens, torch.cat(found.logits).float().log_softmax(-1)


def _inputs(processor: Any, prompt: Prompt) -> Any:
    data, text = prompt.get("multi_modal_data", {}), [prompt["prompt"]]
    if not data:
        processor(text=text, return_tensors="pt")  # raises for families that are not made for texts alone
        return processor.tokenizer(text, return_tensors="pt")
    given: dict[str, Any] = {}
    for modality, items in data.items():
        given |= video_arguments(items) if modality == "video" else {MODALITIES[modality]: items}
    if "image" in data:  # of each text, where a processor takes several
        try:
            return processor(text=text, return_tensors="pt", **{**given, "images": [data["image"]]})
        except (ValueError, TypeError, AttributeError):
            pass
    return processor(text=text, return_tensors="pt", **given)


def _outputs(engine: LLMEngine, prompts: list[Prompt]) -> list[Any]:
    """Returns tokens and all log-probabilities of each prompt."""
    submit(engine, prompts, _PARAMS)  # type: ignore[arg-type]
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in drain(engine)]


def _difference(found: Any, tokens: list[int], logits: Tensor) -> float:
    """Returns the largest difference of log-probabilities, relative to the largest one.

    It ends behind the first token that differs, which has to be nearly as likely.
    """
    worst = 0.0
    for number, (token, row) in enumerate(zip(*found, strict=True)):
        own = torch.tensor([row[other].logprob for other in range(len(logits[number]))])
        difference = (own - logits[number]).abs().max() / logits[number].abs().max()
        worst = max(worst, float(difference))
        if token != tokens[number]:
            break
    return worst


def _check_bits(model: Any, processor: Any, prompts: list[Prompt], alone: list[Any]) -> None:
    """Compares prompts that are computed in other ways with those that are computed alone."""
    whole = _engine(model, processor)
    assert _outputs(whole, prompts) == alone, "batched bits differ"
    again = _outputs(whole, prompts)
    assert again == alone, "bits from the prefix cache differ"
    least = max(_CHUNK, *(_longest_span(whole, prompt) for prompt in prompts))
    chunked = _engine(model, processor, max_num_batched_tokens=least)
    assert _outputs(chunked, prompts) == alone, f"bits of chunks of {least} differ"
    forward = patched_forward(model)
    assert forward is not None
    longest = max(_tokens(whole, prompt) for prompt in prompts) + _TOKENS
    blocks = -(-longest // forward.shape.block_size) + 2
    memory = blocks * forward.shape.block_size * forward.shape.bytes_per_token
    fitting = {"kv_cache_memory": memory, "max_model_len": longest + 1, "enable_prefix_caching": False}
    for swap in (0, memory):
        tight = _engine(model, processor, swap_space=swap, **fitting)
        assert _outputs(tight, prompts) == alone, (
            f"bits after {tight.scheduler.preemptions} preemptions differ"
        )


def _rows(engine: LLMEngine, prompt: Prompt) -> tuple[list[int], Any]:
    if "multi_modal_data" not in prompt:
        return engine.preprocessor.token_ids(prompt), None
    return engine.preprocessor.picture_reader().read(prompt, lambda tokens: None)


def _longest_span(engine: LLMEngine, prompt: Prompt) -> int:
    """Returns the most tokens of a prompt that attend to each other."""
    rows = _rows(engine, prompt)[1]
    return max((last - first for first, last in rows.spans), default=0) if rows is not None else 0


def _tokens(engine: LLMEngine, prompt: Prompt) -> int:
    return len(_rows(engine, prompt)[0])


def main(arguments: list[str]) -> int:
    """Runs the seeds of families, and prints findings and counts; returns 1 if there is a finding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of each family (3)")
    parser.add_argument("--first", type=int, default=0, help="first seed (0)")
    parser.add_argument(
        "--family", nargs="+", help="model types; default: all that take images, video or sound"
    )
    options = parser.parse_args(arguments)
    findings = 0
    for family in options.family or multimodal_families():
        began = time.monotonic()
        counts: Counter[str] = Counter()
        compared: Counter[str] = Counter()
        for seed in range(options.first, options.first + options.seeds):
            counts[_outcome(seed, family, compared)] += 1
        findings += counts["finding"]
        print(f"{family} {dict(counts)} {dict(compared)} {time.monotonic() - began:.0f} s", flush=True)
    return 1 if findings else 0


def _outcome(seed: int, family: str, compared: Counter[str]) -> str:
    """Runs a seed; prints what it finds."""
    case: Any = f"seed {seed}: {family}"
    try:
        case = draw_media(seed, family)
        compared.update(run(case))
    except Unfit:
        return "unfit"
    except Refused as reason:
        print(f"refused: {case}: {reason}"[:300], flush=True)
        return "refused"
    except Exception as error:  # noqa: BLE001 - a finding
        text = str(error).splitlines()[:1]
        print(f"FINDING {case}: {type(error).__name__}: {text}", flush=True)
        return "finding"
    return "compared"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
