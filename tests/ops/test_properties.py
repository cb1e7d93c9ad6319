"""Every op: parts have the bits of the whole, strides and variants change nothing, NaN stays in its row."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.fuzz.ops.target import same, tensors_of
from tests.ops import refusals
from tests.ops.properties import ROWS, SEQUENCES, TESTED, OpCall
from tests.ops.references import REFERENCES, assert_near, comparable, reference
from torch_armllm.ops import variants

RUNNABLE = variants.machine().runnable
ATTENTION = [name for name in SEQUENCES if name.endswith("attention") or name.startswith("select_")]
"""Ops on sequences that compute each token of them alone."""
LEADING = [name for name in ROWS if not name.startswith(("sample", "best", "top")) and "heads" not in name]
"""Ops whose tokens may have any number of dimensions."""
BFMMLA = any(table["dense"] == "i8mm" for table in variants.machine().tables.values())
"""True if a variant multiplies bfloat16 by bfloat16 with an instruction that rounds differently."""
CONTIGUOUS = {
    *("k_cache", "v_cache", "k_scales", "v_scales", "cache", "keys", "entries", "state", "rest"),
    *("a", "b", "inner_a", "inner_b", "outer_a", "outer_b"),
}
"""Arguments that are refused if they are not contiguous."""
EXAMPLES = settings(max_examples=10, deadline=None)
SEEDS = st.integers(0, 2**32)


def run(call: OpCall, variant: str | None = None) -> list[Tensor]:
    """Calls an op on copies of what it writes."""
    with variants.use(variant or variants.machine().selected):
        return call.copied().run()


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=16, deadline=None)
@given(seed=SEEDS)
def test_results_are_those_of_references(name: str, seed: int) -> None:
    call, draw = comparable(OpCall.random(name, seed)), Random(seed)
    assume(not call.folds and ("moe" not in name or call.tokens))
    own, variant = call.copied(), draw.choice(RUNNABLE)
    with variants.use(variant):
        found = [*tensors_of(own.op(**own.arguments)), *(own.arguments[key] for key in own.written)]
    for each, expected in zip(found, reference(call, variant), strict=True):
        assert_near(call, each, expected, variant)


@pytest.mark.parametrize("name", ROWS)
@EXAMPLES
@given(seed=SEEDS)
def test_rows_have_the_bits_of_rows_alone(name: str, seed: int) -> None:
    call, draw = OpCall.random(name, seed), Random(seed)
    variant = draw.choice(RUNNABLE)
    whole, cut = run(call, variant), draw.randint(0, call.tokens)
    assume(not call.folds)
    for tokens in (slice(0, cut), slice(cut, call.tokens), *(slice(t, t + 1) for t in range(call.tokens))):
        for found, expected in zip(run(call.part(tokens), variant), whole, strict=True):
            assert same(found, expected[tokens]), tokens


@pytest.mark.parametrize("name", SEQUENCES)
@EXAMPLES
@given(seed=SEEDS)
def test_sequences_have_the_bits_of_their_parts_alone(name: str, seed: int) -> None:
    call, draw = OpCall.random(name, seed), Random(seed)
    with variants.use(draw.choice(RUNNABLE)):
        together, apart = call.copied(), call.copied()
        whole = together.run()
        for tokens, part in apart.parts(draw):
            for found, expected in zip(part.run(), whole, strict=True):
                assert same(found, expected[tokens])
    for written in call.written:
        assert same(apart.arguments[written], together.arguments[written]), written


@pytest.mark.parametrize("name", [*ROWS, *ATTENTION])
@EXAMPLES
@given(seed=SEEDS)
def test_values_that_are_not_finite_stay_in_their_row(name: str, seed: int) -> None:
    call, draw = OpCall.random(name, seed), Random(seed)
    floats = [key for key in call.by_token if call.arguments[key].is_floating_point()]
    floats = [key for key in floats if call.arguments[key].dim() > 1 or key == "scales"]
    if not floats or call.tokens == 0:
        return
    key, row, variant = draw.choice(floats), draw.randrange(call.tokens), draw.choice(RUNNABLE)
    value = call.arguments[key].clone()
    if name.startswith("sample") and value.shape[1] == 1 or value[row].numel() == 0:
        return
    value[row].view(-1)[draw.randrange(value[row].numel())] = draw.choice((float("nan"), float("inf")))
    others = [t for t in range(call.tokens) if t != row]
    for found, expected in zip(run(call.replaced(**{key: value}), variant), run(call, variant), strict=True):
        assert found.numel() == 0 or same(found[others], expected[others])


def strided(value: Tensor, draw: Random) -> Tensor:
    """Returns equal rows with gaps of sevens between them, or with other strides."""
    if value.dim() > 1 and value.dtype != torch.uint8 and draw.random() < 0.4:
        return value.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
    wide = torch.full((*value.shape[:-1], value.shape[-1] + 5), 7).to(value.dtype)
    wide[..., 2:-3] = value
    return wide[..., 2:-3]


def gaps_are_kept(value: Tensor) -> bool:
    """True if nothing was written to the gaps of `strided`."""
    whole = value if value._base is None else value._base
    if whole.shape[:-1] != value.shape[:-1] or whole.shape[-1] == value.shape[-1]:
        return True
    return bool((whole[..., :2] == 7).all()) and bool((whole[..., -3:] == 7).all())


@pytest.mark.parametrize("name", TESTED)
@EXAMPLES
@given(seed=SEEDS)
def test_strides_do_not_change_bits(name: str, seed: int) -> None:
    call, draw = OpCall.random(name, seed), Random(seed)
    with variants.use(draw.choice(RUNNABLE)):
        expected = call.copied().run()
        for key, value in call.arguments.items():
            if not isinstance(value, Tensor) or value.dim() == 0 or key in CONTIGUOUS:
                continue
            other = call.copied().replaced(**{key: strided(value, draw)})
            assert all(same(a, b) for a, b in zip(other.run(), expected, strict=True)), key
            assert gaps_are_kept(other.arguments[key]), key


@pytest.mark.parametrize("name", LEADING)
@EXAMPLES
@given(seed=SEEDS)
def test_leading_dimensions_do_not_change_bits(name: str, seed: int) -> None:
    call, draw = OpCall.random(name, seed), Random(seed)
    count, variant = call.tokens, draw.choice(RUNNABLE)
    shapes: list[tuple[int, ...]] = [(1, count), (count, 1)]
    shapes += [(2, count // 2)] * (count % 2 == 0)
    shapes += [()] * (count == 1 and name != "rope_")  # whose rows are heads: tokens have a dimension
    lead = draw.choice(shapes)
    keys = [key for key in call.by_token if key != "adapters"]
    shaped = {key: call.arguments[key].reshape((*lead, *call.arguments[key].shape[1:])) for key in keys}
    for found, expected in zip(run(call.replaced(**shaped), variant), run(call, variant), strict=True):
        assert same(found.reshape(expected.shape), expected), lead


def variants_round_differently(call: OpCall) -> bool:
    """True where some variants multiply numbers as they are stored, and others float32."""
    given = [call.arguments.get(key) for key in ("k_cache", "cache", "x", "weight")]
    stored = {value.dtype for value in given if isinstance(value, Tensor)}
    if call.name.startswith("dense"):
        return BFMMLA and stored == {torch.bfloat16}
    arm = "dotprod" in RUNNABLE  # whose kernels add a few products in float16
    exact = {torch.float32} if arm else {torch.float32, torch.float16}
    return call.name.endswith("_attention") and not stored <= exact


@pytest.mark.parametrize("name", TESTED)
@EXAMPLES
@given(seed=SEEDS)
def test_variants_have_the_same_bits(name: str, seed: int) -> None:
    call = OpCall.random(name, seed)
    assume(not call.folds and not variants_round_differently(call))
    results = []
    for variant in RUNNABLE:
        each = call.copied()
        with variants.use(variant):
            results.append(each.run() + [each.arguments[written] for written in call.written])
    for found in results[1:]:
        assert all(same(a, b) for a, b in zip(found, results[0], strict=True))


@pytest.mark.parametrize("name", TESTED)
@settings(max_examples=4, deadline=None)
@given(seed=SEEDS)
def test_threads_do_not_change_bits(name: str, seed: int) -> None:
    call, draw, threads = OpCall.random(name, seed), Random(seed), torch.get_num_threads()
    variant = draw.choice(RUNNABLE)
    try:
        torch.set_num_threads(1)
        expected = run(call, variant)
        torch.set_num_threads(draw.choice((2, 3, 5)))
        assert all(same(a, b) for a, b in zip(run(call, variant), expected, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", TESTED)
def test_opcheck(name: str) -> None:
    """All checks, which trace the op, of one that writes to its arguments; of others those of the schema."""
    checks = ("test_schema", "test_faketensor")
    calls = [OpCall.random(name, seed, flat=False) for seed in range(5)]
    finite = (call for call in calls if all(bool(x.isfinite().all()) for x in call.copied().run()))
    if calls[0].written and (whole := next(finite, None)):
        torch.library.opcheck(whole.op, (), whole.arguments)
    for call in calls:
        torch.library.opcheck(call.op, (), call.arguments, test_utils=checks)


@pytest.mark.parametrize("name", TESTED)
def test_results_have_sizes_where_those_of_arguments_are_symbols(name: str) -> None:
    call, mode = OpCall.random(name, 3, flat=False), FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        own = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in call.arguments.items()}
        found = list(tensors_of(call.op(**own)))
    for fake, real in zip(found, tensors_of(call.copied().op(**call.copied().arguments)), strict=True):
        assert fake.dtype == real.dtype
        assert [int(size) for size in fake.shape] == list(real.shape)


def test_what_ops_say_of_wrong_arguments() -> None:
    """`python -m tests.ops.refusals` writes down what they say."""
    assert refusals.refusals() == refusals.FILE.read_text()
