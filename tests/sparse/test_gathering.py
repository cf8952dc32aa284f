"""What SparseTraining keeps beside the model: accumulators, weights behind zeros, moments of absent units."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsam as sp

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


def training(method, *, pattern=None, storage="masked", density=0.5, optimizer=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    sp.sparsify(model, pattern or sp.Unstructured(), density, storage=storage)
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    keep = {"keep_moments": options.pop("keep_moments", False)}
    session = sp.Session(model, make(model.parameters()), [sp.SparseTraining(method, **keep)], **options)
    return model, session


def step(model, session, scale=1.0):
    with session.forward():
        loss = (model(X) * scale).square().mean()
    session.backward(loss)
    return session.step()


def seen_by(*accumulators):
    """A method that changes nothing and keeps its views."""

    class Watches(sp.Method):
        def __init__(self):
            self.accumulators, self.views = accumulators, []

        def due(self, step):
            return True

        def update(self, views, step):
            self.views.append(views)
            return {}

    return Watches()


def test_gradients_are_gathered_before_clipping_and_of_inactive_weights_too():
    gathered = sp.Accumulator("sum", lambda total, weight, gradient: total.add_(gradient), all_weights=True)
    method = seen_by(gathered)
    model, session = training(method, clip=1e-6, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    expected = torch.autograd.grad(model(X).square().mean(), model[0].weight)[0]
    for _ in range(3):
        step(model, session)
    total = method.views[-1]["0"].accumulators["sum"]
    torch.testing.assert_close(total, 3 * expected)
    assert (total[~model[0].weight_topology] != 0).any()


def test_what_two_scores_share_is_gathered_once():
    gathered = sp.Accumulator("sum", lambda total, weight, gradient: total.add_(gradient))
    method = seen_by(gathered, gathered)
    model, session = training(method, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    expected = torch.autograd.grad(model(X).square().mean(), model[0].weight)[0]
    step(model, session)
    torch.testing.assert_close(method.views[-1]["0"].accumulators["sum"], expected)


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_grown_unit_has_gathered_nothing(storage):
    method = sp.Then(sp.DropGrow(sp.movement, sp.random, 3, sp.constant(0.5)), seen_by())
    model, session = training(method, pattern=sp.Block(2, 2), storage=storage)
    for _ in range(3):
        part = session.parts[0]
        before = {name: weight.topology.clone() for name, weight in part._weights.items()}
        step(model, session)
    for name, weight in part._weights.items():
        grid = weight.reduce(part._gathering.totals[name]["movement"].abs())
        grown, kept = weight.topology & ~before[name], weight.topology & before[name]
        assert grown.any()
        assert not grid[grown].any()
        assert grid[kept].all()


def test_a_gradient_that_is_not_finite_adds_nothing():
    gathered = sp.Accumulator("sum", lambda total, weight, gradient: total.add_(gradient))
    model, session = training(seen_by(gathered), clip=1.0)
    step(model, session)
    before = session.parts[0]._gathering.totals["0"]["sum"].clone()
    assert not step(model, session, scale=float("inf"))
    assert torch.equal(session.parts[0]._gathering.totals["0"]["sum"], before)


def test_nothing_is_gathered_that_the_optimiser_keeps():
    method = sp.taylor_pruning(0.2, every=2, worst=0.5)
    adam = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)  # noqa: E731
    for optimizer, kept in ((adam, False), (None, True)):
        model, session = training(method, density=1.0, optimizer=optimizer)
        step(model, session)
        assert bool(session.parts[0]._gathering.totals["0"]) == kept
        for _ in range(5):
            step(model, session)


def test_growing_by_what_only_masked_weights_gather_is_refused_in_compact_storage():
    for method, why in (
        (sp.DropGrow(sp.magnitude, sp.momentum, 1, sp.constant(0.3)), "it grows by momentum"),
        (sp.Resize(sp.magnitude, sp.constant(0.5), 1, 5, grow=sp.movement), "it grows by movement"),
        (sp.sr_ste(), "inactive weights go on training"),
    ):
        with pytest.raises(ValueError, match=f"0: expected masked storage, got compact: {why}.*storage='masked'"):
            training(method, pattern=sp.Block(2, 2), storage="compact")
    with pytest.raises(ValueError, match="0: expected masked storage, got compact: a slot that was given"):
        training(sp.rigl(), pattern=sp.Block(2, 2), storage="compact", keep_moments=True)


def test_moments_of_absent_units_come_back_when_asked_for():
    """The same unit is dropped and grown: with keep_moments its momentum is what it was, without it is zero."""

    class Toggle(sp.Method):
        def due(self, step):
            return step in (3, 6)

        def update(self, views, step):
            topology = views["0"].topology.clone()
            topology[0, 0], topology[0, 1] = (False, True) if step == 3 else (True, False)
            return {"0": topology}

    for keep in (True, False):
        model, session = training(Toggle(), density=1.0, keep_moments=keep)
        model[0].weight_topology[0, 1] = False
        session.parts[0].after_step(False)
        optimizer = session.optimizer
        for _ in range(2):
            step(model, session)
        known = []
        for _ in range(6):
            step(model, session)
            known.append(optimizer.state[model[0].weight]["momentum_buffer"][0, 0].item())
        assert known[0] == known[1] == known[2] == 0.0  # absent: dropped at step 3
        assert (known[3] != 0.0) == keep
    state = training(Toggle(), density=1.0, keep_moments=True)[1].state_dict()
    assert state["parts"][0]["retained"] == {}


def test_units_that_were_ever_active_are_counted():
    model, session = training(sp.set_(every=1, fraction=0.5))
    shares = []
    for _ in range(4):
        step(model, session)
        shares.append(session.metrics()["ever_active"])
    assert 0.5 < shares[0] < shares[-1] <= 1.0
    other, resumed = training(sp.set_(every=1, fraction=0.5))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(session.state_dict())
    assert resumed.metrics() == session.metrics()


def test_state_of_version_0_1_has_counters_only():
    model, session = training(sp.rigl(every=1))
    step(model, session)
    state = session.state_dict()
    for new in ("ever_active", "accumulators", "hidden", "retained"):
        del state["parts"][0][new]
    other, resumed = training(sp.rigl(every=1))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(state)
    assert resumed.metrics()["topology_updates"] == 1.0
    assert step(other, resumed)


def test_weights_behind_zeros_are_not_seen_in_the_model():
    model, session = training(sp.sr_ste(), pattern=sp.NM(2, 4), optimizer=lambda p: torch.optim.AdamW(p, lr=0.05))
    average = sp.MovingAverage(0.5)
    average.attach(session)
    session.parts.append(average)
    for _ in range(5):
        step(model, session)
        for layer in (model[0], model[2], average.model[0], average.model[2]):
            assert not layer.weight[~layer.weight_topology].any()
    assert session.parts[0]._hidden.weights["0"][~model[0].weight_topology].any()


def test_weights_behind_zeros_survive_a_step_that_was_not_prepared():
    """after_step without before_step, as when a step of others was skipped: nothing was uncovered, nothing is taken."""
    model, session = training(sp.sr_ste(), pattern=sp.NM(2, 4))
    step(model, session)
    hidden = session.parts[0]._hidden.weights["0"].clone()
    session.after_step(applied=False)
    assert torch.equal(session.parts[0]._hidden.weights["0"], hidden)
