"""The adaptive policy on tables of evidence: what lowers, what raises, and what no evidence can make it do."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparsam.kernels.formats import BF16, FP8, FP16, FP32, INT8, TF32
from sparsam.precision.adaptive import Adaptive, _innocent, fault, unclean
from sparsam.precision.policies import Evidence, UnitState
from sparsam.precision.stats import ProductSample

GOOD = ProductSample(True, 0.0, 0.0, 0.0001, 1.0, 0.01, 1.0)
BAD = replace(GOOD, underflow=0.5)
NOT_FINITE = ProductSample(False, 1.0, 1.0, math.inf, -1.0, math.inf, math.inf)
FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
UNITS = ("up/forward", "up/input_gradient", "up/weight_gradient")
UP = UNITS[0]


def seen(samples=GOOD, gain=2.0, gap=0.0, units=UNITS, **more):
    """Evidence of one sample; `samples` is one for all formats or one per format."""
    samples = samples if isinstance(samples, dict) else dict.fromkeys(FORMATS, samples)
    probe = None if gap is None else lambda trial: gap
    gain = gain if callable(gain) else lambda unit, format, gain=gain: gain
    return Evidence(dict.fromkeys(units, samples), gain=gain, probe=probe, **more)


def after(policy, evidences, state=None, first=0):
    """States after a sample every `sample_every` steps."""
    state = state or policy.start(UNITS)
    for count, evidence in enumerate(evidences):
        state = policy.decide(state, evidence, first + count * policy.sample_every)
    return state


def formats_of(state):
    return [one.format for one in state.values()]


def in_int8(policy=None, at=160):
    """The state of a policy whose units came down to int8 at step 160, by the shortest way."""
    policy = policy or Adaptive()
    state = after(policy, [seen()] * 6)
    assert formats_of(state) == ["int8"] * 3
    assert state[UP].lowered_at == at
    return state


# lowering


def test_three_clean_samples_lower_by_one_format():
    policy = Adaptive()
    history = [formats_of(after(policy, [seen()] * count))[0] for count in range(8)]
    assert history == ["fp32", "fp32", "fp32", "bf16", "bf16", "bf16", "int8", "int8"]


def test_steps_without_a_sample_count_for_nothing():
    policy = Adaptive()
    state = after(policy, [seen()] * 2)
    assert policy.decide(state, Evidence(), 33) is state


def test_clean_samples_must_be_in_a_row():
    unclean_bf16 = seen({**dict.fromkeys(FORMATS, GOOD), "bf16": BAD})
    policy = Adaptive()
    state = after(policy, [seen(), seen(), unclean_bf16, seen(), seen()])
    assert formats_of(state) == ["fp32"] * 3
    assert state[UP].clean == 2
    assert after(policy, [unclean_bf16])[UP].rejected == {"bf16": "50% of values become zero"}
    assert after(policy, [unclean_bf16, *[seen()] * 3])[UP] == UnitState("bf16", cool_down=256, lowered_at=96)


def test_without_a_probe_nothing_goes_below_16_bits():
    policy = Adaptive()
    state = after(policy, [seen(gap=None)] * 50)
    assert formats_of(state) == ["bf16"] * 3
    assert state[UP].rejected == {"int8": "needs a probe of the loss, and the loop gives none"}
    # nor when the probe is gone just before the last sample
    state = after(policy, [seen()] * 5 + [seen(gap=None)])
    assert formats_of(state) == ["bf16"] * 3


@pytest.mark.parametrize(("gain", "lowered"), [(1.04, False), (1.05, True), (math.nan, False)])
def test_a_format_must_pay(gain, lowered):
    state = after(Adaptive(), [seen(gain=gain)] * 3)
    assert formats_of(state) == ["bf16" if lowered else "fp32"] * 3


def test_what_does_not_pay_is_noted_and_tried_again_after_doubled_waits():
    asked = []
    step = 0

    def gain(unit, format):
        if unit == UP and format is INT8:
            asked.append(step)
        return 0.62 if format is INT8 else 3.0

    policy = Adaptive(sample_every=8)
    state = policy.start(UNITS)
    for step in range(0, 2400, 8):
        state = policy.decide(state, seen(gain=gain), step)
    assert formats_of(state) == ["bf16"] * 3
    assert state[UP].rejected == {"int8": "0.62x of bf16's speed, casts included"}
    assert asked == [24, 24 + 256, 24 + 256 + 512, 24 + 256 + 512 + 1024]


def test_a_format_that_does_not_pay_is_passed_over_down_and_up():
    def gain(unit, format):
        return 0.5 if format is BF16 else 2.0

    policy = Adaptive()
    state = after(policy, [seen(gain=gain)] * 3)
    assert formats_of(state) == ["int8"] * 3
    assert state[UP].rejected == {"bf16": "0.50x of fp32's speed, casts included"}
    state = policy.decide(state, seen(BAD), 96)
    assert formats_of(state) == ["fp32"] * 3  # where it came from, not to what was slower


@pytest.mark.parametrize(("gap", "lowered"), [(0.0025, True), (0.0026, False), (math.nan, False), (-0.1, True)])
def test_the_probe_decides(gap, lowered):
    state = after(Adaptive(), [seen(gap=gap)] * 3)
    assert formats_of(state) == ["bf16" if lowered else "fp32"] * 3
    if gap == 0.0026:
        assert state[UP].rejected == {"bf16": "loss up to 0.26% higher, 0.25% allowed"}
        assert (state[UP].wait, state[UP].cool_down, state[UP].clean) == (64 + 256, 512, 0)


def test_innocents_go_down_and_culprits_do_not():
    units = tuple(f"{index}/forward" for index in range(16))
    trials = []

    def probe(trial):
        trials.append(set(trial))
        return 0.004 if "11/forward" in trial else 0.001

    policy = Adaptive()
    state = policy.start(units)
    for step in (0, 32, 64):
        state = policy.decide(state, replace(seen(units=units), probe=probe), step)
    assert [unit for unit, one in state.items() if one.format == "fp32"] == ["11/forward"]
    assert len(trials) <= policy.most_probes
    assert len(set(map(frozenset, trials))) == len(trials)  # no set is probed twice
    assert set(units) - {"11/forward"} in trials  # what was lowered passed together


def test_probes_are_bounded_and_what_was_left_open_comes_back_first():
    units = tuple(f"{index}/forward" for index in range(64))
    trials = []
    policy = Adaptive(most_probes=8)
    state = policy.start(units)
    evidence = replace(seen(units=units), probe=lambda trial: trials.append(set(trial)) or 1.0)
    for step in (0, 32, 64):
        state = policy.decide(state, evidence, step)
    assert len(trials) == 8
    waits = [one.wait for one in state.values()]
    assert waits == [64 + 256] * 2 + [64 + 128] * 62
    assert state["63/forward"].rejected == {"bf16": "left open after 8 probes"}


@given(bad=st.sets(st.integers(0, 30)), size=st.integers(0, 31), most=st.integers(1, 40))
def test_the_search_takes_only_what_passed(bad, size, most):
    units = {str(index): BF16 for index in range(size)}
    trials = {}

    def probe(trial):
        assert trial
        trials[frozenset(trial)] = len({int(unit) for unit in trial} & bad) * 0.002
        return trials[frozenset(trial)]

    taken, failed = _innocent(units, probe, 0.0025, most)
    assert len(trials) <= most
    assert not taken & set(failed)
    assert not taken or trials[frozenset(taken)] <= 0.0025
    if most >= 2 * size:  # room for every unit by itself: nothing stays open, and one guilty unit is let through
        assert taken | set(failed) == set(units)
        assert len(failed) == max(0, len(bad & set(range(size))) - 1)


CLEAN_TABLE = [  # (what is off, clean in a forward product, clean in a gradient's)
    ({}, True, True),
    ({"finite": False}, False, False),
    ({"underflow": 0.10}, True, True),
    ({"underflow": 0.11}, False, False),
    ({"saturation": 0.0005}, True, True),
    ({"saturation": 0.0006}, False, False),
    ({"median_error": 0.086}, True, True),  # four times what Gaussian data show in E4M3
    ({"median_error": 0.088}, False, True),  # and in E5M2
    ({"median_error": 0.174}, False, False),
    ({"cosine": 0.999}, True, True),
    ({"cosine": 0.998}, False, True),
    ({"cosine": 0.994}, False, False),
    ({"cosine": math.nan}, False, False),
    ({"median_error": math.nan}, False, False),
]


@pytest.mark.parametrize(("off", "forward", "gradient"), CLEAN_TABLE, ids=str)
def test_what_is_clean(off, forward, gradient):
    sample = replace(GOOD, **off)
    assert (unclean(sample, FP8, True) is None) == forward
    assert (unclean(sample, FP8, False) is None) == gradient


# raising

FAULTS = [
    ({}, 0, None),
    ({"underflow": 0.20}, 0, None),
    ({"underflow": 0.21}, 0, "21% of values become zero"),
    ({"saturation": 0.002}, 1, None),
    ({"saturation": 0.002}, 2, "0.20% of values cut"),
    ({"cosine": 0.99}, 0, None),
    ({"cosine": 0.98}, 0, "cosine 0.980 with the product in float32"),
    ({"cosine": math.nan}, 0, "cosine nan with the product in float32"),
    ({"median_error": 1.0}, 0, None),
]


@pytest.mark.parametrize(("off", "saturated", "why"), FAULTS, ids=str)
def test_what_is_a_fault(off, saturated, why):
    assert fault(replace(GOOD, **off), saturated) == why


@pytest.mark.parametrize("off", [{"underflow": 0.3}, {"cosine": 0.9}], ids=str)
def test_one_bad_sample_raises_at_once_and_only_its_unit(off):
    policy, state = Adaptive(), in_int8()
    evidence = seen()
    samples = {**evidence.samples, UP: {"int8": replace(GOOD, **off), "bf16": GOOD}}
    state = policy.decide(state, replace(evidence, samples=samples), 192)
    assert formats_of(state) == ["bf16", "int8", "int8"]
    one = state[UP]
    assert (one.wait, one.cool_down, one.backoffs, one.pinned, one.lowered_at) == (192 + 256, 512, 1, False, None)
    assert one.rejected["int8"].startswith("raised at step 192: ")


def test_values_cut_twice_in_a_row_raise():
    policy, cut = Adaptive(), seen(replace(GOOD, saturation=0.002))
    state = in_int8()
    assert formats_of(after(policy, [cut, seen(), cut], state, 192)) == ["int8"] * 3
    assert formats_of(after(policy, [cut, cut], state, 192)) == ["bf16"] * 3


def test_a_step_that_is_not_finite_raises_all_below_16_bits_and_no_others():
    policy, state = Adaptive(), in_int8()
    for step in (170, 171):  # between samples
        state = policy.decide(state, Evidence(finite=False), step)
        assert formats_of(state) == ["bf16"] * 3
        assert state[UP].backoffs == 1
    mixed = {**in_int8(), UP: UnitState("fp32")}
    assert formats_of(policy.decide(mixed, Evidence(finite=False), 170)) == ["fp32", "bf16", "bf16"]


def test_operands_that_are_not_finite_raise_below_16_bits():
    policy, state = Adaptive(), in_int8()
    state = after(policy, [seen(NOT_FINITE)] * 3, state, 192)
    assert formats_of(state) == ["bf16"] * 3
    assert state[UP].backoffs == 1


@pytest.mark.parametrize(
    ("step", "score", "format"), [(160 + 128, 6.1, "bf16"), (160 + 129, 6.1, "int8"), (170, 6.0, "int8")]
)
def test_a_leap_of_the_loss_raises_what_was_lowered_lately(step, score, format):
    policy = Adaptive()
    state = policy.decide(in_int8(), Evidence(loss_score=score), step)
    assert formats_of(state) == [format] * 3
    again = policy.decide(state, Evidence(loss_score=score), step)
    assert formats_of(again) == [format] * 3  # blamed once


def test_nothing_is_lowered_while_the_loss_leaps():
    policy = Adaptive()
    state = after(policy, [seen(), seen(), seen(loss_score=9.0), seen(finite=False)])
    assert formats_of(state) == ["fp32"] * 3


def test_waits_double_and_then_the_unit_is_pinned():
    policy = Adaptive()
    state, raised, lowered = in_int8(), [], []
    for step in range(192, 8192, 32):
        before = state[UP]
        state = policy.decide(state, seen({"int8": BAD if before.format == "int8" else GOOD, "bf16": GOOD}), step)
        if state[UP].backoffs > before.backoffs:
            raised.append(step)
        elif state[UP].format != before.format:
            lowered.append(step)
    assert len(raised) == policy.most_backoffs
    waits = [down - up for up, down in zip(raised, lowered, strict=False)]
    assert waits == [256 + 64, 512 + 64, 1024 + 64]  # and three samples
    assert state[UP].pinned
    assert formats_of(state) == ["bf16"] * 3
    assert formats_of(policy.decide(state, seen(BAD), 9000)) == ["fp32"] * 3  # a pin holds nobody down


def test_before_the_last_decay_the_forward_goes_back_to_16_bits():
    policy = Adaptive(cooldown_at=1000)
    state = in_int8(policy)
    assert formats_of(policy.decide(state, Evidence(), 999)) == ["int8"] * 3
    state = policy.decide(state, Evidence(), 1000)
    assert formats_of(state) == ["bf16", "int8", "int8"]
    assert state[UP].rejected == {"int8": "left at step 1000, before the last decay"}
    assert state[UP].backoffs == 0
    state = after(policy, [seen()] * 20, state, 1024)
    assert formats_of(state) == ["bf16", "int8", "int8"]  # nothing goes down
    assert formats_of(policy.decide(state, seen(BAD), 2000)) == ["fp32", "bf16", "bf16"]  # but up


# whatever the evidence


def evidence_at_thresholds(draw, state, policy, malicious):
    """Numbers a hair's breadth to either side of every threshold; a malicious one is good until a unit is low."""

    def near(*thresholds):
        return draw.choice(thresholds) * (1 + draw.choice((-1e-6, 0.0, 1e-6)))

    def sample(one):
        if malicious:
            return GOOD if draw.random() < (0.6 if one.format in ("int8", "fp8") else 0.97) else BAD
        saturation, underflow = near(0.001, 0.0005), near(0.2, 0.1)
        cosine = min(1.0, near(0.99, 0.995, 0.999, 1.0))
        error = near(0.0, 4 * 0.0092, 4 * 0.00135, 4 * 0.0216)
        return replace(GOOD, saturation=saturation, underflow=underflow, cosine=cosine, median_error=error)

    samples = {unit: {name: sample(one) for name in FORMATS} for unit, one in state.items() if draw.random() < 0.9}
    return Evidence(
        samples if draw.random() < 0.5 else {},
        finite=draw.random() < 0.99,
        loss_score=near(6.0) if draw.random() < 0.1 else 0.0,
        gain=lambda unit, format: 2.0 if malicious else near(1.05, 2.0),
        probe=(lambda trial: near(0.0025) if draw.random() < 0.3 else 0.0) if draw.random() < 0.95 else None,
    )


POLICIES = {
    "as it is": Adaptive(),
    "hasty": Adaptive(clean_samples=1, cool_down=1),
    "many formats": Adaptive(candidates=(TF32, FP16, BF16, FP8, INT8), clean_samples=1, cool_down=4),
    "from bf16": Adaptive(initial=BF16, candidates=(INT8, FP8), clean_samples=2, cool_down=16, cooldown_at=700),
    "cooled": Adaptive(clean_samples=1, cool_down=8, most_backoffs=2, cooldown_at=600),
}


@pytest.mark.parametrize("name", POLICIES)
@given(seed=st.integers(0, 2**32), malicious=st.booleans())
@example(seed=0, malicious=True)
def test_switches_are_bounded_and_the_worst_case_is_high(name, seed, malicious):
    policy, draw = POLICIES[name], random.Random(seed)
    bits = {one.name: one.bits for one in policy.lowest}
    state = policy.start(UNITS)
    switches = dict.fromkeys(UNITS, 0)

    def follow(evidence, step):
        nonlocal state
        new = policy.decide(state, evidence, step)
        for unit in UNITS:
            switches[unit] += new[unit].format != state[unit].format
            if state[unit].pinned:
                assert new[unit].pinned
                assert bits[new[unit].format] >= bits[state[unit].format]
            assert new[unit].format not in new[unit].rejected
        state = new

    for step in range(700):
        follow(evidence_at_thresholds(draw, state, policy, malicious), 2 * step)
    assert max(switches.values()) <= policy.most_switches

    for step in range(2000, 2000 + len(bits)):  # from now on all is bad
        follow(seen(BAD), step)
    for step in range(3000, 3200):
        assert all(bits[format] >= 16 for format in formats_of(state))
        follow(seen(BAD), step)
    assert max(switches.values()) <= policy.most_switches


def test_the_bound_is_reached_and_does_not_depend_on_the_length():
    policy = Adaptive()
    assert policy.most_switches == 10
    state, switches = policy.start(UNITS), 0
    for step in range(0, 30_000, 32):
        before = state[UP]
        # down to int8 as often as it goes, and up to fp32 once it is pinned
        state = policy.decide(state, seen(BAD if before.format == "int8" or before.pinned else GOOD), step)
        switches += state[UP].format != before.format
    assert switches == 10
    assert formats_of(state) == ["fp32"] * 3


def test_two_thousand_steps_at_a_threshold():
    policy = Adaptive(sample_every=1)
    state, switches = policy.start(UNITS), 0
    for step in range(2000):
        hair = 1e-9 if step % 2 else -1e-9
        before = state[UP].format
        state = policy.decide(state, seen(replace(GOOD, underflow=0.2 + hair, cosine=0.99 + hair)), step)
        switches += state[UP].format != before
    assert switches == 0  # not clean enough to go down
    state = in_int8(Adaptive(sample_every=32))
    for step in range(192, 2192):
        before = state[UP].format
        state = policy.decide(state, seen(replace(GOOD, underflow=0.2 + (1e-9 if step % 2 else -1e-9))), step)
        switches += state[UP].format != before
    assert switches == 2  # up to fp32, and not down again


def test_a_decision_changes_nothing_that_it_was_given():
    policy, state = Adaptive(), in_int8()
    for evidence in (seen(BAD), seen(), seen(gain=0.5), Evidence(finite=False)):
        before = copy.deepcopy(state)
        first, second = policy.decide(state, evidence, 2000), policy.decide(state, evidence, 2000)
        assert state == before
        assert first == second


# what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": INT8}, r"expected 16 bits or more and then lower candidates, got int8, bf16, int8"),
        ({"initial": BF16}, r"got bf16, bf16, int8"),
        ({"candidates": ()}, r"got fp32\."),
        ({"candidates": (INT8, BF16)}, r"got fp32, int8, bf16"),
        ({"sample_every": 0}, r"sample_every: expected at least 1, got 0"),
        ({"clean_samples": 0}, r"clean_samples: expected at least 1"),
        ({"most_probes": 0}, r"most_probes: expected at least 1"),
        ({"cool_down": 0}, r"cool_down: expected at least 1"),
        ({"most_backoffs": 0}, r"most_backoffs: expected at least 1"),
        ({"min_gain": 0.5}, r"expected min_gain >= 1, max_gap >= 0, spike > 0 and trial_steps >= 0, got 0\.5, 0\.0025"),
        ({"spike": math.nan}, r"got 1\.05, 0\.0025, nan and 128"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Adaptive(**options)


def test_a_state_of_other_formats():
    with pytest.raises(ValueError, match=r"expected units in fp32, bf16, int8, got fp8\. Resume with the policy"):
        Adaptive().decide({UP: UnitState("fp8")}, seen(), 0)


def test_what_it_asks_of_the_device():
    assert Adaptive().lowest == (INT8, BF16, FP32)
    assert Adaptive().sample_every == 32
