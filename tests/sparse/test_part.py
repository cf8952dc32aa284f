"""SparseTraining: what it collects and when, what it rewires, what it keeps zero, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sparsam as sp
from sparsam import Block, Session, SparseTraining, Unstructured, constant, sparsify
from sparsam.sparse import agreement
from sparsam.sparse.agreement import topology_hash
from sparsam.sparse.weights import sparse_weights

STORAGES = [(Block(2, 2), "compact"), (Block(2, 2), "masked"), (Unstructured(), "masked")]
every_storage = pytest.mark.parametrize(("pattern", "storage"), STORAGES, ids=str)


class Seen(sp.Method):
    """Changes nothing and keeps what it was shown."""

    needs_gradient = True

    def __init__(self, every=1):
        self.every, self.growth, self.views = every, [], []

    def due(self, step):
        return step % self.every == 0

    def update(self, views, step):
        self.growth.append({name: view.growth.clone() for name, view in views.items()})
        self.views.append(views)
        return {}


def training(method, pattern=Block(2, 2), storage="auto", net=None, growth="auto", lr=0.1, **options):  # noqa: B008
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)) if net is None else net
    sparsify(model, pattern, 0.5, storage=storage)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.1)
    return model, Session(model, optimizer, [SparseTraining(method, growth)], **options)


def step(model, session, x, y, last=False, own=True, samples=None):
    """One step in a loop of ours, or in a loop that knows before_step and after_step only."""
    if not own:
        (model(x) - y).square().mean().backward()
        session.before_step()
        session.optimizer.step()
        session.after_step()
        session.optimizer.zero_grad()
        return True
    with session.forward():
        loss = (model(x) - y).square().mean()
    session.backward(loss, samples)
    return session.step(last)


def dense_twin_gradient(model, x, y):
    """Dense gradients of a model, by layer, whatever its storage."""
    twin = copy.deepcopy(model)
    sp.densify(twin)
    (twin(x) - y).square().mean().backward()
    return {name: module.weight.grad for name, module in twin.named_modules() if isinstance(module, nn.Linear)}


X, Y = torch.randn(10, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(10, 4)


class TestGrowthScores:
    @every_storage
    def test_they_are_the_mean_dense_gradient_of_every_unit(self, pattern, storage):
        method = Seen()
        model, session = training(method, pattern, storage)
        wanted = dense_twin_gradient(model, X, Y)
        step(model, session, X, Y)
        for name, growth in method.growth[0].items():
            torch.testing.assert_close(growth, pattern.reduce(wanted[name].abs()))

    @every_storage
    @pytest.mark.parametrize("sizes", [(4, 4, 2), (5, 5), (10,)], ids=str)
    @pytest.mark.parametrize("growth", ["auto", "dense"])
    def test_over_a_window_they_are_those_of_the_whole_window(self, pattern, storage, sizes, growth):
        """The sum comes before the absolute value; a window cut short and unequal batches change nothing."""
        method = Seen()
        model, session = training(method, pattern, storage, growth=growth, accumulate=3)
        wanted = dense_twin_gradient(model, X, Y)
        for x, y in zip(X.split(list(sizes)), Y.split(list(sizes)), strict=True):
            applied = step(model, session, x, y, samples=len(x))
        assert applied or session.step(last=True)
        for name, found in method.growth[0].items():
            torch.testing.assert_close(found, pattern.reduce(wanted[name].abs()))

    @pytest.mark.parametrize("growth", ["auto", "sum_of_norms"])
    def test_sum_of_norms_is_another_score(self, growth):
        """Micro-batches whose gradients cancel: the exact score is zero, this one is not."""
        method = Seen()
        model, session = training(method, growth=growth, accumulate=2)
        for sign in (1.0, -1.0):
            with session.forward():
                loss = sign * model(X).sum()
            session.backward(loss)
        session.step()
        assert bool((method.growth[0]["2"] > 0.01).any()) == (growth == "sum_of_norms")

    @pytest.mark.parametrize("growth", ["auto", "dense"])
    def test_a_layer_used_twice_adds_its_gradients_with_their_sign(self, growth):
        layer = nn.Linear(6, 6)
        method = Seen()
        model, session = training(method, net=nn.Sequential(layer, nn.Tanh(), layer), growth=growth)
        target = torch.zeros(10, 6)
        wanted = dense_twin_gradient(model, X, target)["0"]
        step(model, session, X, target)
        torch.testing.assert_close(method.growth[0]["0"], Block(2, 2).reduce(wanted.abs()))

    def test_scattered_products_collect_too(self):
        method = Seen()
        model, session = training(method)
        for module in (model[0], model[2]):
            module.product = "dense"
        wanted = dense_twin_gradient(model, X, Y)
        step(model, session, X, Y)
        torch.testing.assert_close(method.growth[0]["0"], Block(2, 2).reduce(wanted["0"].abs()))

    def test_only_update_steps_collect(self):
        method = Seen(every=3)
        model, session = training(method)
        probes = []
        for _ in range(6):
            with session.forward():
                probes.append(model[0].probe is not None)
                loss = model(X).sum()
            session.backward(loss)
            session.step()
            assert model[0].probe is None
        assert probes == [False, False, True] * 2
        assert len(method.growth) == 2

    @every_storage
    def test_in_a_loop_of_others_they_are_exact_over_any_number_of_backwards(self, pattern, storage):
        """Such a loop never enters forward() and does not say how many backwards make a step."""
        method = Seen(every=2)
        model, session = training(method, pattern, storage)
        step(model, session, X, Y, own=False)
        wanted = dense_twin_gradient(model, X, Y)
        for half in (slice(0, 5), slice(5, 10)):
            ((model(X[half]) - Y[half]).square().mean() / 2).backward()
        session.before_step()
        session.after_step()
        torch.testing.assert_close(method.growth[0]["0"], pattern.reduce(wanted["0"].abs()))

    def test_a_layer_that_took_no_part_scores_zero(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.idle = nn.Linear(6, 4), nn.Linear(6, 4)

            def forward(self, x):
                return self.used(x)

        for storage in ("compact", "masked"):
            method = Seen()
            model, session = training(method, storage=storage, net=Net())
            step(model, session, X, Y)
            assert not method.growth[0]["idle"].any()
            assert method.growth[0]["used"].any()


class TestRewiring:
    @every_storage
    @pytest.mark.parametrize("own", [True, False], ids=["own loop", "loop of others"])
    @pytest.mark.parametrize("method", [sp.rigl, sp.set_])
    def test_own_and_other_loops_do_the_same(self, pattern, storage, own, method):
        model, session = training(method(every=2), pattern, storage)
        for _ in range(6):
            step(model, session, X, Y, own=own)
        assert session.metrics()["topology_updates"] == 3
        assert session.applied_steps == 6
        assert {float(weight.topology.float().mean()) for weight in sparse_weights(model).values()} == {0.5}

    @every_storage
    def test_grown_units_start_at_zero_and_are_alive(self, pattern, storage):
        model, session = training(sp.set_(every=1, fraction=1.0), pattern, storage)
        before = {name: weight.topology.clone() for name, weight in sparse_weights(model).items()}
        step(model, session, X, Y)
        for name, weight in sparse_weights(model).items():
            grown = weight.topology & ~before[name]
            assert grown.any()
            assert not weight.reduce(weight.parameter.detach().abs())[grown].any()
            assert weight.topology.sum() == before[name].sum()
        step(model, session, X, Y)  # and move in the next step, for those that stayed
        assert session.metrics()["sparsity"] == 0.5

    def test_what_is_dropped_and_grown_again_keeps_value_and_moments(self):
        """fraction 1 drops every unit; those that come straight back have lost nothing."""
        for pattern, storage in STORAGES:
            model, session = training(sp.set_(every=2, fraction=1.0), pattern, storage)
            step(model, session, X, Y)
            weights = sparse_weights(model)
            with session.forward():
                loss = (model(X) - Y).square().mean()
            session.backward(loss)
            session.before_step()
            session.optimizer.step()
            values, moments, topology = {}, {}, {}
            for name, weight in weights.items():
                weight.keep_zeros()
                values[name] = weight.parameter.detach().clone()
                moments[name] = session.optimizer.state[weight.parameter]["exp_avg"].clone()
                topology[name] = weight.topology.clone(), weight.active.clone()
            session.after_step()
            for name, weight in weights.items():
                before, entries = topology[name]
                stayed = before & weight.topology
                assert stayed.any()
                assert (before != weight.topology).any()
                same = (weight.parameter == values[name]) & (
                    session.optimizer.state[weight.parameter]["exp_avg"] == moments[name]
                )
                kept = weight.reduce((same & entries).float()) == weight.reduce(entries.expand_as(same).float())
                assert kept[stayed].all()

    def test_frozen_layers_keep_weights_and_topology(self):
        """Fine-tuning with a frozen sparse trunk: drop and grow would wipe out weights that nothing trains again."""
        for storage in ("compact", "masked"):
            net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
            net[0].requires_grad_(False)
            model, session = training(sp.set_(every=1), storage=storage, net=net)
            before = model[0].weight.clone(), sparse_weights(model)["0"].topology.clone()
            for _ in range(3):
                step(model, session, X, Y)
            assert torch.equal(model[0].weight, before[0])
            assert torch.equal(sparse_weights(model)["0"].topology, before[1])
            assert session.metrics()["moved_share"] > 0

    def test_a_skipped_update_step_is_made_up_for(self):
        """A gradient that is not finite on an update step: no rewire, and the next applied step is the update."""
        model, session = training(sp.rigl(every=2), clip=1.0)
        step(model, session, X, Y)
        hash_before = session.state_dict()
        assert not step(model, session, X, Y * float("nan"))
        assert str(session.state_dict()) == str(hash_before)
        assert step(model, session, X, Y)
        assert session.metrics()["topology_updates"] == 1

    def test_a_view_is_the_methods_own(self):
        """A method that scribbles on what it is shown must not change the model behind the optimiser's back."""
        model, session = training(method := Seen(), storage="masked")
        step(model, session, X, Y)
        before = sparse_weights(model)["0"].topology.clone()
        method.views[0]["0"].topology.fill_(True)
        assert torch.equal(sparse_weights(model)["0"].topology, before)
        assert set(method.views[0]["0"].moments) == {"exp_avg", "exp_avg_sq"}
        assert method.views[0]["0"].gradient.shape == model[0].weight.shape

    def test_clipping_sees_masked_gradients(self):
        """Otherwise gradients of weights that do not exist would shorten every step."""
        norms = []
        for storage in ("compact", "masked"):
            torch.manual_seed(0)
            model, session = training(sp.static(), storage=storage, clip=1e-3)
            step(model, session, X, Y)
            norms.append(session.metrics()["gradient_norm"])
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)


class TestState:
    @every_storage
    def test_the_topology_is_the_models_and_must_be_loaded_first(self, pattern, storage):
        model, session = training(sp.set_(every=1), pattern, storage)
        for _ in range(3):
            step(model, session, X, Y)
        torch.manual_seed(5)
        other, resumed = training(sp.set_(every=1), pattern, storage)
        with pytest.raises(
            ValueError, match=r"expected a model with topology .*Load the model's state before the session's"
        ):
            resumed.load_state_dict(session.state_dict())
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(session.state_dict())
        assert resumed.metrics() == session.metrics()

    def test_resuming_just_before_an_update_in_a_loop_of_others(self):
        model, session = training(sp.rigl(every=3))
        for _ in range(2):
            step(model, session, X, Y, own=False)
        other, resumed = training(sp.rigl(every=3))
        other.load_state_dict(model.state_dict())
        resumed.optimizer.load_state_dict(copy.deepcopy(session.optimizer.state_dict()))
        resumed.load_state_dict(session.state_dict())
        step(model, session, X, Y, own=False)
        step(other, resumed, X, Y, own=False)
        assert str(resumed.state_dict()) == str(session.state_dict())
        assert torch.equal(model[0].weight, other[0].weight)

    @every_storage
    def test_detach_leaves_the_model_and_optimiser_as_they_are(self, pattern, storage):
        model, session = training(sp.rigl(every=1), pattern, storage)
        attributes = [set(module.__dict__) for module in model.modules()]
        hooks = [len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules()]
        step(model, session, X, Y)
        with session.forward():
            model(X).sum().backward()
        session.detach()
        assert [set(module.__dict__) for module in model.modules()] == attributes
        assert [len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules()] == hooks
        assert not session.optimizer._optimizer_step_pre_hooks
        assert not session.optimizer._optimizer_step_post_hooks
        assert all(getattr(module, "probe", None) is None for module in model.modules())
        assert not any(getattr(module, "attached", False) for module in model.modules())
        session.optimizer.zero_grad()
        model(X).sum().backward()
        session.optimizer.step()
        again = Session(model, session.optimizer, [SparseTraining(sp.rigl(every=1))])
        step(model, again, X, Y)


class Returns(sp.Method):
    def __init__(self, topology):
        self.topology = topology

    def due(self, step):
        return True

    def update(self, views, step):
        return {"0": self.topology}


def test_the_sparsity_it_shows_is_that_of_weights():
    """A row of 10 counts for less than a row of 100, as in the table and in every density schedule."""
    model = nn.Sequential(nn.Linear(100, 10), nn.ReLU(), nn.Linear(10, 100))
    sparsify(model[:1], sp.Neuron(), 0.2)
    sparsify(model[2:], sp.Neuron(), 0.7)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), [SparseTraining(sp.static())])
    assert session.metrics()["sparsity"] == pytest.approx(1 - (0.2 * 1000 + 0.7 * 1000) / 2000)
    assert session.metrics()["ever_active"] == pytest.approx(0.45)


def test_a_part_that_was_detached_begins_anew_elsewhere():
    part = SparseTraining(sp.set_(every=1, fraction=0.5), keep_moments=True)
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        sparsify(model, Unstructured(), 0.5)
        session = Session(model, torch.optim.Adam(model.parameters(), lr=0.1), [part])
        for _ in range(3):
            step(model, session, X, Y)
        states.append((session.metrics(), model.state_dict()))
        session.detach()
    assert states[0][0] == states[1][0]
    assert all(torch.equal(one, states[1][1][name]) for name, one in states[0][1].items())


def test_a_state_with_one_hash_over_all_layers_loads():
    """As sessions were saved before layers could be apart."""
    model, session = training(sp.static())
    state = session.state_dict()
    own = state["parts"][0]
    assert len(own["topology"]) > 1
    own["topology"] = topology_hash(sparse_weights(model))
    session.load_state_dict(state)
    own["topology"] = "0" * 15
    with pytest.raises(ValueError, match="expected a model with topology 000000000000000, got"):
        session.load_state_dict(state)


def test_a_rank_that_is_gone_at_a_rewire_is_said(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("Connection closed by peer\nmore")

    monkeypatch.setattr(agreement, "ranks", lambda _=None: 2)
    monkeypatch.setattr(dist, "all_reduce", fails)
    monkeypatch.setattr(dist, "all_gather", fails)
    model, _ = training(sp.static())
    message = "SparseTraining: expected all ranks at a rewire, but not all can be reached .Connection closed by peer."
    with pytest.raises(RuntimeError, match=message):
        agreement.mean_of_ranks(torch.ones(2))
    with pytest.raises(RuntimeError, match=message):
        agreement.compare_ranks(sparse_weights(model), 1)
    agreement.compare_ranks({}, 1)  # a model without sparse layers has nothing to ask


class TestUncovered:
    """SR-STE's weights behind zeros are the optimiser's between before_step and after_step, and nobody else's."""

    def begun(self):
        model, session = training(sp.sr_ste(), Unstructured(), "masked")
        for _ in range(3):
            step(model, session, X, Y)
        (model(X) - Y).square().mean().backward()
        session.before_step()
        assert any(weight.parameter[~weight.active].any() for weight in sparse_weights(model).values())
        return model, session

    def test_detach_after_a_step_that_was_broken_off(self):
        model, session = self.begun()
        session.detach()
        for weight in sparse_weights(model).values():
            assert not weight.parameter[~weight.active].any()

    def test_nothing_is_saved_before_after_step(self):
        _, session = self.begun()
        with pytest.raises(ValueError, match="Save the model and the session after after_step"):
            session.state_dict()
        session.after_step(applied=False)
        session.state_dict()

    def test_a_loop_that_forgets_before_step(self):
        model, session = training(sp.sr_ste(), Unstructured(), "masked")
        (model(X) - Y).square().mean().backward()
        session.optimizer.step()
        with pytest.raises(ValueError, match=r"expected before_step\(\) before the optimiser's step"):
            session.after_step()

    def test_a_weight_that_is_not_finite_does_not_leak(self):
        model, session = training(sp.sr_ste(), Unstructured(), "masked")
        part = session.parts[0]
        step(model, session, X, Y)
        weight = part._weights["0"]
        part._hidden.weights["0"][~weight.active] = torch.tensor([torch.nan, 9.0]).repeat(12)
        step(model, session, X, Y)
        assert not weight.parameter[~weight.active].any()


class TestFrozen:
    @pytest.mark.parametrize(
        "method",
        [sp.gmp(0.2, 1, 5), sp.gmp(0.2, 1, 5, allocation=sp.global_()), sp.rigl(1)],
        ids=["gmp", "all", "rigl"],
    )
    def test_everything(self, method):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        for layer in model[::2]:
            layer.weight.requires_grad_(False)
        model, session = training(method, Unstructured(), "masked", model)
        before = [layer.weight_topology.clone() for layer in model[::2]]
        step(model, session, X, Y)
        assert all(torch.equal(layer.weight_topology, one) for layer, one in zip(model[::2], before, strict=True))

    @pytest.mark.parametrize("score", [sp.movement, sp.momentum, sp.fisher])
    def test_what_is_unfrozen_later_is_gathered_from_then_on(self, score):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        sparsify(model, Unstructured(), 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[0].weight.requires_grad_(False)
        session = Session(model, optimizer, [SparseTraining(sp.DropGrow(score, sp.random, 1, constant(0.5)))])
        step(model, session, X, Y)
        model[0].weight.requires_grad_(True)
        before = model[0].weight_topology.clone()
        step(model, session, X, Y)
        assert not torch.equal(model[0].weight_topology, before)
        step(model, session, X, Y)

    def test_what_is_unfrozen_later_trains_on_behind_zeros_too(self):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        sparsify(model, Unstructured(), 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model[0].weight.requires_grad_(False)
        session = Session(model, optimizer, [SparseTraining(sp.sr_ste())])
        step(model, session, X, Y)
        model[0].weight.requires_grad_(True)
        step(model, session, X, Y)
        hidden = session.parts[0]._hidden.weights["0"]
        assert hidden[~model[0].weight_topology].any()


class TestRefused:
    @pytest.mark.parametrize("given", [sp.rigl, "rigl", [sp.rigl()], None, sp.constant(0.3)], ids=range(5))
    def test_what_is_no_method(self, given):
        with pytest.raises(ValueError, match=r"method: expected a Method such as rigl\(every=100\), got .*"):
            SparseTraining(given)

    def test_two_of_them(self):
        """Each would undo what the other decides."""
        model = nn.Sequential(nn.Linear(8, 8))
        sparsify(model, Block(2, 2), 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"expected one SparseTraining in a session, got 2. Join their methods"):
            Session(model, optimizer, [SparseTraining(sp.static()), SparseTraining(sp.rigl())])
        assert not model[0].attached

    def test_growth(self):
        with pytest.raises(ValueError, match="growth: expected auto, dense or sum_of_norms, got 'norms'"):
            SparseTraining(sp.static(), growth="norms")

    def test_a_dense_model(self):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(
            ValueError, match=r"expected a model with sparse layers, got none. Call sparsify\(model, ...\)"
        ):
            Session(model, optimizer, [SparseTraining(sp.static())])

    def test_an_optimiser_built_before_sparsify(self):
        """It would train tensors that no layer uses any more."""
        model = nn.Sequential(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparsify(model, Block(2, 2), 0.5)
        with pytest.raises(ValueError, match="0: expected its values in the optimiser once, found 0 times"):
            Session(model, optimizer, [SparseTraining(sp.static())])
        assert not model[0].attached

    def test_an_optimiser_that_reads_matrices(self):
        model = nn.Sequential(nn.Linear(8, 8, bias=False))
        sparsify(model, Unstructured(), 0.5)
        with pytest.raises(ValueError, match="Muon: expected an element-wise optimiser"):
            Session(model, torch.optim.Muon(model.parameters()), [SparseTraining(sp.static())])

    @pytest.mark.parametrize(
        ("storage", "change"),
        [
            ("compact", lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)),
            ("masked", lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)),
            ("compact", lambda model: setattr(model[0], "values", nn.Parameter(X))),
            ("masked", lambda model: setattr(model[0], "weight", nn.Parameter(X))),
            ("masked", lambda model: nn.utils.parametrizations.weight_norm(model[0])),
            ("masked", sp.densify),
        ],
    )
    def test_a_parameter_exchanged_behind_the_sessions_back(self, change, storage):
        """The optimiser would go on training a tensor that no layer uses."""
        model, session = training(sp.static(), storage=storage)
        step(model, session, X, Y)
        change(model)
        with pytest.raises(ValueError, match=r"0: its parameter or topology was replaced while a session trains it"):
            session.before_step()

    def test_a_topology_with_more_units_than_slots(self):
        model, session = training(Returns(torch.ones(4, 3, dtype=torch.bool)))
        with pytest.raises(ValueError, match=r"rewire: expected at most 6 active blocks.*sparsify\(..., headroom=\)"):
            step(model, session, X, Y)

    def test_a_topology_of_another_shape(self):
        model, session = training(Returns(torch.ones(2, 3, dtype=torch.bool)))
        with pytest.raises(ValueError, match=r"0: expected a bool topology of \(4, 3\) from the method"):
            step(model, session, X, Y)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                {"nowhere": torch.ones(4, 3, dtype=torch.bool)},
                "expected topologies of 0, 2 from the method, got nowhere",
            ),
            ({"2": torch.ones(2, 4, dtype=torch.bool)}, "expected topologies of 0 from the method, got 2"),
            (None, "expected topologies by layer from the method, got NoneType"),
        ],
        ids=["unknown", "frozen", "nothing"],
    )
    def test_topologies_of_layers_that_are_not_trained(self, given, message):
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        net[2].weight.requires_grad_(given is None or "nowhere" in given)
        method = Returns(None)
        method.update = lambda views, step: given
        model, session = training(method, storage="masked", net=net)
        with pytest.raises(ValueError, match=message):
            step(model, session, X, Y)

    @pytest.mark.parametrize(
        "method", [sp.sr_ste(), sp.DropGrow(sp.movement, sp.random, 9, constant(0.1))], ids=["sr-ste", "movement"]
    )
    def test_the_state_of_another_method(self, method):
        model, session = training(method, Unstructured(), "masked")
        step(model, session, X, Y)
        state = session.state_dict()
        session.detach()
        session = Session(model, session.optimizer, [SparseTraining(sp.rigl())])
        with pytest.raises(ValueError, match=r"SparseTraining: expected a state .* got one of a method that keeps"):
            session.load_state_dict(state)

    def test_a_score_that_reads_gradients_says_so(self):
        def score(view):
            return sp.gradient(view) + 0.01 * sp.magnitude(view)

        model, session = training(sp.DropGrow(sp.magnitude, sp.needs_gradient(score), 1, constant(0.3)))
        step(model, session, X, Y)
        del score.needs_gradient
        model, session = training(sp.DropGrow(sp.magnitude, score, 1, constant(0.3)))
        with pytest.raises(ValueError, match=r"0: expected a dense gradient at step 1, got none.*needs_gradient"):
            step(model, session, X, Y)
