"""Names of the cache in a call of a model, by the release that is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torch_armllm.hf import cache_names


@pytest.fixture(params=cache_names.CACHE_NAMES[:2])
def usual(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name that most models use, of a newer and of an older release."""
    monkeypatch.setattr(cache_names, "usual_name", lambda: request.param)
    cache_names.taken_names.cache_clear()
    yield request.param
    cache_names.taken_names.cache_clear()


def test_the_usual_name_and_older_ones_are_the_cache(usual: str) -> None:
    names = cache_names.CACHE_NAMES[cache_names.CACHE_NAMES.index(usual) :]
    for name in names:
        arguments = {name: "keys", "use_cache": True}
        assert cache_names.given_cache(arguments) == "keys"
        assert cache_names.take_cache(arguments) == "keys"
        assert arguments == {"use_cache": True}


def test_a_newer_name_is_handed_on(usual: str) -> None:
    newer = cache_names.CACHE_NAMES[: cache_names.CACHE_NAMES.index(usual)]
    arguments = dict.fromkeys(newer, "of the attention")
    assert cache_names.take_cache(arguments) is None
    assert arguments == dict.fromkeys(newer, "of the attention")
