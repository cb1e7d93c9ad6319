"""Prompts with pictures compute what transformers computes."""

from __future__ import annotations

import json
import warnings
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("PIL", reason="needs the extra vision")

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForImageTextToText, AutoProcessor  # noqa: E402

from tests.support.picture_folders import (  # noqa: E402
    NEED_TIMM,
    NEED_TORCHVISION,
    PLACEHOLDERS,
    picture,
    picture_folder,
    tower_model,
    unserved_model,
)
from torch_armllm import LLM, Recipe, SamplingParams, load, patch, unpatch  # noqa: E402
from torch_armllm.checkpoint.quantize_folder import quantize_folder  # noqa: E402
from torch_armllm.engine.images.tower import plan_tower  # noqa: E402
from torch_armllm.patching.forwards.forward import PatchedForward  # noqa: E402
from torch_armllm.patching.forwards.layer_calls import LayerCalls  # noqa: E402
from torch_armllm.patching.state import patched_forward  # noqa: E402
from torch_armllm.plan.native import NativePlan  # noqa: E402
from torch_armllm.quant.inplace import quantize  # noqa: E402

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", params=sorted(PLACEHOLDERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in NEED_TORCHVISION:
        pytest.importorskip("torchvision", reason="needs torchvision")
    if request.param in NEED_TIMM:
        pytest.importorskip("timm", reason="needs the extra timm")
    return picture_folder(tmp_path_factory.mktemp(request.param) / request.param, request.param)


@pytest.fixture(scope="module", params=["llava", "gemma3", "qwen2_vl", "qwen3_vl", "qwen3_5", "paligemma"])
def placed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model of each kind of plan."""
    if request.param in NEED_TORCHVISION:
        pytest.importorskip("torchvision", reason="needs torchvision")
    return picture_folder(tmp_path_factory.mktemp("placed") / request.param, request.param)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_folder(tmp_path_factory.mktemp("llava"), "llava")


@pytest.fixture(scope="module")
def limited(llava: Path) -> LLM:
    return engine(llava, limit_mm_per_prompt={"image": 2})


def engine(folder: Path, **settings: Any) -> LLM:
    options = {"kv_cache_memory": 4 << 20, "progress": False, **settings}
    return LLM(str(folder), quantization=None, dtype="float32", **options)


def expected(folder: Path, prompts: list[dict[str, Any]]) -> list[list[int]]:
    """Returns what the model's own ``generate`` continues prompts with."""
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    results = []
    for prompt in prompts:
        images = prompt.get("multi_modal_data", {}).get("image")
        named = {"text": [prompt["prompt"]], "return_tensors": "pt"}
        if images:  # some processors give bfloat16
            inputs = processor(images=[images], **named).to(torch.float32)
        else:
            inputs = processor.tokenizer(**named)
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
        results.append(ids[0, inputs["input_ids"].shape[1] :].tolist())
    return results


def prompts_of(folder: Path) -> list[dict[str, Any]]:
    """Returns prompts with no, one and two pictures at different places.

    A text follows: transformers' ``generate`` counts on from the row and column of a last picture's corner.
    """
    mark = PLACEHOLDERS[folder.name]
    texts = [
        (f"what is {mark} this", [picture(0)]),
        (f"what is {mark} this", [picture(1, 60, 31)]),
        (f"{mark} what {mark} is", [picture(0), picture(2)]),
        (f"{mark} {'cat dog ' * 20} {mark} what", [picture(2), picture(1)]),
    ]
    prompts: list[dict[str, Any]] = [{"prompt": t, "multi_modal_data": {"image": p}} for t, p in texts]
    if folder.name == "paligemma":  # modules let the tokens of a text attend to later ones by mistake
        return prompts
    return [*prompts, {"prompt": "what is this"}]


def test_answers_are_those_of_transformers(folder: Path) -> None:
    """All at once, in chunks of prompts, and again from the prefix cache."""
    prompts = prompts_of(folder)
    wanted = expected(folder, prompts)
    assert wanted[0] != wanted[1]
    least = 64 if folder.name.startswith("paligemma") else 7  # whose prompts are not divided
    for tokens in (least, 512):
        llm = engine(folder, max_num_batched_tokens=tokens, max_num_seqs=5)
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == wanted
        assert outputs[3].num_cached_tokens > 0


def test_pictures_with_the_same_placeholders_share_nothing(placed: Path) -> None:
    """The placeholders fill whole blocks, which only the same picture may find."""
    text = f"{PLACEHOLDERS[placed.name]} cat " * 8 + "what"
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": [picture(first + n) for n in range(8)]}}
        for first in (0, 60)
    ]
    wanted = expected(placed, prompts)
    llm = engine(placed)
    outputs = [llm.generate(prompts[n], GREEDY, use_tqdm=False)[0] for n in (0, 1, 0)]
    assert [output.outputs[0].token_ids for output in outputs] == [*wanted, wanted[0]]
    assert wanted[0] != wanted[1]
    assert [output.num_cached_tokens > 0 for output in outputs] == [False, False, True]


def test_preempted_and_forked_prompts_keep_their_pictures(placed: Path) -> None:
    mark = PLACEHOLDERS[placed.name]
    prompts = [
        {"prompt": f"what {mark} {'cat ' * n}", "multi_modal_data": {"image": picture(n)}} for n in range(8)
    ]
    (wanted,) = expected(placed, prompts[3:4])
    params = SamplingParams(temperature=1e-4, seed=1, max_tokens=60, ignore_eos=True, n=2)  # greedy, forked
    alone = engine(placed).generate(prompts, params, use_tqdm=False)
    assert alone[3].outputs[1].token_ids[:8] == wanted
    for swap_space in (0, 1 << 20):  # the least memory for two of the sequences at once
        tight = engine(placed, kv_cache_memory=128 << 10, max_model_len=128, swap_space=swap_space)
        together = tight.generate(prompts, params, use_tqdm=False)
        assert tight.llm_engine.scheduler.preemptions > 0
        for one, other in zip(alone, together, strict=True):
            assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]


def test_pictures_of_layers_with_windows_attend_to_later_tokens(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="needs torchvision")
    folder = picture_folder(tmp_path, "gemma4_ahead")
    mark = PLACEHOLDERS["gemma4"]
    texts = [
        (f"what is {mark} this", [picture(0)]),
        (f"{mark} {'cat dog ' * 20} {mark} what", [picture(2), picture(1)]),
    ]
    prompts: list[dict[str, Any]] = [{"prompt": t, "multi_modal_data": {"image": p}} for t, p in texts]
    llm = engine(folder, max_num_batched_tokens=128)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected(folder, prompts)


def is_tower(module: Any) -> bool:
    """True if plans compute the layers of a module."""
    return isinstance(module.forward, PatchedForward) and isinstance(module.forward.calls, LayerCalls)


def tower_of(llm: LLM) -> PatchedForward[LayerCalls]:
    (found,) = (m.forward for m in llm.model.modules() if is_tower(m))
    return found


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_layers_of_towers_are_plans(folder: Path, quantization: str | None) -> None:
    if folder.name in NEED_TIMM:
        pytest.skip("its tower is made of convolutions, which plans do not compute")
    settings: dict[str, Any] = {"kv_cache_memory": 4 << 20, "progress": False, "dtype": "float32"}
    llm = LLM(str(folder), quantization=quantization, **settings)
    forward = tower_of(llm)
    ends = {"qwen2_5_vl": [1, 2], "qwen3_vl": [1, 2, 3], "qwen3_5": [3]}.get(folder.name, [2])
    assert list(accumulate(len(plan.layers) for plan in forward.calls.plans)) == ends
    mark = PLACEHOLDERS[folder.name]
    data = {"image": [picture(0), picture(1, 60, 31)]}
    for _ in range(2):
        llm.generate({"prompt": f"{mark} what {mark} is", "multi_modal_data": data}, GREEDY, use_tqdm=False)
    assert all(isinstance(plan.plan, NativePlan) for plan in forward.calls.plans)
    assert all(plan.calls >= 2 for plan in forward.calls.plans)
    assert forward.base.forward is forward


def places_of(count: int, width: int) -> torch.Tensor:
    """Returns the columns and rows of patches in rows of a width, and padding, ``(count, 2)``."""
    numbers = torch.arange(count)
    return torch.stack([numbers % width, numbers // width], -1)


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_clipped", "llama4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plans_of_towers_compute_what_their_modules_do(kind: str, dtype: torch.dtype) -> None:
    """Patches turn by a row and a column; pictures of Gemma 4 are padded to the largest."""
    model = tower_model(kind)
    tower = model.vision_model if kind == "llama4" else model.model.vision_tower
    for parameter in tower.parameters():  # a buffer of complex numbers stays as it is
        parameter.data = parameter.data.to(dtype)
    generator = torch.Generator().manual_seed(0)
    if kind == "llama4":
        inputs = [torch.randn(3, 3, 32, 32, generator=generator).to(dtype)]
    else:
        places = torch.full((3, 36, 2), -1)
        for number, (count, width) in enumerate([(36, 6), (27, 9), (18, 3)]):
            places[number, :count] = places_of(count, width)
        inputs = [torch.rand(3, 36, 48, generator=generator).to(dtype), places]
    forward = plan_tower(tower, model.config)
    assert forward is not None and all(isinstance(plan.plan, NativePlan) for plan in forward.calls.plans)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tower(*inputs).last_hidden_state.float()
        with forward.by_modules("the test compares with them"):
            warnings.simplefilter("ignore")
            wanted = tower(*inputs).last_hidden_state.float()
    assert forward.calls.count == 1
    bound = 1e-5 if dtype == torch.float32 else 4e-2
    assert (found - wanted).norm() < bound * wanted.norm() and wanted.std(0).min() > 0


@pytest.mark.parametrize(("chosen", "ends"), [(-1, [2]), (-2, [1, 2]), (1, [1, 2])])
def test_plans_of_towers_keep_the_results_that_are_read(chosen: int, ends: list[int], tmp_path: Path) -> None:
    folder = picture_folder(tmp_path, "llava")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"vision_feature_layer": chosen}))
    prompts = [
        {"prompt": f"what is <image> {n}", "multi_modal_data": {"image": picture(n)}} for n in range(2)
    ]
    llm = engine(folder)
    assert list(accumulate(len(plan.layers) for plan in tower_of(llm).calls.plans)) == ends
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected(folder, prompts)
    assert tower_of(llm).calls.count == 2


def test_towers_whose_inner_results_are_read_run_by_modules(llava: Path) -> None:
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip("hidden states are asked for by numbers since transformers 5.23")
    tower = tower_of(engine(llava))
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), tower.by_modules("the test compares with them"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = tower.base(pixels, output_hidden_states=True).hidden_states
    with torch.no_grad():
        found = tower.base(pixels, output_hidden_states=[0, 2]).hidden_states
        assert tower.calls.count == 1 and found[1] is None
        assert torch.allclose(found[2], wanted[2], atol=1e-5)
        with pytest.warns(UserWarning, match="output_hidden_states is requested"):
            assert torch.equal(tower.base(pixels, output_hidden_states=1).hidden_states[1], wanted[1])
    assert tower.calls.count == 1


def test_plans_of_towers_that_compute_others_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_armllm.engine.images.reader.is_close", lambda found, expected: False)
    folder = picture_folder(tmp_path / "smolvlm", "smolvlm")
    prompt = {"prompt": "what is <image> this", "multi_modal_data": {"image": picture(1)}}
    llm = engine(folder)
    for _ in range(2):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids] == expected(folder, [prompt])
    assert not any(map(is_tower, llm.model.modules()))


def test_chat_takes_pictures(llava: Path) -> None:
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [
                {"type": "image_pil", "image_pil": picture(4)},
                {"type": "text", "text": "what is this"},
            ],
        }
    ]
    output = engine(llava).chat(messages, GREEDY, use_tqdm=False)[0]
    prompt = {
        "prompt": "user : <image> what is this  assistant :",
        "multi_modal_data": {"image": [picture(4)]},
    }
    assert [output.outputs[0].token_ids] == expected(llava, [prompt])


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"prompt": "<image>", "multi_modal_data": {"video": 1}}, "takes no videos: its processor takes no"),
        ({"prompt": "<image>", "multi_modal_data": {"vidoe": 1}}, "'vidoe'.* of image, video, audio"),
        ({"prompt": "<image>", "multi_modal_data": {"image": "cat.png"}}, "is a str"),
        ({"prompt": "<image>", "multi_modal_data": {"image": [picture(0)] * 3}}, "allows 2"),
        ({"prompt": "what", "multi_modal_data": {"image": picture(0)}}, "refuses"),
        ({"prompt": "<image>", "multi_modal_data": {"image": picture(0, 201, 1)}}, "201 x 1 .* too narrow"),
        ({"prompt": "<image> <image>", "multi_modal_data": {"image": picture(0)}}, "refuses"),
        ({"prompt_token_ids": [4], "multi_modal_data": {"image": picture(0)}}, "needs its text"),
    ],
    ids=["video", "name", "type", "count", "no-placeholder", "narrow", "two-placeholders", "tokens"],
)
def test_bad_prompts_are_refused(limited: LLM, prompt: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        limited.generate(prompt, GREEDY, use_tqdm=False)
    assert limited.generate("what is this", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_limit_of_zero_serves_text_only(llava: Path) -> None:
    llm = engine(llava, limit_mm_per_prompt={"image": 0})
    with pytest.raises(ValueError, match="allows no pictures"):
        llm.generate({"prompt": "<image>", "multi_modal_data": {"image": picture(0)}}, use_tqdm=False)


def test_models_without_a_processor_are_served_for_text_only() -> None:
    llm = LLM(
        unserved_model(),
        quantization=None,
        skip_tokenizer_init=True,
        kv_cache_memory=4 << 20,
        progress=False,
    )
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": picture(0)}}
    with pytest.raises(ValueError, match="AyaVision.* is served for text only: its files have no processor"):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_prompts_whose_tokens_see_each_other_share_nothing_unless_they_are_the_same(tmp_path: Path) -> None:
    """The picture comes first, and what its tokens compute depends on the words after it."""
    folder = picture_folder(tmp_path / "paligemma", "paligemma")
    texts = [f"{'<image>' * 5} {'cat ' * 20} {word}" for word in ("dog", "red")]
    data = {"image": [picture(n) for n in range(5)]}
    prompts: list[dict[str, Any]] = [{"prompt": text, "multi_modal_data": data} for text in texts]
    wanted = expected(folder, prompts)
    llm = engine(folder)
    outputs = [llm.generate(prompts[n], GREEDY, use_tqdm=False)[0] for n in (0, 1, 0)]
    assert [output.outputs[0].token_ids for output in outputs] == [*wanted, wanted[0]]
    assert [output.num_cached_tokens > 0 for output in outputs] == [False, False, True]
    llm = engine(folder, max_num_batched_tokens=40, max_num_seqs=3)
    with pytest.raises(ValueError, match="prompt with images .* is 4. tokens, .* is 40: raise it"):
        llm.generate(prompts[0], GREEDY, use_tqdm=False)


def test_models_whose_prompts_attend_to_later_tokens_are_called_by_modules(tmp_path: Path) -> None:
    folder = picture_folder(tmp_path, "paligemma")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(12, 24)[None]
    with torch.no_grad():
        logits = model(ids).logits
        assert patch(model, None, progress=False).captured
        with pytest.warns(UserWarning, match="attend to later ones"):
            assert torch.equal(model(ids).logits, logits)
        unpatch(model)
        assert torch.equal(model(ids).logits, logits)


def test_pictures_longer_than_a_step_are_refused_where_their_tokens_see_each_other(tmp_path: Path) -> None:
    llm = engine(picture_folder(tmp_path, "gemma3"), max_num_batched_tokens=3, max_num_seqs=3)
    prompt = {"prompt": "<start_of_image> what", "multi_modal_data": {"image": picture(0)}}
    with pytest.raises(ValueError, match="is 4 tokens, .* max_num_batched_tokens is 3: raise it"):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert llm.generate("what is this", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_sessions_hold_no_pictures(llava: Path, tmp_path: Path) -> None:
    llm = engine(llava)
    prompt = {"prompt": "<image> what", "multi_modal_data": {"image": picture(0)}}
    with pytest.raises(ValueError, match="can only be generated from"):
        llm.save_session(tmp_path / "session", prompt)


def test_the_disk_cache_keeps_no_pictures(llava: Path, tmp_path: Path) -> None:
    """Its keys are token ids, which are the same for all pictures."""
    text = "<image> " * 8 + "what"
    prompts: list[Any] = [
        {"prompt": text, "multi_modal_data": {"image": [picture(first + n) for n in range(8)]}}
        for first in (0, 20)
    ]
    wanted = expected(llava, prompts)
    for n in (0, 1, 0):
        llm = engine(llava, prefix_cache_dir=tmp_path)
        output = llm.generate(prompts[n], GREEDY, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == wanted[n] and not output.num_cached_tokens
        llm.llm_engine.disk.close()


def test_long_prompts_are_refused_before_the_tower_runs(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(llava, max_model_len=16)
    monkeypatch.setattr(llm.picture_reader(), "_read", lambda inputs: pytest.fail("it ran"))
    prompt = {"prompt": "<image> " * 4, "multi_modal_data": {"image": [picture(0)] * 4}}
    with pytest.raises(ValueError, match="max_model_len is 16"):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_embeddings_may_share_the_weights_of_the_head(tmp_path: Path) -> None:
    folder = picture_folder(tmp_path, "tied")
    prompt = {"prompt": "what is <image> this", "multi_modal_data": {"image": picture(0)}}
    (wanted,) = expected(folder, [prompt])
    assert engine(folder).generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == wanted
    check_quantized(folder, "int8", torch.bfloat16, 0.1)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_quantized_plans_compute_what_quantized_modules_do(placed: Path, quantization: str) -> None:
    check_quantized(placed, quantization, torch.float32, 2e-3)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_gemma3n_takes_pictures_when_it_is_quantized(tmp_path: Path, quantization: str) -> None:
    pytest.importorskip("timm", reason="needs the extra timm")
    check_quantized(picture_folder(tmp_path / "gemma3n", "gemma3n"), quantization, torch.float32, 2e-3)


def test_towers_of_timm_name_the_extra_that_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_timm(*_: Any, **__: Any) -> None:
        raise ImportError("Gemma3nVisionConfig requires the timm library but it was not found")

    (tmp_path / "config.json").write_text('{"model_type": "gemma3n"}')
    monkeypatch.setattr("torch_armllm.checkpoint.model_config.AutoConfig.from_pretrained", without_timm)
    for read in (LLM, load):
        with pytest.raises(
            ImportError, match=r'vision tower of .* needs timm: pip install "torch_armllm\[timm'
        ):
            read(str(tmp_path))


def test_llama4_takes_pictures_beside_experts(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="needs torchvision")
    check_quantized(picture_folder(tmp_path / "llama4", "llama4_moe"), "int8", torch.float32, 2e-3)


def test_llama4_computes_texts_by_its_plan(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="needs torchvision")
    folder = picture_folder(tmp_path, "llama4")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(12, 24)[None]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        logits, wanted = model(ids).logits, model.generate(ids, **options)
        assert patch(model, None, progress=False).captured
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.allclose(model(ids).logits, logits, atol=1e-4)
            assert torch.equal(model.generate(ids, **options), wanted)
        unpatch(model)
        assert torch.equal(model(ids).logits, logits)


def check_quantized(placed: Path, quantization: str, dtype: torch.dtype, bound: float) -> None:
    """Compares the log-probabilities after a picture with those of the quantized modules."""
    llm = LLM(str(placed), quantization=quantization, dtype=dtype, kv_cache_memory=4 << 20, progress=False)
    forward = patched_forward(llm.model)
    assert forward is not None
    processor = AutoProcessor.from_pretrained(placed)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
    for number in (0, 5):
        text, shown = f"what is {PLACEHOLDERS.get(placed.name, '<image>')} this", picture(number)
        (output,) = llm.generate(
            {"prompt": text, "multi_modal_data": {"image": shown}}, params, use_tqdm=False
        )
        inputs = processor(text=[text], images=[[shown]], return_tensors="pt")
        inputs = inputs.to(dtype=dtype)
        with torch.no_grad(), forward.by_modules("the test compares with them"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logits = llm.model(**inputs).logits[0, -1]
        found = output.outputs[0].logprobs[0]
        for token, value in found.items():
            assert value.logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=bound)


def test_saved_folders_take_pictures_at_every_start(llava: Path, tmp_path: Path) -> None:
    """Their plan is not cached, which would leave the vision tower out."""
    load(str(llava), "int8").save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(llava).save_pretrained(tmp_path)
    prompt = {"prompt": "what is <image> this", "multi_modal_data": {"image": picture(0)}}
    answers = []
    for _ in range(2):
        llm = LLM(str(tmp_path), kv_cache_memory=4 << 20, progress=False)
        answers.append(llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1] and llm.has_model


def test_towers_are_int8(folder: Path) -> None:
    check_towers(folder, Recipe(), "int8")


@pytest.mark.parametrize(
    ("recipe", "scheme"),
    [
        (Recipe("int8"), "int8"),
        (Recipe("g64"), "g64"),
        (Recipe(overrides={"vision": "int4"}), "g32iz"),
        (Recipe(overrides={"vision": None}), None),
    ],
    ids=["int8", "g64", "int4", "none"],
)
def test_towers_are_what_is_asked_for(placed: Path, recipe: Recipe, scheme: str | None) -> None:
    check_towers(placed, recipe, scheme)


def check_towers(folder: Path, recipe: Recipe, scheme: str | None) -> None:
    """Checks the schemes of the layers that see, and of those of the text."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    records = {record.name: record for record in quantize(model, recipe, progress=False)}
    towers = ("vision", "visual", "projector", "connector")
    sees = [name for name in records if any(part in name for part in towers)]
    inner = [name for name in records if "text_model" in name or "language_model" in name]
    texts = [name for name in inner if not name.endswith("lm_head")]
    assert sees and texts
    assert {records[name].scheme for name in sees if records[name].quantized} == {scheme} - {None}
    assert {records[name].scheme for name in texts if records[name].quantized} == {recipe.scheme}


@pytest.mark.parametrize("importance", [None, False])
def test_folders_are_quantized_as_models_in_memory(
    folder: Path, importance: bool | None, tmp_path: Path
) -> None:
    if importance is None and folder.name == "gemma4":
        pytest.skip("its layers do not run one at a time, so a folder's get no input statistics")
    if importance is None and folder.name.startswith(("paligemma", "gemma3n")):
        pytest.skip("its input statistics differ where its layers run one at a time")
    recipe = Recipe(importance=importance, head=None)
    quantize_folder(folder, tmp_path / "out", recipe, progress=False)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    quantize(model, recipe, progress=False)
    model.save_pretrained(tmp_path / "saved")
    ours, theirs = (
        {
            name: tensor
            for file in (tmp_path / kind).glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        for kind in ("out", "saved")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    mark = PLACEHOLDERS[folder.name]
    prompt = {"prompt": f"what is {mark} this", "multi_modal_data": {"image": picture(0)}}
    llm = LLM(str(tmp_path / "out"), kv_cache_memory=4 << 20, progress=False)
    assert len(llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8
