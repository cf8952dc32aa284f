"""The penalty's gradient by hand in every storage, and what it does to a training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsam as sp


def session_of(model, *parts, lr=1.0, **options):
    return sp.Session(model, torch.optim.SGD(model.parameters(), lr=lr), list(parts), **options)


def pulled(model, penalty, *parts):
    """What the penalty alone adds to the gradient of each parameter, for a loss that has none."""
    session = session_of(model, *parts, penalty)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    session.before_step()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def layer(weight, bias=True):
    rows, cols = len(weight), len(weight[0])
    model = nn.Sequential(nn.Linear(cols, rows, bias))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor(weight))
    return model


WEIGHT = [[3.0, -4.0, 0.5, 0.0], [0.0, 0.0, 0.0, -0.5], [1.0, 2.0, 0.0, 0.0], [2.0, 4.0, 0.0, 0.0]]


def test_names_are_those_of_the_plain_model():
    """A wrapper such as torch.compile, or DistributedDataParallel, adds its own to them."""
    model = torch.compile(layer(WEIGHT), backend="eager")
    gradient = pulled(model, sp.L1(0.25, dense=["0"]))["_orig_mod.0.weight"]
    assert torch.equal(gradient, 0.25 * torch.tensor(WEIGHT).sign())


def test_each_weight_by_itself():
    model = layer(WEIGHT)
    sp.sparsify(model, sp.Unstructured(), 0.5)  # keeps the eight that are not zero, but one
    gradient = pulled(model, sp.L1(0.25))["0.weight"]
    assert torch.equal(gradient, 0.25 * model[0].weight.sign())
    assert int((gradient != 0).sum()) == 8


@pytest.mark.parametrize("storage", ["compact", "masked"])
def test_norms_of_units_are_taken_wide(storage):
    """The square of 1e-4 is nothing in fp16."""
    model = layer([[1e-4] * 4] * 4).half()
    sp.sparsify(model, sp.Block(2, 2), 1.0, storage=storage)
    gradient = next(iter(pulled(model, sp.L1(1.0, groups=True)).values()))
    assert torch.allclose(gradient, torch.full_like(gradient, 0.5), rtol=1e-2)


def test_biases_and_vectors_are_spared():
    model = layer(WEIGHT)
    sp.sparsify(model, sp.Unstructured(), 1.0)
    assert not pulled(model, sp.L1(0.25))["0.bias"].any()


@pytest.mark.parametrize("storage", ["compact", "masked"])
def test_units_together_by_hand(storage):
    """Blocks of 2 x 2 with norms 5 (3, 4, 0, 0), sqrt(0.5), 5 (1, 2, 2, 4) and none."""
    model = layer(WEIGHT)
    sp.sparsify(model, sp.Block(2, 2), 1.0, storage=storage)
    gradient = pulled(model, sp.L1(0.1, groups=True))
    if storage == "compact":
        dense = model[0].scatter(gradient["0.values"])
    else:
        dense = gradient["0.weight"]
    half = 0.1 * 0.5**0.5
    expected = [[0.06, -0.08, half, 0.0], [0.0, 0.0, 0.0, -half], [0.02, 0.04, 0.0, 0.0], [0.04, 0.08, 0.0, 0.0]]
    torch.testing.assert_close(dense, torch.tensor(expected))


@pytest.mark.parametrize("storage", ["compact", "masked"])
def test_padding_at_the_edge_counts_for_nothing(storage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7))
    weight = model[0].weight.detach().clone()
    sp.sparsify(model, sp.Block(4, 4), 1.0, storage=storage)
    gradient = pulled(model, sp.L1(1.0, groups=True))
    dense = model[0].scatter(gradient["0.values"]) if storage == "compact" else gradient["0.weight"]
    torch.testing.assert_close(dense[4:, 4:], weight[4:, 4:] / weight[4:, 4:].norm())
    torch.testing.assert_close(dense[:4, :4], weight[:4, :4] / weight[:4, :4].norm())


def test_neurons_and_kernels():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 8))
    sp.sparsify(model, sp.Neuron(), 1.0, storage="masked")
    weight = model[0].weight.detach()
    gradient = pulled(model, sp.L1(1.0, groups=True))["0.weight"]
    torch.testing.assert_close(gradient, weight / weight.flatten(1).norm(dim=1)[:, None, None, None])


def test_dense_matrices_are_chosen_by_globs():
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(8, 8), "down": nn.Linear(8, 8), "norm": nn.LayerNorm(8)})
    gradients = pulled(model, sp.L1(0.5, dense=["up"]))
    assert torch.equal(gradients["up.weight"], 0.5 * model["up"].weight.sign())
    assert not gradients["down.weight"].any()
    grouped = pulled(model, sp.L1(1.0, groups=sp.Block(4, 4), dense=["down"]))["down.weight"]
    corner = model["down"].weight.detach()[:4, :4]
    torch.testing.assert_close(grouped[:4, :4], corner / corner.norm())


def test_tied_matrices_are_pulled_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert torch.equal(pulled(model, sp.L1(0.5, dense=["*"]))["0.weight"], 0.5 * model[0].weight.sign())


def test_the_strength_follows_its_schedule_and_the_optimiser_sees_it_before_clipping():
    model = layer([[2.0, -2.0]], bias=False)
    session = session_of(model, sp.L1(sp.stages([(0, 0.5), (2, 0.0)]), dense=["0"]), lr=1.0, clip=0.1)
    strengths = []
    for _ in range(3):
        session.backward(0.0 * model[0].weight.sum())
        session.step()
        strengths.append((session.metrics()["l1_strength"], session.metrics()["gradient_norm"]))
    assert strengths == [(0.5, pytest.approx(0.5 * 2**0.5)), (0.5, pytest.approx(0.5 * 2**0.5)), (0.0, 0.0)]
    assert model[0].weight[0, 0] < 2.0


def test_units_that_matter_little_die_and_those_that_matter_stay():
    """Least squares where half of the inputs are noise: their columns of blocks go to (almost) nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    sp.sparsify(model, sp.Block(4, 4), 1.0, storage="masked")
    session = session_of(model, sp.SparseTraining(sp.static()), sp.L1(0.05, groups=True), lr=0.1)
    target = torch.randn(8, 8)
    for _ in range(200):
        x = torch.randn(64, 16)
        with session.forward():
            loss = (model(x) - x[:, :8] @ target.T).square().mean()
        session.backward(loss)
        session.step()
    weight = model[0].weight.detach()
    assert weight[:, 8:].norm() < 0.1 * weight[:, :8].norm()
    session.detach()


def test_nothing_is_kept_and_nothing_stays_behind():
    model = layer(WEIGHT)
    sp.sparsify(model, sp.Block(2, 2), 0.5)
    session = session_of(model, penalty := sp.L1(0.1))
    assert session.state_dict()["parts"] == [{}]
    session.detach()
    assert penalty._penalised == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sp.L1(-1.0), r"strength: expected a number >= 0 or a schedule, got -1\.0\."),
        (
            lambda: session_of(layer(WEIGHT), sp.L1(0.1, groups=True, dense=["0"])),
            r"L1: expected a pattern for the groups of 0, which is dense and has none of its own\. Give groups=Block",
        ),
        (
            lambda: session_of(layer(WEIGHT), sp.L1(0.1)),
            r"L1: expected a model with sparse layers or dense=\[\.\.\.\] that names some, got neither\. Call sparsify",
        ),
        (lambda: session_of(layer(WEIGHT), sp.L1(0.1, dense=["fc"])), r"'fc' matches no layer\."),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("storage", ["compact", "masked"])
def test_l2_pulls_by_the_weight_itself_and_follows_its_schedule(storage):
    model = layer(WEIGHT)
    sp.sparsify(model, sp.Block(2, 2), 0.5, storage=storage)
    weight = next(iter(model.parameters()))
    session = session_of(model, penalty := sp.L2(sp.linear(0.5, 0.0, steps=2)), lr=1.0)
    for strength in (0.5, 0.25, 0.0):
        expected = weight.detach() * (1 - strength)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        session.before_step()
        session.optimizer.step()
        session.after_step()
        assert torch.equal(weight.detach(), expected)
        assert penalty.metrics() == {"l2_strength": strength}


def test_l2_says_what_it_needs():
    with pytest.raises(ValueError, match="L2: expected a model with sparse layers"):
        session_of(layer(WEIGHT), sp.L2(0.1))
