"""From a high format to a low one: by hand, and for any number of layers and steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsam.kernels.formats import BF16, FP8, FP16, FP32, INT8, PRODUCTS
from sparsam.precision.policies import Evidence
from sparsam.precision.progressive import Progressive


def units_of(*layers):
    return tuple(f"{layer}/{product}" for layer in layers for product in PRODUCTS)


def at(policy, units, step):
    return {unit: one.format for unit, one in policy.decide(policy.start(units), Evidence(), step).items()}


def test_by_hand():
    """Two layers and the head: six products, one every two steps from step 10 on."""
    policy = Progressive("bf16", "int8", transition_steps=12, begin=10, cooldown_at=30)
    units = units_of("a", "b", "head")
    order = ["a/input_gradient", "a/weight_gradient", "b/input_gradient", "b/weight_gradient", "b/forward", "a/forward"]
    for step, count in {0: 0, 10: 0, 11: 0, 12: 1, 13: 1, 14: 2, 18: 4, 20: 5, 21: 5, 22: 6, 23: 6, 29: 6}.items():
        found = at(policy, units, step)
        assert [unit for unit in order if found[unit] == "int8"] == order[:count]
    cooled = at(policy, units, 30)
    assert [unit for unit in order if cooled[unit] == "int8"] == order[:4]
    assert at(policy, units, 10**9) == cooled
    assert {at(policy, units, step)[f"head/{product}"] for step in (0, 22, 99) for product in PRODUCTS} == {"fp32"}


def test_what_is_not_converted():
    units = units_of("attn.qkv", "attn.out", "up", "down", "head")
    found = at(Progressive("fp16", "fp8", 1, rules={"up": "bf16", "*/weight_gradient": "fp32"}), units, 10)
    assert [found[unit] for unit in units_of("attn.qkv")] == ["fp8", "fp8", "fp32"]
    assert [found[unit] for unit in units_of("attn.out")] == ["fp16", "fp16", "fp32"]
    assert [found[unit] for unit in units_of("up")] == ["bf16", "bf16", "fp32"]
    assert [found[unit] for unit in units_of("down")] == ["fp8", "fp8", "fp32"]
    assert [found[unit] for unit in units_of("head")] == ["fp32", "fp32", "fp32"]
    assert at(Progressive(head="fp16"), units, 0)["head/forward"] == "fp16"


formats = st.sampled_from([("fp32", "bf16"), ("bf16", "int8"), ("fp16", "fp8"), ("bf16", "mx_fp8")])


@given(
    formats,
    st.integers(1, 12),
    st.integers(1, 10_000),
    st.integers(0, 5_000),
    st.lists(st.integers(0, 20_000), min_size=2, max_size=8),
)
def test_conversion_is_monotonic_in_order_and_as_many_as_are_due(names, count, transition, begin, steps):
    policy = Progressive(*names, transition, begin)
    layers = [f"layer{number}" for number in range(count)]
    units, n = units_of(*layers, "head"), 3 * count
    before: set[str] = set()
    for step in sorted(steps):
        found = at(policy, units, step)
        low = {unit for unit, format in found.items() if format == names[1] and not unit.startswith("head/")}
        due = sum((step - begin) * n >= (i + 1) * transition for i in range(n))
        assert len(low) == due
        assert policy.converted_share(step) == min(max(step - begin, 0), transition) / transition
        assert before <= low  # none is ever converted back
        gradients = [unit for unit in units if unit.endswith("gradient") and not unit.startswith("head/")]
        if any(unit.endswith("/forward") for unit in low):
            assert low.issuperset(gradients)
        for product, walk in (("input_gradient", layers), ("weight_gradient", layers), ("forward", layers[::-1])):
            done = [f"{layer}/{product}" in low for layer in walk]
            assert done == sorted(done, reverse=True)
        before = low


@given(st.integers(1, 8), st.integers(1, 100), st.integers(0, 50), st.integers(0, 200), st.integers(0, 250))
def test_the_state_depends_on_the_step_alone(count, transition, begin, later, step):
    """Whatever came before: asked at every step, or resumed with the state of another one."""
    policy = Progressive("bf16", "int8", transition, begin, cooldown_at=begin + later)
    state = start = policy.start(units_of(*(f"layer{number}" for number in range(count)), "head"))
    for one in range(step + 1):
        state = policy.decide(state, Evidence(finite=False), one)
    assert state == policy.decide(start, Evidence(), step)
    assert state == policy.decide(policy.decide(start, Evidence(), 10**6), Evidence(), step)
    forwards = {one.format for unit, one in state.items() if unit.endswith("/forward")}
    if step >= begin + later:
        assert forwards <= {"bf16", "fp32"}
    assert policy.start(tuple(start)) == start


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial": "fp8", "final": "fp16"}, "expected a final format of fewer bits than fp8, got fp16. Choose"),
        ({"initial": "bf16", "final": "fp16"}, "fewer bits than bf16, got fp16"),
        ({"final": "fp9"}, "got 'fp9'. Did you mean"),
        ({"transition_steps": 0}, "transition_steps: expected at least 1, got 0"),
        ({"begin": -1}, "begin: expected a step, 0 or later, got -1"),
        ({"begin": 5, "cooldown_at": 4}, r"cooldown_at: expected a step after begin \(5\), got 4"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Progressive(**arguments)


def test_a_rule_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"rules: 'hed' matches no layer. Did you mean 'head'\?"):
        Progressive(rules={"hed": "fp32"}).start(units_of("up", "head"))


def test_the_formats_that_a_device_must_have():
    assert Progressive().lowest == (FP8, FP16, FP32)
    assert Progressive(BF16, INT8, rules={"a": "fp8"}, head="bf16").lowest == (INT8, FP8, BF16)
