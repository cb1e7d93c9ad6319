"""Places of processes in stages of ranks."""

from __future__ import annotations

import pytest

from torch_armllm.parallel.rank_place import RankPlace


@pytest.mark.parametrize(("tensor_ranks", "stages"), [(1, 1), (3, 1), (1, 4), (2, 3)])
def test_rows_pass_every_stage_and_stay_on_a_tensor_rank(tensor_ranks: int, stages: int) -> None:
    places = [RankPlace(rank, tensor_ranks, stages) for rank in range(tensor_ranks * stages)]
    for place in places:
        assert place.rank == place.stage * tensor_ranks + place.tensor_rank
        assert place.rank == place.members[place.tensor_rank]
        following = places[place.following]
        assert following.previous == place.rank and following.tensor_rank == place.tensor_rank
        assert following.stage == (place.stage + 1) % stages


def test_a_place_has_the_name_that_its_user_asked_for() -> None:
    assert str(RankPlace(1, 2, 1)) == "tensor parallel rank 1"
    assert str(RankPlace(1, 1, 2)) == "pipeline stage 1"
    assert str(RankPlace(3, 2, 2)) == "tensor parallel rank 1 of pipeline stage 1"
