"""A few random models that take images; ``make fuzz-media`` runs every family."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torchvision", reason="needs torchvision, as most processors do")

from tests.fuzz import media  # noqa: E402
from tests.fuzz.media import main, run  # noqa: E402
from tests.fuzz.media_configurations import draw_media, media_prompts  # noqa: E402
from torch_armllm.model_survey.tiny_processors import tiny_multimodal  # noqa: E402


def test_random_configuration() -> None:
    assert run(draw_media(0, "internvl")) == {"image": 4, "video": 3, "text": 1}


def test_cases_and_prompts_repeat_and_vary() -> None:
    assert draw_media(1, "llava") == draw_media(1, "llava")
    assert len({str(draw_media(seed, "llava").overrides) for seed in range(3)}) > 1
    processor = tiny_multimodal("llava")[1]
    one, other = media_prompts(processor, 0), media_prompts(processor, 1)
    assert [each["prompt"] for each in one] != [each["prompt"] for each in other]
    assert [len(each.get("multi_modal_data", {}).get("image", ())) for each in one] == [1, 1, 3, 0]


def test_difference_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    own = media._expected

    def wrong(*arguments: Any) -> Any:
        tokens, logits = own(*arguments)
        logits[0, 5] += 2e-3 * logits.abs().max()
        return tokens, logits

    monkeypatch.setattr(media, "_expected", wrong)
    assert main(["--family", "llava", "--seeds", "1"]) == 1
    assert "FINDING seed 0: llava(" in capsys.readouterr().out
