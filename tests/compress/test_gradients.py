"""Gradients of calibration batches, and what they must not change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsam.compress.gradients import batch_gradients, checked_batches


def loss(model, batch):
    return model(batch).square().mean()


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))


def test_one_gradient_a_batch_and_nothing_else_changes():
    model = model_of()
    model[3].eval()
    model[0].weight.requires_grad_(False)
    model[3].weight.grad = torch.ones(2, 6)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    batches = [torch.randn(5, 4) for _ in range(3)]
    found = list(batch_gradients(model, [model[0].weight, model[3].weight], batches, loss))
    assert [len(one) for one in found] == [2, 2, 2]
    assert all(bool(one[0].any()) for one in found)
    assert not torch.equal(found[0][1], found[1][1])
    again = list(batch_gradients(model, [model[0].weight, model[3].weight], batches, loss))
    assert torch.equal(found[2][0], again[2][0])  # no dropout
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert [module.training for module in model] == [True, True, True, False]
    assert not model[0].weight.requires_grad
    assert torch.equal(model[3].weight.grad, torch.ones(2, 6))


def test_a_weight_that_a_batch_does_not_reach_has_a_gradient_of_zero():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    gradients = batch_gradients(model, [model[1].weight], [torch.ones(1, 2)], lambda m, x: m[0](x).sum())
    assert not next(gradients)[0].any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda model, batch: model(batch), "batch 0, got (5, 2)"),
        (lambda model, batch: 1.0, "batch 0, got float"),
        (lambda model, batch: model(batch).sum() * torch.inf, "batch 0, got "),
        (lambda model, batch: (model(batch) * 0).abs().sum().sqrt(), "got inf or NaN in batch 0"),
    ],
    ids=["matrix", "number", "infinite", "gradient"],
)
def test_a_loss_that_is_none_is_refused(wrong, message):
    model = model_of()
    with pytest.raises(ValueError) as error:
        list(batch_gradients(model, [model[3].weight], [torch.ones(5, 4)], wrong))
    assert message in str(error.value)
    assert model[2].training


def test_batches_are_a_list_of_at_least_one():
    assert checked_batches(iter([1, 2])) == [1, 2]
    with pytest.raises(ValueError, match=r"got one tensor of \(2, 3\)"):
        checked_batches(torch.ones(2, 3))
    with pytest.raises(ValueError, match="at least one calibration batch"):
        checked_batches([])
