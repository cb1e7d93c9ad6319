"""The forest holds every text once, and shares what is worth it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from torch_armllm.evaluation.prefix_tree import Node, build_forest

texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def _all(forest: list[Node]) -> list[Node]:
    return [node for root in forest for node in root.walk()]


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(1, 4))
def test_every_position_of_every_text_is_there_once(sequences: list[list[int]], least: int) -> None:
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
def test_children_go_on_where_their_parent_ends(sequences: list[list[int]], least: int) -> None:
    for node in _all(build_forest(sequences, least)):
        assert node.end > node.start
        if node.children:
            assert node.end - node.start >= least
        for child in node.children:
            assert child.start == node.end and set(child.sequences) <= set(node.sequences)


def test_a_question_is_read_once_for_all_of_its_answers() -> None:
    question = list(range(20))
    forest = build_forest([[*question, 50], [*question, 60, 61], [*question, 60, 71], [99, 98]])
    root, other = forest
    assert (root.start, root.end, sorted(root.sequences)) == (0, 20, [0, 1, 2])
    assert [(child.start, child.end) for child in root.children] == [(20, 21), (20, 22), (20, 22)]
    assert (other.sequences, other.children) == ([3], [])


def test_equal_sequences_are_one_node_however_short() -> None:
    (node,) = build_forest([[5, 6], [5, 6]])
    assert sorted(node.sequences) == [0, 1] and not node.children
