"""The learning rate as a part: base * factor * schedule of the applied steps, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsam import LearningRate, Session, constant, linear, warm_up


def training(part, clip=None):
    model = nn.Linear(2, 1)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 1.0}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    return model, optimizer, Session(model, optimizer, [part], clip=clip)


def step(model, session, scale=1.0):
    session.backward((model(torch.ones(1, 2)) * scale).sum())
    return session.step()


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def test_every_group_keeps_its_own_base():
    model, optimizer, session = training(LearningRate(linear(1.0, 0.0, steps=4), factor=0.5))
    seen = []
    for _ in range(3):
        step(model, session)
        seen.append(rates(optimizer))
    assert [rate for both in seen for rate in both] == pytest.approx([0.05, 0.5, 0.0375, 0.375, 0.025, 0.25])
    assert session.metrics() == {"learning_rate": 0.025}


def test_only_applied_steps_move_it():
    """A step that was skipped for a gradient that is not finite must not advance the schedule."""
    model, optimizer, session = training(LearningRate(linear(1.0, 0.0, steps=4)), clip=1.0)
    assert step(model, session)
    assert not step(model, session, scale=float("nan"))
    assert step(model, session)
    assert rates(optimizer) == pytest.approx([0.075, 0.75])


def test_linear_warm_up_begins_above_zero():
    model, optimizer, session = training(LearningRate(warm_up(constant(1.0), 4)))
    step(model, session)
    assert rates(optimizer) == [0.025, 0.25]


def test_resume_does_not_take_the_scaled_rate_for_the_base():
    """The optimiser's state holds the scaled rate; a resume that multiplied it again would decay twice."""
    model, optimizer, session = training(LearningRate(linear(1.0, 0.0, steps=10)))
    for _ in range(5):
        step(model, session)
    optimizer_state, session_state = optimizer.state_dict(), session.state_dict()
    for first in (True, False):
        model, optimizer, _ = training(LearningRate())
        if first:
            optimizer.load_state_dict(optimizer_state)
        resumed = Session(model, optimizer, [LearningRate(linear(1.0, 0.0, steps=10))])
        if not first:
            optimizer.load_state_dict(optimizer_state)
        resumed.load_state_dict(session_state)
        step(model, resumed)
        assert rates(optimizer) == pytest.approx([0.05, 0.5])


def test_detach_gives_the_optimiser_its_own_rates_back():
    model, optimizer, session = training(LearningRate(factor=0.5))
    step(model, session)
    session.detach()
    assert rates(optimizer) == [0.1, 1.0]


def test_a_factor_must_be_positive():
    with pytest.raises(ValueError, match="factor: expected a factor of the learning rate > 0, got 0"):
        LearningRate(factor=0)


def test_a_schedule_must_be_one():
    with pytest.raises(ValueError, match=r"schedule: expected a function of the step, got 0.7. Write .*factor=0.7"):
        LearningRate(0.7)
