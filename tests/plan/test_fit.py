"""A fit finds again what made the steps it is given, and predicts others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plan.small import setting
from sparsam.comm.codecs import BF16, Identity
from sparsam.plan.fit import Fit, Observation, fitted

TRUTH = Fit(2e-3, 0.9, 2e-9, {("dense", 4): 1.7})


def observed(codec, bits: float) -> Observation:
    one = setting(codec=codec)
    return Observation(one, "dense", 4, bits, TRUTH.predict(one, "dense", 4, bits).step)


def test_steps_on_other_links_are_predicted():
    fit = fitted([observed(codec, bits) for codec in (Identity(), BF16()) for bits in (1e7, 1e8, 1e9)], rounds=2)
    assert fit.factors["dense", 4] == pytest.approx(1.7, rel=0.05)
    assert fit.share == pytest.approx(0.9, rel=0.05)
    for codec in (Identity(), BF16()):
        step = fit.predict(setting(codec=codec), "dense", 4, 3e7).step
        assert step == pytest.approx(observed(codec, 3e7).seconds, rel=0.03)


def test_one_link_does_not_tell_a_rate():
    with pytest.raises(ValueError, match="fit: expected steps on at least 2 links, got fewer"):
        fitted([observed(Identity(), 1e8)])


def test_what_was_not_measured_is_not_predicted():
    fit = replace(TRUTH, factors={("dense", 2): 1.0})
    with pytest.raises(ValueError, match="s: expected a fit of dense on 4 ranks, got those of dense on 2"):
        fit.predict(setting(), "dense", 4, 1e8)
