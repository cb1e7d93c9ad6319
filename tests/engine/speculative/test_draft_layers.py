"""Draft layers: what they compute, that outputs stay as they are, and errors."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import torch_armllm
from tests.support.draft_folders import (
    FAMILIES,
    LAYERS,
    eagle3_folder,
    is_qwen,
    merge_names,
    mtp_folder,
    one_layer_of,
)
from tests.support.exact_outputs import (
    CROWDED,
    check_preempted,
    exact_outputs,
    prompt,
    small_engine,
)
from torch_armllm.checkpoint.load import load_model
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.speculative.adaptive import AdaptiveDrafts
from torch_armllm.engine.speculative.hidden_states import HiddenStateProposer
from torch_armllm.engine.speculative.layer_runner import LayerResult, LayerRunner
from torch_armllm.engine.speculative.mtp import find_layers, mtp_modules
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.patching.state import patched_forward
from torch_armllm.plan.native import NativePlan

MTP = {"method": "mtp", "num_speculative_tokens": 3}
EAGLE_LAYERS = 6
TIMES = ", layers: "
SEVERAL = [f"{family}{TIMES}2" for family in ("deepseek_v3", "glm4_moe")]
"""Families with two layers for multi-token prediction."""
EPS = 1e-6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function from a family to its model's folder, the model for references, and settings."""
    root = tmp_path_factory.mktemp("drafts")

    @functools.cache
    def make(family: str) -> tuple[Path, Any, dict[str, Any]]:
        folder = root / family
        if family != "eagle3":
            name, _, drafting = family.partition(TIMES)
            return folder, mtp_folder(folder, name, drafting=int(drafting or 1)), MTP
        model = tiny_model("llama", num_hidden_layers=EAGLE_LAYERS)
        model.save_pretrained(folder)
        eagle3_folder(root / "draft", model)
        return folder, model, {**MTP, "method": "eagle3", "model": str(root / "draft")}

    return make


def loaded(folder: Path, quantization: str | None = "int4") -> Any:
    model = load_model(str(folder), torch.float32)
    torch_armllm.patch(model, quantization, progress=False)
    return model


def drafter_of(engine: LLMEngine) -> HiddenStateProposer:
    decoder = engine.speculative_decoder
    assert decoder is not None and isinstance(decoder.proposer, HiddenStateProposer)
    return decoder.proposer


def sampled(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "ignore_eos": True, "logprobs": 1, "seed": 7, **settings})


# logits, compared with references in plain floats


def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def mtp_reference(family: str, folder: Path, model: Any, number: int = 0) -> Any:
    """Returns a function from token ids and hidden states to the layer's hidden states and logits."""
    tensors = load_file(folder / "model.safetensors")
    first, second, joins, last = (tensors[f"{name}.weight"] for name in merge_names(family, number))
    if is_qwen(family):
        first, second, last = first + 1, second + 1, last + 1
    eps, layer = model.config.rms_norm_eps, one_layer_of(model, number)

    def compute(ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedded = F.embedding(ids, tensors["model.embed_tokens.weight"])
        x = torch.cat([rms(embedded, first, eps), rms(hidden, second, eps)], -1) @ joins.T
        out = layer(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        normed = rms(out, last, eps)
        return (normed if is_qwen(family) else out), normed @ tensors["lm_head.weight"].T

    return compute


def eagle3_reference(folder: Path, model: Any) -> Any:
    """Returns the same function of an EAGLE-3 draft; its hidden states have one third of the first width."""
    t = {name.removeprefix("midlayer."): x for name, x in load_file(folder / "model.safetensors").items()}
    config = model.config
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    eps = config.rms_norm_eps

    def turn(x: Tensor) -> Tensor:  # (heads, T, width)
        half = width // 2
        theta = config.rope_parameters["rope_theta"]
        frequencies = theta ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def attend(x: Tensor) -> Tensor:
        q, k, v = (
            (x @ t[f"self_attn.{name}_proj.weight"].T).view(len(x), count, width).transpose(0, 1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        k, v = (y.repeat_interleave(heads // kv_heads, 0) for y in (turn(k), v))
        scores = turn(q) @ k.transpose(1, 2) * width**-0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        return (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1) @ t["self_attn.o_proj.weight"].T

    def compute(ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedded = model.get_input_embeddings()(ids)
        normed = (rms(embedded, t["input_layernorm.weight"], eps), rms(hidden, t["hidden_norm.weight"], eps))
        x = hidden + attend(torch.cat(normed, -1))
        y = rms(x, t["post_attention_layernorm.weight"], eps)
        gate, up = y @ t["mlp.gate_proj.weight"].T, y @ t["mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ t["mlp.down_proj.weight"].T
        drafted = rms(x, t["norm.weight"], eps) @ t["lm_head.weight"].T
        logits = drafted.new_full((len(ids), config.vocab_size), float("-inf"))
        logits[:, torch.arange(drafted.shape[1]) + t["d2t"]] = drafted
        return x, logits

    return compute


def recorded(engine: LLMEngine) -> list[list[Any]]:
    """Returns a list of each draft layer's results, to which every draft of the only request adds."""

    def record(runner: LayerRunner) -> list[Any]:
        found: list[Any] = []
        compute = runner.compute
        runner.may_fuse = False

        def run(scheduled: Any, given: Tensor, rows: list[int], best: bool) -> LayerResult:
            result = compute(scheduled, given, rows, best)
            if result.logits is not None:
                (sequence,) = engine._requests["0"].sequences
                found.append(
                    (list(sequence.token_ids), result.following[rows].clone(), result.logits.clone())
                )
            return result

        runner.compute = run  # type: ignore[method-assign]
        return found

    return [record(runner) for runner in drafter_of(engine).runners]


@pytest.mark.parametrize("family", SEVERAL)
@torch.no_grad()
def test_each_of_several_layers_drafts_a_token(family: str, folders: Any) -> None:
    folder, model, settings = folders(family)
    engine = small_engine(loaded(folder, None), max_num_batched_tokens=16, speculative_config=settings)
    first, second = recorded(engine)
    assert engine.speculative_decoder is not None
    engine.speculative_decoder._draft_length = lambda _: 3  # type: ignore[method-assign]
    params = sampled(temperature=0.0, logprobs=None)
    ((tokens, _),) = exact_outputs(engine, [text := prompt(40, 1)], params)[0]
    whole = torch.tensor([*text, *tokens])
    hidden = (
        load_model(str(folder), torch.float32).base_model(whole[None], use_cache=False).last_hidden_state[0]
    )
    name = family.partition(TIMES)[0]
    states, _ = mtp_reference(name, folder, model)(whole[1:], hidden[:-1])
    compute = mtp_reference(name, folder, model, 1)
    drafted = {len(known): logits[0].argmax() for known, _, logits in first}
    lengths: set[int] = set()
    ids, given = whole[:0], states[:0]
    for known, of_layer, logits in second:
        length = len(known)
        if length not in lengths:
            ids, given = torch.cat([whole[2:length], drafted[length][None]]), states[: length - 1]
        expected_states, expected = compute(ids, given)
        torch.testing.assert_close(of_layer[0], expected_states[-1], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(logits[0], expected[-1], rtol=2e-3, atol=2e-3)
        lengths.add(length)
        ids, given = torch.cat([ids, logits[0].argmax()[None]]), torch.cat([given, of_layer])
    assert len(lengths) > 15 and len(second) > len(lengths)


@pytest.mark.parametrize("family", [*FAMILIES, "eagle3"])
@torch.no_grad()
def test_layers_compute_what_references_do(family: str, folders: Any) -> None:
    folder, model, settings = folders(family)
    engine = small_engine(loaded(folder, None), max_num_batched_tokens=16, speculative_config=settings)
    (found,) = recorded(engine)
    params = sampled(temperature=0.0, logprobs=None)  # the head is fused with the plan after the first step
    ((tokens, _),) = exact_outputs(engine, [text := prompt(40, 1)], params)[0]
    assert family != "eagle3" or engine.runner._fused_head is not None  # type: ignore[attr-defined]
    whole = torch.tensor([*text, *tokens])
    target = load_model(str(folder), torch.float32)
    out = target.base_model(whole[None], output_hidden_states=True, use_cache=False)
    if family == "eagle3":
        compute = eagle3_reference(Path(settings["model"]), model)
        fc = load_file(Path(settings["model"]) / "model.safetensors")["fc.weight"]
        layers = (2, EAGLE_LAYERS // 2, EAGLE_LAYERS - 3)
        hidden = torch.cat([out.hidden_states[n][0] for n in layers], -1) @ fc.T
    else:
        compute, hidden = mtp_reference(family, folder, model), out.last_hidden_state[0]
    states, expected = compute(whole[1:], hidden[:-1])
    lengths: set[int] = set()
    for known, of_layer, logits in found:
        length = len(known)
        if length in lengths:
            continue  # a further token of a draft
        lengths.add(length)
        torch.testing.assert_close(of_layer[0], states[length - 2], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(logits[0], expected[length - 2], rtol=2e-3, atol=2e-3)
    assert len(lengths) > 15
    # the second token of the first draft reads the layer's own hidden state
    (known, of_layer, logits), (_, _, second) = found[:2]
    ids = torch.tensor([*known[1:], int(logits[0].argmax())])
    _, expected = compute(ids, torch.cat([hidden[: len(known) - 1], of_layer]))
    torch.testing.assert_close(second[0], expected[-1], rtol=2e-3, atol=2e-3)


# outputs


@pytest.fixture(scope="module")
def models(folders: Any) -> Any:
    return functools.cache(lambda family: (loaded(folders(family)[0]), folders(family)[2]))


def accepted(engine: LLMEngine) -> tuple[int, int]:
    assert engine.speculative_decoder is not None
    acceptance = engine.speculative_decoder.acceptance
    return acceptance.drafted, acceptance.accepted


@pytest.mark.parametrize(
    ("family", "temperature"),
    [*((family, 0.0) for family in (*FAMILIES, *SEVERAL, "eagle3")), ("qwen3_5_text", 0.8), ("eagle3", 0.8)],
)
def test_drafts_change_no_output(family: str, temperature: float, models: Any) -> None:
    model, settings = models(family)
    prompts = [prompt(length, length) for length in (1, 2, 31, 32, 33, 70)]
    prompts.append(prompts[-1][:64] + prompts[2])  # begins with cached blocks
    params = sampled(temperature=temperature)
    expected = exact_outputs(small_engine(model, speculative_config=None), prompts, params)
    engine = small_engine(model, speculative_config=settings)
    assert exact_outputs(engine, prompts, params) == expected
    assert exact_outputs(engine, prompts[::-1], params) == expected[::-1]  # all of it is cached
    drafted, _ = accepted(engine)
    assert drafted > 100


@pytest.mark.parametrize("family", ["qwen3_5_text", *SEVERAL[:1], "eagle3"])
def test_a_fused_head_drafts_the_same_tokens(family: str, models: Any) -> None:
    model, settings = models(family)
    prompts, params = [prompt(n, n) for n in (5, 40, 3)], sampled(temperature=0.0, logprobs=None)
    drafts: list[list[Any]] = []
    for fuses in (False, True):
        engine = small_engine(model, speculative_config=settings)
        proposer = drafter_of(engine)
        propose = proposer.propose
        for runner in proposer.runners:
            runner.may_fuse = fuses
        drafts.append([])

        def record(sequences: Any, counts: Any, propose: Any = propose) -> list[list[int]]:
            drafts[-1].append((list(counts), found := propose(sequences, counts)))
            return found

        proposer.propose = record  # type: ignore[method-assign]
        exact_outputs(engine, prompts, params)
        assert all((runner.fused_head is not None) == fuses for runner in proposer.runners)
    assert drafts[0] == drafts[1] and len(drafts[0]) > 10


@pytest.mark.parametrize(
    ("family", "swap_space"),
    [(SEVERAL[0], 1 << 20), ("glm4_moe", 1 << 20), ("qwen3_5_text", 0), ("eagle3", 0), ("eagle3", 1 << 20)],
)
def test_drafts_survive_preemption(family: str, swap_space: int, models: Any) -> None:
    model, settings = models(family)
    forward = patched_forward(model)
    assert forward is not None
    runners = drafter_of(small_engine(model, speculative_config=settings)).runners
    shape, own = forward.shape, sum(runner.layer.shape.bytes_per_token for runner in runners)
    states = 12 * shape.states.bytes_per_sequence  # of three sequences, and before three draft tokens of each
    block = shape.block_size * (shape.bytes_per_token + own)
    spare = 3 * shape.block_size * own
    memory = spare + max(2 * states, states + 5 * block)
    crowded = {**CROWDED, "kv_cache_memory": memory, "swap_space": swap_space}
    plain = functools.cache(lambda: small_engine(model, speculative_config=None))
    engine = small_engine(model, speculative_config=settings, **crowded)
    check_preempted(engine, plain)
    drafted, _ = accepted(engine)
    assert drafted > 30


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text", "eagle3"])
def test_the_cache_of_a_layer_is_part_of_the_memory(
    family: str, models: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, settings = models(family)
    memory, swap = 1 << 20, 1 << 19
    with caplog.at_level(logging.INFO, "torch_armllm.engine.build"):
        engine = small_engine(
            model, speculative_config=settings, kv_cache_memory=memory, swap_space=swap, max_num_seqs=4
        )
    decoder, runner = engine.speculative_decoder, engine.runner
    (drafter,) = drafter_of(engine).runners
    taken = sum(tensor.nbytes for tensor in drafter.cache if tensor is not None)
    assert decoder is not None and taken == decoder.kv_bytes > 0
    assert "; the drafter's own cache" in caplog.text
    assert 0.4 * memory < runner.kv_bytes + taken <= memory
    swapped = [drafter.swap, runner._swap, runner._swapped_states]  # type: ignore[attr-defined]
    assert 0.4 * swap < sum(t.nbytes for each in swapped for t in each if t is not None) <= swap


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text", *SEVERAL[:1]])
def test_forked_sequences_draft(family: str, models: Any) -> None:
    model, settings = models(family)
    prompts, params = [prompt(n, n) for n in (5, 40)], sampled(n=3, temperature=1.0)
    expected = exact_outputs(small_engine(model, speculative_config=None), prompts, params)
    engine = small_engine(model, speculative_config=settings)
    assert exact_outputs(engine, prompts, params) == expected
    drafted, _ = accepted(engine)
    assert drafted > 100


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_text", *SEVERAL[:1]])
def test_an_exact_layer_is_always_right(family: str, tmp_path: Path) -> None:
    name, _, drafting = family.partition(TIMES)
    mtp_folder(tmp_path, name, exact=True, drafting=int(drafting or 1))
    engine = small_engine(loaded(tmp_path, None), speculative_config=MTP)
    exact_outputs(engine, [prompt(n, n) for n in (5, 40)], sampled(temperature=0.0))
    drafted, right = accepted(engine)
    assert drafted == right > 30


def test_an_exact_eagle3_draft_is_right_about_the_next_token(tmp_path: Path) -> None:
    """The model maps each token to another one, and the draft maps what three layers know of it twice."""
    model = tiny_model("llama", num_hidden_layers=EAGLE_LAYERS, hidden_size=128, head_dim=32)
    size, vocabulary = model.config.hidden_size, model.config.vocab_size
    follows = torch.eye(size)[torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0)), :]
    state = model.state_dict()
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    model.model.embed_tokens.weight.data = torch.eye(vocabulary, size)
    model.lm_head.weight.data = follows.clone()
    model.save_pretrained(tmp_path / "model")
    tensors = eagle3_folder(tmp_path / "draft", model, draft_vocab_size=vocabulary)
    square = follows[:, :vocabulary] @ follows[:, :vocabulary]
    tensors |= {
        "fc.weight": torch.eye(size).repeat(1, 3),
        "lm_head.weight": F.pad(square, (0, size - vocabulary)),
        "d2t": torch.zeros(vocabulary, dtype=torch.int64),
    }
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"midlayer.{name}.weight"].zero_()
    tensors["norm.weight"].fill_(1.0)
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    settings = {"method": "eagle3", "model": str(tmp_path / "draft"), "num_speculative_tokens": 1}
    engine = small_engine(loaded(tmp_path / "model", None), speculative_config=settings)
    exact_outputs(engine, [prompt(n, n) for n in (5, 40)], sampled(temperature=0.0))
    drafted, right = accepted(engine)
    assert drafted == right > 20


def test_an_engine_after_one_with_an_eagle3_draft_has_the_plan_of_the_model(folders: Any) -> None:
    folder, _, settings = folders("eagle3")
    model = loaded(folder)
    forward = patched_forward(model)
    assert forward is not None
    plan, texts, params = (
        forward.plan,
        [prompt(n, n) for n in (5, 40)],
        sampled(temperature=0.0, logprobs=None),
    )
    assert isinstance(plan, NativePlan)
    weights = packed_addresses(plan)
    expected = exact_outputs(small_engine(model, speculative_config=None), texts, params)
    drafting = small_engine(model, speculative_config=settings)
    wider: Any = drafting.runner.plan  # type: ignore[attr-defined]
    assert forward.plan is plan is not wider and weights == packed_addresses(plan) == packed_addresses(wider)
    later = small_engine(model)
    assert later.speculative_decoder is not None
    assert isinstance(later.speculative_decoder.proposer, AdaptiveDrafts)
    for engine in (drafting, later, drafting):
        assert exact_outputs(engine, texts, params) == expected
        assert engine.runner._fused_head is not None  # type: ignore[attr-defined]


def packed_addresses(plan: NativePlan) -> set[int]:
    """Returns where the packed weights of a plan are."""
    return {t.data_ptr() for t in plan.program.constants if t.dtype == torch.uint8}


def test_rejection_sampling_accepts_more_than_it_rejects(tmp_path: Path) -> None:
    mtp_folder(tmp_path, "glm4_moe", exact=True)
    settings = {**MTP, "draft_sampling": "rejection"}
    engine = small_engine(loaded(tmp_path, None), speculative_config=settings)
    exact_outputs(engine, [prompt(n, n) for n in (5, 40)], sampled(temperature=1.0))
    drafted, right = accepted(engine)
    assert drafted > 30 and right > 0.9 * drafted


def test_layers_of_bfloat16_models_draft(tmp_path: Path) -> None:
    mtp_folder(tmp_path, "glm4_moe", dtype=torch.bfloat16)
    model = load_model(str(tmp_path), torch.bfloat16)
    torch_armllm.patch(model, progress=False)
    prompts, params = [prompt(n, n) for n in (5, 40)], sampled(temperature=0.0)
    expected = exact_outputs(small_engine(model, speculative_config=None), prompts, params)
    assert exact_outputs(small_engine(model, speculative_config=MTP), prompts, params) == expected


def test_an_unused_layer_is_named_in_the_log(folders: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder, _, settings = folders("qwen3_5_text")
    options = {"skip_tokenizer_init": True, "progress": False, "kv_cache_memory": 1 << 20}
    with caplog.at_level(logging.INFO, "torch_armllm.llm.loader"):
        torch_armllm.LLM(str(folder), **options)
        assert "carries a layer for multi-token prediction" in caplog.text
        caplog.clear()
        torch_armllm.LLM(str(folder), speculative_config=settings, **options)
    assert "multi-token" not in caplog.text


# errors


def test_a_checkpoint_without_the_layer_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} has no layer for multi-token prediction.*Name the"):
        small_engine(loaded(tmp_path), speculative_config=MTP)


def test_a_model_of_no_folder_is_told_to_name_one(tmp_path: Path, folders: Any) -> None:
    folder, _, _ = folders("glm4_moe")
    model = loaded(folder)
    model.name_or_path = model.config.name_or_path = ""
    with pytest.raises(ValueError, match="was loaded from no folder"):
        small_engine(model, speculative_config=MTP)
    small_engine(model, speculative_config={**MTP, "model": str(folder)})


def test_a_layer_of_another_size_is_refused(tmp_path: Path, folders: Any) -> None:
    folder, _, _ = folders("qwen3_5_text")
    small = tiny_model("llama", hidden_size=32, head_dim=16)
    small.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model's hidden size is 32: name the folder"):
        small_engine(loaded(tmp_path), speculative_config={**MTP, "model": str(folder)})


@pytest.mark.parametrize(
    ("name", "told"), [("hnorm", "hnorm"), ("self_attn.o_proj", "layers.0.self_attn.o_proj")]
)
def test_a_damaged_layer_is_refused(name: str, told: str, tmp_path: Path) -> None:
    mtp_folder(tmp_path, "glm4_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.{LAYERS}.{name}.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks {told}.weight"):
        small_engine(loaded(tmp_path), speculative_config=MTP)


def test_fp8_weights_of_a_layer_become_floats(tmp_path: Path) -> None:
    mtp_folder(tmp_path, "glm4_moe")
    file, name = tmp_path / "model.safetensors", f"model.layers.{LAYERS}.self_attn.o_proj.weight"
    tensors = load_file(file)
    narrow = (tensors[name] * 4).to(torch.float8_e4m3fn)
    tensors |= {name: narrow, f"{name}_scale_inv": torch.full((1, 1), 0.25)}
    save_file(tensors, file, metadata={"format": "pt"})
    (base,) = mtp_modules(loaded(tmp_path), None, 4)
    assert torch.equal(base.stack.layers[0].self_attn.o_proj.weight, narrow.float() * 0.25)


def test_drafts_of_other_models_are_refused(tmp_path: Path, folders: Any) -> None:
    folder, _, settings = folders("eagle3")
    model = loaded(folder)
    other = tiny_model("llama", hidden_size=32, head_dim=16)
    eagle3_folder(tmp_path / "narrow", other)
    eagle3_folder(tmp_path / "deep", tiny_model("llama"), eagle_aux_hidden_state_layer_ids=[2, 3, 40])
    for name, told in (("narrow", "reads 96 values"), ("deep", "layers 1 … 5")):
        with pytest.raises(ValueError, match=told):
            small_engine(model, speculative_config={**settings, "model": str(tmp_path / name)})
    with pytest.raises(ValueError, match="no EAGLE-3 draft: it has no fc.weight"):
        small_engine(model, speculative_config={**settings, "model": str(folder)})


class Code:
    """Runs when it is unpickled by a loader that allows it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_pickled_drafts_are_read_without_running_code(tmp_path: Path, folders: Any, models: Any) -> None:
    model, settings = models("eagle3")
    texts, params = [prompt(n, n) for n in (5, 40)], sampled(temperature=0.0)
    folder, ran = tmp_path / "pickled", tmp_path / "ran"
    folder.mkdir()
    source = Path(settings["model"])
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    pickled = {**settings, "model": str(folder)}
    torch.save(tensors, folder / "pytorch_model.bin")
    counts = []
    for each in (settings, pickled):
        engine = small_engine(model, speculative_config=each)
        exact_outputs(engine, texts, params)
        counts.append(accepted(engine))
    assert counts[0] == counts[1] and counts[0][0] > 0
    for content, told in (
        ({**tensors, "more": Code(ran)}, "may run code"),
        ([*tensors], "no tensors by name"),
    ):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=told):
            small_engine(model, speculative_config=pickled)
    assert not ran.exists()


def test_places_of_layers() -> None:
    assert find_layers(["model.layers.3.eh_proj.weight", "eh_proj.weight"], 4) == []
    names = [f"model.language_model.layers.{number}.eh_proj.weight" for number in (5, 4, 7)]
    place, other = find_layers(names, 4)
    assert place.name("model.language_model.layers.4.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    assert place.name("model.language_model.layers.4.shared_head.norm.weight") == "norm.weight"
    assert place.name("model.language_model.layers.4.shared_head.head.weight") is None
    assert other.name("model.language_model.layers.4.mlp.up_proj.weight") is None
    assert other.name("model.language_model.layers.5.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    (place,) = find_layers(["mtp.fc.weight"], 4)
    assert place.name("mtp.layers.1.mlp.up_proj.weight") is None
