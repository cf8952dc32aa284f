"""Faults put into a training whose formats a policy decides: what is promised holds, and the loss comes back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import sparsam as sp
from sparsam.kernels.formats import FP8
from sparsam.session import Part

STEPS = 480
FAULT = 160  # step of the first bad batch; units are in eight bits by then
WIDTH = 16

SEED = torch.Generator().manual_seed(7)
INPUTS = torch.randn(512, WIDTH, generator=SEED)
TARGETS = INPUTS @ torch.randn(WIDTH, WIDTH, generator=SEED) / 4
TARGETS = TARGETS + 0.3 * torch.randn(512, WIDTH, generator=SEED)  # a floor that no training gets below


class Faster:
    """A profile in which lower is always faster."""

    def __init__(self) -> None:
        self.products = self

    def gain(self, *shape):
        return 2.0


def untouched(step, x):
    return x


def burst(step, x):
    return x * 1e4 if FAULT <= step < FAULT + 4 else x


def zeros(step, x):
    return torch.zeros_like(x) if FAULT <= step < FAULT + 4 else x


def nan_batch(step, x):
    return torch.full_like(x, math.nan) if step in (FAULT, FAULT + 1, FAULT + 60) else x


def infinite_value(step, x):
    return torch.where(torch.arange(len(x))[:, None] == 3, math.inf, x) if step == FAULT else x


def small_gradients(step):
    return 1e-6 if FAULT <= step < FAULT + 40 else 1.0


class Watched(Part):
    """Checks what is promised of every step, from within."""

    def attach(self, session):
        self.session = session

    def after_step(self, applied):
        gradients = [parameter.grad for parameter in self.session.model.parameters() if parameter.grad is not None]
        assert not applied or all(bool(gradient.isfinite().all()) for gradient in gradients)


def not_finite(state, path=""):
    """Names of the entries of nested state that are not finite."""
    if isinstance(state, torch.Tensor):
        return [path] if state.is_floating_point() and not bool(state.isfinite().all()) else []
    if isinstance(state, float):
        return [] if math.isfinite(state) else [path]
    if isinstance(state, dict):
        return [bad for key, value in state.items() for bad in not_finite(value, f"{path}/{key}")]
    if isinstance(state, list | tuple):
        return [bad for index, value in enumerate(state) for bad in not_finite(value, f"{path}/{index}")]
    return []


def model_of(seed=0):
    """Two layers and one optimum, so that the loss at the end does not hang on the way there."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH))


def policy_of(clean_samples=2):
    return sp.Adaptive(sample_every=4, clean_samples=clean_samples, cool_down=16, trial_steps=16, max_gap=0.02)


def run(fault=untouched, factor=lambda step: 1.0, policy=None, clip=1.0, steps=STEPS, model=None):
    """Trains, checks at every step, and gives the loss at the end, the part and the session."""
    model = model_of() if model is None else model

    def probe():
        return (model(INPUTS[:128]) - TARGETS[:128]).square().mean(1)

    policy = policy_of() if policy is None else policy
    precision = sp.Precision(policy, simulate=True, probe=probe, profile=Faster())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.9, 0.98))
    session = sp.Session(model, optimizer, [precision, Watched()], clip=clip)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        batch = slice(step % 4 * 128, step % 4 * 128 + 128)
        with session.forward():
            loss = (model(fault(step, INPUTS[batch])).float() - TARGETS[batch]).square().mean()
        session.backward(loss * factor(step))
        session.step()
        assert not not_finite(model.state_dict())
        if step % 8 == 0 or FAULT <= step < FAULT + 8:
            states = {"optimizer": optimizer.state_dict(), "session": session.state_dict()}
            assert not not_finite(states)
    counts = {}
    for switch in precision.take():
        unit = f"{switch.layer}/{switch.product}"
        counts[unit] = counts.get(unit, 0) + 1
    if isinstance(policy, sp.Adaptive):
        assert 2 <= max(counts.values()) <= policy.most_switches
    model.eval()
    with torch.no_grad():
        return (model(INPUTS) - TARGETS).square().mean().item(), precision, session


@pytest.fixture(scope="module")
def undisturbed():
    loss, precision, session = run()
    assert session.applied_steps == STEPS
    assert precision.switches == 12  # six units, twice down, never up
    return loss


@pytest.mark.parametrize(
    ("fault", "applied"),
    [(burst, STEPS), (zeros, STEPS), (nan_batch, STEPS - 3), (infinite_value, STEPS - 1)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bad_batches_are_survived(undisturbed, fault, applied):
    loss, _, session = run(fault)
    assert session.applied_steps == applied
    assert loss == pytest.approx(undisturbed, rel=0.01)


def test_bad_batches_are_survived_in_eight_bits_that_nothing_raises():
    expected, burst_loss, nan_loss = (
        run(fault, policy=sp.Rules(low=FP8, head=FP8))[0] for fault in (untouched, burst, nan_batch)
    )
    assert burst_loss == pytest.approx(expected, rel=0.01)
    assert nan_loss == pytest.approx(expected, rel=0.01)


def test_small_gradients_are_survived(undisturbed):
    loss, precision, _ = run(factor=small_gradients)
    assert loss == pytest.approx(undisturbed, rel=0.01)
    assert precision.switches == 12  # scales follow the values


def test_statistics_at_a_threshold_switch_a_bounded_number_of_times():
    def hugging(step, x):
        """A value so large that what int8 sends to zero lies on either side of what is allowed, sample by sample."""
        out = x.clone()
        out[:, 0] = 80.0 if step // 4 % 2 else 10.0
        return out

    loss, precision, _ = run(hugging, policy=policy_of(clean_samples=1))
    assert math.isfinite(loss)
    assert precision.state["0/forward"].pinned  # four times down and up


def test_a_burst_while_a_format_is_on_trial_is_undone(undisturbed):
    """Nothing is clipped: what the step did to weights and moments would stay for thousands of steps."""
    loss, precision, _ = run(lambda step, x: x * 1e4 if step == 26 else x, clip=None)
    assert precision.switches > 12  # lowered, blamed, lowered again
    assert loss == pytest.approx(undisturbed, rel=0.01)


@pytest.mark.parametrize("first", ["scaler", "precision"])
def test_an_overflow_of_the_scaled_loss_is_not_put_down_to_formats(first):
    """What half precision on other devices does: gradients past 65504 overflow, and the scale is halved for them."""
    model = model_of()

    def overflow(gradient):
        return torch.where(gradient.abs() > 1e3, math.inf, gradient)

    for parameter in model.parameters():
        parameter.register_hook(overflow)
    scaler = sp.LossScaler(initial=2.0**8, growth=16.0, interval=40)
    precision = sp.Precision(policy_of(), probe=lambda: torch.ones(2), profile=Faster())
    parts = [scaler, precision] if first == "scaler" else [precision, scaler]
    session = sp.Session(model, torch.optim.SGD(model.parameters(), 0.01), parts)
    for _ in range(200):
        with session.forward():
            loss = (model(INPUTS[:64]).float() - TARGETS[:64]).square().mean()
        session.backward(loss)
        session.step()
    assert scaler.skipped > 4
    assert session.applied_steps == 200 - scaler.skipped
    assert precision.switches == 12
    assert {one.format for one in precision.state.values()} == {"int8"}
    assert all(one.backoffs == 0 for one in precision.state.values())
    with session.forward():
        loss = model(INPUTS[:64] * math.nan).square().mean()
    session.backward(loss)
    assert not session.step()  # and a loss that is not finite is nobody's scale
    assert {one.format for one in precision.state.values()} == {"bf16"}


def test_batch_norms_forget_a_batch_whose_step_is_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 24), nn.BatchNorm1d(24), nn.Linear(24, WIDTH))
    loss, *_ = run(nan_batch, model=model, steps=240)
    assert math.isfinite(loss)
    assert int(model[1].num_batches_tracked) == 237


def test_gradients_whose_squares_overflow_are_not_applied():
    """They are finite, but second moments would be infinite, and their weights would never move again."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    session = sp.Session(model, optimizer, [sp.Precision(policy_of(), profile=Faster())])
    session.backward(model(INPUTS[:8]).mean() * 1e25)
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    assert not session.step()
    assert not not_finite(optimizer.state_dict())


def test_sparse_gradients_are_looked_at_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, WIDTH, sparse=True), nn.Linear(WIDTH, 4))
    session = sp.Session(model, torch.optim.SGD(model.parameters(), 0.1), [sp.Precision(policy_of(), profile=Faster())])
    for factor, applied in ((1.0, True), (math.inf, False)):
        session.backward(model(torch.tensor([1, 1, 3])).mean() * factor)
        assert session.step() is applied


FAULTS = {"burst": (burst, lambda step: 1.0), "small gradients": (untouched, small_gradients)}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "factor"), FAULTS.values(), ids=FAULTS.keys())
def test_what_a_fault_costs_a_model_with_many_optima_is_what_it_costs_in_float32(fault, factor):
    """Forty steps with next to no gradient cost such a model 2 % of its loss in any format: it has trained for less."""

    def at_the_end(fault, factor, policy):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, WIDTH)]
        return run(fault, factor, policy, model=nn.Sequential(*layers))[0]

    costs = []
    for policy in (policy_of(), sp.Rules(low="fp32")):
        costs.append(at_the_end(fault, factor, policy) / at_the_end(untouched, lambda step: 1.0, policy))
    assert costs[0] == pytest.approx(costs[1], abs=0.01)
