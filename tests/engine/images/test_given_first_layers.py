"""Models whose decoder takes images itself, and multiplies embeddings and adds those of positions."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra vision")

from tests.engine.images.test_trial import check  # noqa: E402
from tests.support.picture_folders import picture  # noqa: E402
from torch_armllm.engine.images.decoder_call import ReadingModel, proportion  # noqa: E402
from torch_armllm.engine.images.prompt_rows import shown_tokens  # noqa: E402
from torch_armllm.engine.images.trial import is_read  # noqa: E402
from torch_armllm.model_survey.tiny_models import build_tiny, tiny_config  # noqa: E402
from torch_armllm.model_survey.tiny_processors import model_kind, tiny_multimodal  # noqa: E402

FAMILY = "kosmos-2.5"
BEFORE, ROWS, AFTER = 2, 64, 5


def randomized(model: Any) -> Any:
    """Returns the model with norms that are not 1, and biases that are not 0."""
    random = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.8, generator=random)
    return model.float().eval()


def inputs(config: Any) -> dict[str, Any]:
    """Returns a prompt with an image between texts, as the processor makes it."""
    random = torch.Generator().manual_seed(2)
    tokens = BEFORE + ROWS + AFTER
    patches = torch.randn(1, 12, config.vision_config.patch_embed_hidden_size + 2, generator=random)
    patches[..., :2] = torch.tensor([[row, column] for row in (1, 2, 3) for column in (1, 2, 3, 4)])
    mask = torch.zeros(1, tokens, dtype=torch.int64)
    mask[:, BEFORE : BEFORE + ROWS] = 1
    ids = torch.randint(5, 90, (1, tokens), generator=random)
    return {"input_ids": ids, "flattened_patches": patches, "image_embeds_position_mask": mask}


@pytest.mark.parametrize("scaled", [True, False])
def test_embeddings_are_found_behind_a_factor_and_positions(scaled: bool) -> None:
    config = tiny_config(FAMILY)
    config.text_config.scale_embedding = scaled
    model = randomized(build_tiny(model_kind(), config))
    given = inputs(config)
    reading = ReadingModel(model, model.forward, nullcontext)
    call = reading.decoder_call(given)
    image = given["image_embeds_position_mask"][0].bool()
    assert torch.equal(shown_tokens(reading, given["input_ids"][0], call), image)
    text = model.text_model.model
    with torch.no_grad():
        wanted = model.get_image_features(given["flattened_patches"]).pooler_output[0]
        segments = text.segment_emb.weight
        wanted = wanted + (segments[1] - segments[0]) / text.embed_scale
        assert torch.equal(call.embeddings[~image], text.embed_tokens(given["input_ids"][0])[~image])
    torch.testing.assert_close(call.embeddings[image], wanted, atol=1e-4, rtol=1e-4)
    assert is_read(reading, given, call)


def test_a_base_model_that_drops_the_image_is_told() -> None:
    config = tiny_config(FAMILY)
    base = randomized(build_tiny(model_kind(), config)).text_model.model
    reading = ReadingModel(base, base.forward, nullcontext)
    given = inputs(config)
    assert not is_read(reading, given, reading.decoder_call(given))


def test_a_tensor_is_a_positive_multiple_of_another_or_none() -> None:
    given = torch.randn(5, 7, dtype=torch.float64)
    assert proportion(given, 3 * given) == pytest.approx(3)
    assert proportion(given, -given) is None
    assert proportion(given, given.flip(0)) is None
    assert proportion(torch.zeros_like(given), given) is None


@pytest.mark.parametrize("values", [{}, {"scale_embedding": False, "embed_dim": 48, "layers": 3}])
def test_answers_are_those_of_transformers(values: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="needs torchvision")
    text = {**tiny_config(FAMILY).text_config.to_dict(), "tie_word_embeddings": False, **values}
    model, processor = tiny_multimodal(FAMILY, text_config=text)
    processor.image_processor.max_patches = 64
    randomized(model).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    texts = [("w7 w8", picture(0)), ("w1 w2 w31 w4 w5", picture(1, 60, 31)), ("w7", picture(2))]
    prompts: list[Any] = [{"prompt": text, "multi_modal_data": {"image": image}} for text, image in texts]
    sizes = ("height", "width")
    given = [processor(text=[text], images=[image], return_tensors="pt") for text, image in texts]
    check(tmp_path, model, prompts, [{k: v for k, v in each.items() if k not in sizes} for each in given])
