"""The survey asks the product which of images, videos and sound a tiny model takes."""

from __future__ import annotations

import pytest

from torch_armllm.model_survey.media import MEDIA, TAKEN, media_counts
from torch_armllm.model_survey.page import media_markdown
from torch_armllm.model_survey.table import Family, survey, survey_all


def test_a_family_of_images_is_tried_with_one() -> None:
    row = survey("llava", MEDIA)
    assert (row.runs, row.media) == ("plan", {"image": TAKEN})


def test_a_family_without_a_processor_says_so_and_runs_its_texts() -> None:
    row = survey("mistral4", MEDIA)
    assert row.runs == "plan"
    assert row.media["image"] == "ValueError: transformers maps no processor to mistral4"


def test_rows_and_counts_tell_what_is_taken_and_why_not() -> None:
    rows = [
        Family("one", "plan", "", (), 1.0, MEDIA, {"image": TAKEN, "video": "no timestamps"}),
        Family("two", "modules", "a reason", (), 1.0, MEDIA, {"image": "no native plan"}),
    ]
    assert media_markdown(rows).splitlines()[2:] == [
        "| `one` | plan | yes | no |  | no timestamps |",
        "| `two` | modules | no |  |  | a reason; no native plan |",
    ]
    assert media_counts([row.media for row in rows]) == (
        "1 of 2 take images, 0 of 1 take videos, 0 of 0 take sound"
    )


def test_a_family_of_texts_alone_is_no_family_of_media() -> None:
    with pytest.raises(ValueError, match="of type llama"):
        next(iter(survey_all(["llama"], only_media=True)))
