"""The moving average follows topologies: what a plain average of tensors gets wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsam as sp


def trained(pattern: sp.Pattern, steps: int = 12) -> tuple[sp.Session, sp.MovingAverage]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    sp.sparsify(model, pattern, 0.25)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = sp.MovingAverage(0.9)
    session = sp.Session(model, optimizer, [sp.SparseTraining(sp.rigl(every=3, fraction=0.5)), average])
    for _ in range(steps):
        x = torch.randn(16, 32)
        with session.forward():
            loss = (model(x) - x).square().mean()
        session.backward(loss)
        session.step()
    return session, average


def dense(model: nn.Module) -> list[torch.Tensor]:
    return [module.weight.detach() for module in model.modules() if hasattr(module, "in_features")]


@pytest.mark.parametrize("pattern", [sp.Block(8, 8), sp.Unstructured()])
def test_average_is_zero_wherever_the_model_is_dropped(pattern: sp.Pattern) -> None:
    session, average = trained(pattern)
    for ours, theirs in zip(dense(average.model), dense(session.model), strict=True):
        assert (ours[theirs == 0] == 0).all()
        assert (ours != 0).sum() > 0


@pytest.mark.parametrize("pattern", [sp.Block(8, 8), sp.Unstructured()])
def test_average_of_a_unit_that_stayed_is_the_plain_average(pattern: sp.Pattern) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64))
    sp.sparsify(model, pattern, 0.25)
    average = sp.MovingAverage(0.5)
    session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), [sp.SparseTraining(sp.static()), average])
    expected = dense(model)[0].clone()
    for _ in range(4):
        session.backward(model(torch.randn(8, 32)).square().mean())
        session.step()
        expected = 0.5 * expected + 0.5 * dense(model)[0]
    torch.testing.assert_close(dense(average.model)[0], expected)


def test_state_goes_round() -> None:
    session, average = trained(sp.Block(8, 8))
    other = sp.MovingAverage(0.1)
    sp.Session(session.model, session.optimizer, [other])
    other.load_state_dict(average.state_dict())
    assert other.decay == 0.9
    for ours, theirs in zip(dense(other.model), dense(average.model), strict=True):
        assert torch.equal(ours, theirs)


def test_a_decay_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"MovingAverage: expected a decay in \[0, 1\), got 1.0\."):
        sp.MovingAverage(1.0)
