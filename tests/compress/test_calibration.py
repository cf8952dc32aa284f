"""Scales of inputs from data: what was seen, a percentile of it, and nothing once frozen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsam as sp
from ranks import on_two_ranks
from sparsam.compress.calibration import Observer, calibrate
from sparsam.compress.quantise import quantise


def test_the_largest_magnitude_by_hand():
    observer = Observer()
    assert observer.scale.item() == 1.0  # nothing was seen
    observer.observe(torch.tensor([[1.0, -12.7], [float("inf"), float("nan")]]))
    observer.observe(torch.zeros(0, 3))
    observer.observe(torch.tensor([3.0]).bfloat16())
    assert observer.scale.item() == pytest.approx(0.1)
    observer.freeze()
    observer.observe(torch.tensor([1e6]))
    assert observer.scale.item() == pytest.approx(0.1)


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_percentile_covers_that_share(pieces):
    x = torch.randn(20_000).abs()
    observer = Observer(99.0)
    for piece in x.split(len(x) // pieces):
        observer.observe(piece)
    limit = float(observer.scale) * 127
    exact = x.kthvalue(round(0.99 * len(x))).values.item()
    assert exact <= limit <= exact * 2 ** (1 / 64)
    assert Observer(100.0).counts.any() == torch.tensor(False)


@pytest.mark.parametrize("seen", [0.0, 1e-30, 1e-12, 3e38])
def test_scales_are_finite_and_never_zero(seen):
    for percentile in (50.0, 100.0):
        observer = Observer(percentile)
        observer.observe(torch.full((4,), seen))
        assert 0 < float(observer.scale) < float("inf")


@pytest.mark.parametrize("percentile", [0.0, 101.0])
def test_a_wrong_percentile_is_refused(percentile):
    with pytest.raises(ValueError, match=r"percentile: expected a number in \(0, 100\]"):
        Observer(percentile)


def model_of():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4))


def test_calibration_leaves_the_model_as_it_was():
    model = model_of()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batches = [torch.randn(6, 8) for _ in range(3)]
    scales = calibrate(model, batches)
    assert scales["0"] == pytest.approx(float(torch.cat(batches).abs().max()) / 127)
    assert model.training
    assert model[2].training
    assert not any(one._forward_pre_hooks for one in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    model.eval()
    expected = model(batches[0]).detach()
    quantise(model, input_scales=scales)
    torch.testing.assert_close(model(batches[0]), expected, rtol=0.05, atol=0.05)
    frozen = float(model[0].input_scale)
    model(100 * batches[0])
    assert float(model[0].input_scale) == frozen


def test_batches_of_any_kind():
    batches = [{"x": torch.ones(2, 8), "label": 0}]
    model = model_of()
    scales = calibrate(model, batches, forward=lambda batch: model(batch["x"]), exclude=["4"])
    assert scales.keys() == {"0"}


def test_no_batch_is_refused():
    with pytest.raises(ValueError, match="calibrate: expected batches that go through linear layers, got 0"):
        calibrate(model_of(), [])


RANKS = """
from sparsam.compress.aware import QuantisationAware
from sparsam.compress.calibration import calibrate
torch.manual_seed(0)
model = mlp()
draw = torch.Generator().manual_seed(rank)
data = [torch.randn(5, 13, generator=draw) * (1 + rank) for _ in range(3)]
for percentile in (100.0, 99.0):
    a, b = gathered(calibrate(model, data, percentile=percentile))
    assert a == b and a.keys() == {"0", "2"}, (a, b)
largest = max(gathered(float(torch.cat(data).abs().max())))
assert abs(calibrate(model, data)["0"] - largest / 127) < 1e-6
aware = QuantisationAware(static_inputs=True, percentile=99.9, freeze_after=3)
session = sp.Session(DDP(model), torch.optim.SGD(model.parameters(), lr=0.01), [aware])
for x in data:
    step(session, x)
a, b = gathered(aware.input_scales())
assert a == b, (a, b)
step(session, 100 * data[0])
assert aware.input_scales() == a
a, b = gathered(weights(model))
assert a == b
"""


def test_ranks_have_equal_scales(tmp_path):
    on_two_ranks(RANKS, tmp_path)


def test_the_public_names():
    assert sp.calibrate is calibrate
    assert sp.quantise is quantise
