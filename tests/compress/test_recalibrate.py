"""Batch-norm statistics against an average taken by hand, and everything that stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsam as sp


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 3, 3))


def batches_of():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 2, 7, 7, generator=generator) for _ in range(3)]


def test_statistics_are_the_mean_over_batches():
    model, batches = model_of(), batches_of()
    assert sp.recalibrate_norms(model, batches) == 1
    outputs = [model[0](batch).detach() for batch in batches]
    means = torch.stack([one.mean((0, 2, 3)) for one in outputs])
    variances = torch.stack([one.transpose(0, 1).flatten(1).var(1) for one in outputs])
    assert torch.allclose(model[1].running_mean, means.mean(0), atol=1e-6)
    assert torch.allclose(model[1].running_var, variances.mean(0), atol=1e-6)


def test_a_second_norm_sees_what_the_first_one_normalised_by_its_batch():
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3))
    sp.recalibrate_norms(model, [5 + 2 * torch.randn(64, 3, generator=torch.Generator().manual_seed(0))])
    assert torch.allclose(model[1].running_mean, torch.zeros(3), atol=1e-5)
    assert torch.allclose(model[1].running_var, torch.ones(3), atol=0.05)


def test_nothing_else_changes():
    model = model_of()
    model[0].eval()
    model[1].momentum = 0.3
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    sp.recalibrate_norms(model, [(one,) for one in batches_of()], lambda model, batch: model(*batch))
    assert all(torch.equal(weights[name], one) for name, one in model.named_parameters())
    assert all(one.grad is None for one in model.parameters())
    assert [module.training for module in model.modules()] == modes
    assert model[1].momentum == 0.3
    assert torch.equal(torch.get_rng_state(), state)


def test_it_repairs_what_pruning_did_to_a_model():
    model, batches = model_of().eval(), batches_of()
    sp.recalibrate_norms(model, batches)
    sp.prune(model, sp.Unstructured(), 0.3, include=["0"])

    @torch.no_grad()
    def error():
        normal = model[1](model[0](torch.cat(batches)))
        return float(normal.mean((0, 2, 3)).abs().max() + (normal.var((0, 2, 3)) - 1).abs().max())

    before = error()
    sp.recalibrate_norms(model, batches)
    assert error() < 0.1 < before


@pytest.mark.parametrize(
    ("data", "forward", "message"),
    [
        ([], None, "at least one calibration batch"),
        ([torch.full((8, 2, 7, 7), torch.nan)], None, "1: expected finite statistics"),
        ([torch.ones(8, 2, 7, 7)], lambda model, batch: None, "1: expected every batch norm to be called"),
    ],
    ids=["none", "nan", "unreached"],
)
def test_what_cannot_be_is_refused_and_leaves_the_statistics(data, forward, message):
    model = model_of()
    model[1].running_mean.fill_(7.0)
    with pytest.raises(ValueError, match=message):
        sp.recalibrate_norms(model, data, forward)
    assert model[1].running_mean.eq(7).all()
    assert model[1].momentum == 0.1


def test_a_model_without_batch_norms_is_refused():
    with pytest.raises(ValueError, match="expected a model with batch norms"):
        sp.recalibrate_norms(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)), [1])
