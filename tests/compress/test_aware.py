"""Quantisation-aware training: the forward of the model to come, gradients straight through, topologies untouched."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sparsam as sp
from sparsam.compress.aware import QuantisationAware, fake_quantise
from sparsam.compress.quantise import quantise
from sparsam.sparse.layers import ActivatedLinear
from sparsam.sparse.weights import sparse_weights


def mlp(storage="dense"):
    model = nn.Sequential(ActivatedLinear(48, 64, activation="gelu"), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    if storage == "compact":
        sp.sparsify(model, sp.Block(16, 16), 0.5, include=["0", "1"])
    elif storage == "masked":
        sp.sparsify(model, sp.Unstructured(), 0.3, include=["0", "1"])
    return model


def session_of(model, *parts):
    return sp.Session(model, torch.optim.AdamW(model.parameters(), lr=0.01), list(parts))


def train(session, steps, scale=1.0):
    losses = []
    for number in range(steps):
        x = torch.randn(16, 48, generator=torch.Generator().manual_seed(number)) * scale
        with session.forward():
            loss = (session.model(x) - x[:, :4]).square().mean()
        session.backward(loss)
        session.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("storage", ["dense", "compact", "masked"])
@pytest.mark.parametrize("static", [False, True], ids=["rows", "static"])
def test_the_forward_is_that_of_the_quantised_model(storage, static):
    """Q2: also after inputs a hundred times as large, once observers are frozen."""
    model = mlp(storage)
    aware = QuantisationAware(static_inputs=static, freeze_after=4 if static else None)
    method = [] if storage == "dense" else [sp.SparseTraining(sp.rigl(every=2, fraction=0.3))]
    session = session_of(model, *method, aware)
    train(session, 5)
    scales = aware.input_scales()
    train(session, 1, scale=100.0)
    assert aware.input_scales() == scales
    x = torch.randn(6, 48)
    with torch.no_grad():
        fake = model.eval()(x)
    session.detach()
    assert aware.input_scales() == scales
    done = quantise(model, input_scales=scales)
    assert set(done.values()) == ({"int8", "int8 blocks"} if storage == "compact" else {"int8"})
    # rows are the same numbers; static ones are rounded in float32 on another way
    torch.testing.assert_close(model(x), fake, rtol=1e-4, atol=1e-4)


def test_gradients_go_straight_through():
    model = nn.Sequential(nn.Linear(8, 4))
    weight, x, out = model[0].weight.detach().clone(), torch.randn(5, 8, requires_grad=True), torch.randn(5, 4)
    session = session_of(model, QuantisationAware())
    y = model(x)
    (y * out).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, out.mT @ x.detach())
    torch.testing.assert_close(x.grad, out @ weight)
    assert not torch.equal(y, torch.nn.functional.linear(x, weight, model[0].bias))
    assert torch.equal(model[0].weight, weight)
    session.detach()


def test_saturated_inputs_have_no_gradient():
    x = torch.tensor([0.26, -20.0, 12.7], requires_grad=True)
    y = fake_quantise(x, torch.tensor(0.1))
    y.sum().backward()
    assert y.tolist() == pytest.approx([0.3, -12.7, 12.7])
    assert x.grad.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("storage", ["compact", "masked"])
def test_training_learns_and_keeps_the_topology(storage):
    model = mlp(storage)
    before = {name: weight.topology.clone() for name, weight in sparse_weights(model).items()}
    session = session_of(model, sp.SparseTraining(sp.static()), QuantisationAware(static_inputs=True))
    losses = train(session, 30)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    for name, weight in sparse_weights(model).items():
        assert torch.equal(weight.topology, before[name])
        if storage == "masked":
            assert bool((weight.parameter[~weight.active] == 0).all())
    session.detach()
    quantise(model)
    for name, topology in before.items():
        if storage == "masked":
            assert bool((model.get_submodule(name).values[~topology] == 0).all())
        else:
            assert torch.equal(model.get_submodule(name).topology, topology)


def test_detach_leaves_plain_layers():
    model = mlp()
    plain, x = copy.deepcopy(model), torch.randn(3, 48)
    session = session_of(model, QuantisationAware(static_inputs=True))
    assert not torch.equal(model(x), plain(x))
    session.detach()
    assert [type(one) for one in model] == [type(one) for one in plain]
    assert torch.equal(model(x), plain(x))
    assert not any(one._forward_pre_hooks for one in model.modules())


def test_the_state_comes_back():
    torch.manual_seed(1)
    model = mlp()
    aware = QuantisationAware(static_inputs=True, percentile=99.0)
    session = session_of(model, aware)
    train(session, 3)
    state = copy.deepcopy(session.state_dict())
    expected = aware.input_scales()
    again = QuantisationAware(static_inputs=True, percentile=99.0)
    other = session_of(mlp(), again)
    other.load_state_dict(state)
    assert not any(one.frozen for one in again._observers.values())
    assert again.input_scales() == expected
    with pytest.raises(ValueError, match="expected the state of the same layers, got one that differs in 0"):
        session_of(mlp(), QuantisationAware()).load_state_dict(state)


def test_left_out_layers_compute_as_before():
    model = mlp()
    plain, x = copy.deepcopy(model), torch.randn(3, 64)
    session_of(model, QuantisationAware(exclude=["1"]))
    assert torch.equal(model[1](x), plain[1](x))
    assert not torch.equal(model[3](x[:, :32]), plain[3](x[:, :32]))


def test_under_bf16_autocast():
    model = mlp("compact")
    session = session_of(model, sp.SparseTraining(sp.static()), sp.Precision("bf16"), QuantisationAware())
    assert all(loss == loss for loss in train(session, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantisationAware(freeze_after=0, static_inputs=True), "freeze_after: expected at least 1 step"),
        (lambda: QuantisationAware(percentile=99.0), "with static_inputs=True only"),
        (lambda: session_of(nn.Sequential(nn.ReLU(), nn.Conv1d(1, 1, 1)), QuantisationAware()), "with linear layers"),
        (lambda: session_of(mlp(), sp.Precision(sp.Rules()), QuantisationAware()), "without formats"),
    ],
    ids=["freeze", "percentile", "no layers", "precision"],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_policy_that_comes_after_is_refused():
    model = mlp()
    session = session_of(model, QuantisationAware(), sp.Precision(sp.Rules()))
    with pytest.raises(ValueError, match="expected its int8 formats, got others"):
        train(session, 1)
