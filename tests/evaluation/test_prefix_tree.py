"""The forest covers every sequence once, and shares long prefixes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from torch_armllm.evaluation.prefix_tree import Node, build_forest

texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def _all(forest: list[Node]) -> list[Node]:
    return [node for root in forest for node in (root, *_all(root.children))]


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(1, 4))
def test_every_position_is_covered_once(sequences: list[list[int]], least: int) -> None:
    found: dict[tuple[int, int], int] = {}
    for node in _all(build_forest(sequences, least)):
        pieces = {tuple(sequences[number][: node.end]) for number in node.sequences}
        assert len(pieces) == 1, "the sequences of a node agree up to its end"
        for number in node.sequences:
            for position in range(node.start, node.end):
                found[number, position] = found.get((number, position), 0) + 1
    assert found == {(n, p): 1 for n, text in enumerate(sequences) for p in range(len(text))}


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(1, 4))
def test_children_start_at_the_end_of_their_parent(sequences: list[list[int]], least: int) -> None:
    for node in _all(build_forest(sequences, least)):
        assert node.end > node.start
        if node.children:
            assert node.end - node.start >= least
        for child in node.children:
            assert child.start == node.end and set(child.sequences) <= set(node.sequences)


def test_continuations_share_their_context() -> None:
    question = list(range(20))
    forest = build_forest([[*question, 50], [*question, 60, 61], [*question, 60, 71], [99, 98]])
    root, other = forest
    assert (root.start, root.end, sorted(root.sequences)) == (0, 20, [0, 1, 2])
    assert [(child.start, child.end) for child in root.children] == [(20, 21), (20, 22), (20, 22)]
    assert (other.sequences, other.children) == ([3], [])


def test_equal_sequences_share_one_node_at_any_length() -> None:
    (node,) = build_forest([[5, 6], [5, 6]])
    assert sorted(node.sequences) == [0, 1] and not node.children
