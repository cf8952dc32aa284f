"""The loss scaler: by hand, through a session, on two ranks; what it never does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import sparsam as sp
from ranks import on_two_ranks
from sparsam import Session
from sparsam.precision.scaler import LossScaler


def training(scaler, lr=0.1, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    return model, Session(model, torch.optim.SGD(model.parameters(), lr=lr), [scaler], **options)


def step(model, session, scale=1.0):
    with session.forward():
        loss = model(torch.ones(2, 4)).mean() * scale
    session.backward(loss)
    return session.step()


def test_gradients_are_scaled_in_the_backward_and_not_in_the_step():
    plain, scaled = training(LossScaler(initial=1.0)), training(LossScaler(initial=2.0**10))
    seen = []
    scaled[0][0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    for _ in range(3):
        step(*plain)
        step(*scaled)
    for a, b in zip(plain[0].parameters(), scaled[0].parameters(), strict=True):
        assert torch.equal(a, b)  # a power of two costs no bit
    assert seen[0].abs().max() > 10


@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_unscaling_for_a_window(accumulate):
    plain = training(LossScaler(initial=1.0), accumulate=accumulate, clip=0.5)
    scaled = training(LossScaler(initial=2.0**12), accumulate=accumulate, clip=0.5)
    for _ in range(2 * accumulate):
        step(*plain)
        step(*scaled)
    assert plain[1].applied_steps == scaled[1].applied_steps == 2
    for a, b in zip(plain[0].parameters(), scaled[0].parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_scale_by_hand():
    scaler = LossScaler(initial=8.0, interval=2, floor=1.0, stop_after=9)
    model, session = training(scaler)
    inf = float("inf")
    scales = []
    for scale in (1, 1, inf, 1, inf, inf, inf, inf, 1, 1, 1, 1):
        step(model, session, scale)
        scales.append(scaler.scale)
    assert scales == [8, 16, 8, 8, 4, 2, 1, 1, 1, 2, 2, 4]
    assert session.metrics() == {"loss_scale": 4.0, "skipped_steps": 5.0}
    assert session.applied_steps == 7


def test_a_step_that_is_not_finite_changes_nothing_but_the_scale():
    scaler = LossScaler()
    model, session = training(scaler)
    step(model, session)
    before = [parameter.clone() for parameter in model.parameters()]
    assert not step(model, session, float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert session.applied_steps == 1
    assert step(model, session)


def test_a_run_of_skipped_steps_ends_with_the_first_bad_tensor():
    scaler = LossScaler(initial=4.0, stop_after=3)
    model, session = training(scaler)
    model[0].bias.register_hook(lambda gradient: gradient * math.nan)
    assert not step(model, session)
    assert not step(model, session)
    with pytest.raises(
        RuntimeError, match=r"got some that are not in 0.bias in 3 steps in a row, down to a scale of 1"
    ):
        step(model, session)


def test_a_scale_that_grew_past_what_fits_finds_its_way_back():
    """A gradient of 1e30 stays finite up to a scale of about 1e8: the scale settles below it."""
    scaler = LossScaler(initial=2.0**20, interval=1, stop_after=99)
    model, session = training(scaler, lr=0.0)
    for _ in range(60):
        step(model, session, 1e33)
    assert 1 <= scaler.scale <= 2.0**24
    assert session.applied_steps > 10


@pytest.mark.parametrize(("growth", "accumulate"), [("auto", 1), ("auto", 2), ("dense", 1), ("sum_of_norms", 2)])
@pytest.mark.parametrize("storage", ["compact", "masked"])
def test_growth_gradients_are_unscaled_too(growth, accumulate, storage):
    """What sparse training gathers for units that do not exist never passes through the optimiser's gradients."""

    def grown(initial):
        def score(view):
            seen.append(view.growth)
            return view.growth

        seen: list[torch.Tensor] = []
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        sp.sparsify(model, sp.Block(2, 2), 0.5, storage=storage)
        method = sp.DropGrow(sp.magnitude, sp.needs_gradient(score), 1, sp.constant(0.5))
        parts = [sp.SparseTraining(method, growth), LossScaler(initial=initial)]
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), parts, accumulate=accumulate)
        for _ in range(2 * accumulate):
            step(model, session)
        return seen

    plain, scaled = grown(1.0), grown(2.0**10)
    assert len(plain) == len(scaled) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))


def test_state_goes_round():
    first = LossScaler(initial=8.0, interval=3)
    model, session = training(first)
    for scale in (1, float("inf"), 1, 1):
        step(model, session, scale)
    second = LossScaler(initial=2.0, interval=3)
    other, resumed = training(second)
    resumed.load_state_dict(session.state_dict())
    for one in ((model, session), (other, resumed)):
        step(*one)
    assert first.state_dict() == second.state_dict()
    assert second.scale == 8.0
    assert second.skipped == 1


def test_two_scalers_are_one_too_many():
    model, _ = training(LossScaler())
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), [LossScaler(), LossScaler()])
    with pytest.raises(ValueError, match=r"loss scale: expected at most one part .*, got 2. Keep one"):
        step(model, session)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial": 0.0}, "expected 0 < floor <= initial <= 2\\^24, got floor 1 and initial 0"),
        ({"floor": 0.0}, "expected 0 < floor <= initial"),
        ({"initial": 2.0**30}, "expected 0 < floor <= initial <= 2\\^24"),
        ({"growth": 1.0}, "growth: expected a factor > 1, got 1.0"),
        ({"backoff": 1.0}, r"backoff: expected a factor in \(0, 1\), got 1.0"),
        ({"interval": 0}, "interval: expected at least 1 step, got 0"),
        ({"stop_after": 0}, "stop_after: expected at least 1 step, got 0"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LossScaler(**arguments)


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_both(tmp_path):
    """Without DDP around it: nothing but the scaler tells the ranks of each other."""
    on_two_ranks(
        """
from sparsam.precision.scaler import LossScaler
torch.manual_seed(0)
model = mlp()
scaler = LossScaler(initial=16.0, stop_after=3)
session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), [scaler])
for bad in (False, True, False, True, True):
    loss = model(torch.ones(2, 13)).square().mean()
    session.backward(loss * float("inf") if bad and rank == 1 else loss)
    assert session.step() != bad
    a, b = gathered((scaler.scale, session.applied_steps, weights(model)))
    assert a == b
try:
    session.backward(model(torch.ones(2, 13)).mean() * (float("inf") if rank else 1.0))
    session.step()
    raise AssertionError("went on")
except RuntimeError as error:
    where = "another rank" if rank == 0 else "in 0.weight"
    assert where in str(error), error
""",
        tmp_path,
    )
