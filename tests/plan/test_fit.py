"""A fit finds again what made the steps it is given, and predicts others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plan.small import COMPUTE, WORKLOAD, setting
from sparsam.comm.codecs import BF16, Identity, Int8Rows
from sparsam.plan.fit import Fit, Observation, fitted
from sparsam.plan.network import Link, Network
from sparsam.plan.predict import predict

INT8 = Int8Rows()
TRUTH = Fit(2e-3, 0.9, 2e-9, {("dense", 4): 1.7}, {(INT8, 4): 0.5})
# a step of 4 ms, and one layer of 40 kB whose dense gradient has 4 MB
SPARSE = replace(WORKLOAD, gradients=(replace(WORKLOAD.gradients[0], values=10**4, compact=True),))
SHORT = replace(COMPUTE, forward=1e-3, backward=2e-3, optimizer=1e-3, ready=(1.0,), rewire=1e-3)


def observed(one, bits: float, truth: Fit = TRUTH) -> Observation:
    return Observation(one, "dense", 4, bits, truth.predict(one, "dense", 4, bits).step)


def sparse(codec, rewire_every=None):
    return setting(workload=SPARSE, compute=SHORT, codec=codec, rewire_every=rewire_every)


def test_a_prediction_by_hand():
    """Two buckets of 1 MB a rank and int8: factors are of computing alone, each bucket waits once."""
    fit = Fit(0.0, 1.0, 0.0, {("dense", 4): 2.0}, {(INT8, 4): 0.5})
    plain, coded = (fit.predict(setting(codec=codec), "dense", 4, 1e15) for codec in (Identity(), INT8))
    assert plain.step == pytest.approx(2 * 3.5)
    # the first bucket's wait hides behind the second half of the backward pass
    assert coded.exposed == pytest.approx(0.5)
    assert coded.computing == pytest.approx(2 * 3.5)
    link = Link(0.0, 1e-15)
    assert predict(setting(codec=INT8), Network(4, 1, link, link)).exposed == pytest.approx(0.0, abs=1e-6)


def test_steps_on_other_links_are_predicted():
    codecs = (Identity(), BF16(), INT8)
    fit = fitted([observed(setting(codec=codec), bits) for codec in codecs for bits in (1e7, 1e8, 1e9)])
    assert fit.factors["dense", 4] == pytest.approx(1.7, rel=0.05)
    assert fit.waits[INT8, 4] == pytest.approx(0.5, rel=0.1)
    assert fit.share == pytest.approx(0.9, rel=0.05)
    assert set(fit.waits) == {(INT8, 4)}
    for codec in codecs:
        step = fit.predict(setting(codec=codec), "dense", 4, 3e7).step
        assert step == pytest.approx(observed(setting(codec=codec), 3e7).seconds, rel=0.03)


def test_a_wait_is_not_taken_for_slow_ranks():
    """50 ms a bucket where a step computes for 4: taken for computing, it would make rewires ten times as long.

    Steps of one sparse setting do not tell them apart, but dense ones tell what a message costs.
    """
    groups = {("dense", 4): 1.0, ("sparse", 4): 1.0}
    truth = Fit(1e-4, 0.95, 1e-10, groups, {(INT8, 4): 0.05})
    one, dense = sparse(INT8, rewire_every=5), setting(compute=replace(SHORT, ready=(0.5, 1.0)), codec=BF16())
    rows = [
        replace(observed(what, bits, truth), group=group)
        for bits in (2e7, 2e8)
        for group, what in (("sparse", one), ("dense", dense))
    ]
    fit = fitted(rows)
    assert fit.factors["sparse", 4] == pytest.approx(1.0, rel=0.1)
    assert fit.waits[INT8, 4] == pytest.approx(0.05, rel=0.05)
    for other in (one, sparse(INT8), sparse(Identity(), rewire_every=2)):
        step = fit.predict(other, "sparse", 4, 6e7).step
        assert step == pytest.approx(observed(other, 6e7, truth).seconds, rel=0.03)


def test_one_link_does_not_tell_a_rate():
    with pytest.raises(ValueError, match="fit: expected steps on at least 2 links, got fewer"):
        fitted([observed(setting(), 1e8)])


def test_what_was_not_measured_is_not_predicted():
    fit = replace(TRUTH, factors={("dense", 2): 1.0})
    with pytest.raises(ValueError, match="s: expected a fit of dense on 4 ranks, got those of dense on 2"):
        fit.predict(setting(), "dense", 4, 1e8)
