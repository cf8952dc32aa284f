"""Pruning of a trained model: by every score, in every storage, once and in rounds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsam as sp

X = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
BATCHES = [X[:8], X[8:16], X[16:]]


def loss(model, batch):
    return (model(batch) - batch).square().mean()


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def dense_of(model):
    return [layer.weight.detach().clone() for layer in (model[0], model[2])]


SCORES = {
    "magnitude": sp.magnitude,
    "gradient": sp.gradient,
    "taylor": sp.taylor,
    "mest": sp.mest,
    "fisher": sp.fisher,
    "movement": sp.movement,
    "momentum": sp.momentum,
    "random": sp.random,
    "second_order": sp.SecondOrder(size=64),
}


@pytest.mark.parametrize("storage", ["compact", "masked"])
@pytest.mark.parametrize("score", SCORES)
def test_every_score_at_once_and_further(score, storage):
    model = model_of()
    given = {"score": SCORES[score], "data": BATCHES, "loss": loss}
    table = sp.prune(model, sp.Block(4, 4), 0.5, storage=storage, **given)
    assert [(row.storage, row.density) for row in table.rows] == [(storage, 0.5)] * 2
    first = [weight != 0 for weight in dense_of(model)]
    table = sp.prune(model, sp.Block(4, 4), 0.25, **given)
    assert [(row.storage, row.density) for row in table.rows] == [(storage, 0.25)] * 2
    assert all(not (weight != 0)[~before].any() for weight, before in zip(dense_of(model), first, strict=True))
    assert [int((weight != 0).sum()) for weight in dense_of(model)] == [128, 128]
    if storage == "compact":
        assert len(model[0].values) == 8  # no dead slots


def test_scores_read_means_over_the_batches():
    model = model_of()
    weight = model[0].weight.detach().clone()
    gradients = [torch.autograd.grad(loss(model, batch), model[0].weight)[0] for batch in BATCHES]
    expected = (weight * sum(gradients) / 3).abs()
    sp.prune(model, sp.Unstructured(), 0.25, score=sp.taylor, data=iter(BATCHES), loss=loss)
    assert float(expected[model[0].weight != 0].min()) >= float(expected[model[0].weight == 0].max())


def test_layers_share_density_by_the_same_evidence():
    model = model_of()
    with torch.no_grad():
        model[0].weight.mul_(0.1)  # small, and multiplied by large ones: magnitude would cut it off
        model[2].weight.mul_(10)
    table = sp.prune(
        model, sp.Unstructured(), 0.5, score=sp.taylor, data=BATCHES, loss=loss, allocation=sp.global_(sp.taylor)
    )
    by_magnitude = sp.inspect(model_of(), sp.Unstructured(), 0.5, allocation=sp.global_())
    assert table.density == pytest.approx(0.5, abs=1e-3)
    assert table.rows[0].density != by_magnitude.rows[0].density
    costs = sp.SecondOrder(size=16)
    table = sp.prune(
        model_of(), sp.Unstructured(), 0.5, score=costs, data=BATCHES, loss=loss, allocation=sp.global_(costs)
    )
    assert table.density == pytest.approx(0.5, abs=1e-3)


def test_without_data_the_last_backward_and_the_optimiser_are_read():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model, X).backward()
    optimizer.step()
    squares = model[0].weight.detach().square() * optimizer.state[model[0].weight]["exp_avg_sq"]
    sp.prune(model, sp.Unstructured(), 0.5, score=sp.fisher, optimizer=optimizer)
    assert float(squares[model[0].weight != 0].min()) >= float(squares[model[0].weight == 0].max())
    model = model_of()
    loss(model, X).backward()
    size = model[0].weight.grad.abs().clone()
    sp.prune(model, sp.Unstructured(), 0.5, score=sp.gradient)
    assert float(size[model[0].weight != 0].min()) >= float(size[model[0].weight == 0].max())


@pytest.mark.parametrize("storage", ["compact", "masked"])
def test_rounds_carry_the_optimiser_and_train_on(storage):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []

    def fine_tune(turn):
        session = sp.Session(model, optimizer, [sp.SparseTraining(sp.static())])
        for _ in range(20):
            with session.forward():
                value = loss(model, X)
            session.backward(value)
            session.step()
        losses.append(float(value.detach()))
        session.detach()

    tables = sp.prune_in_rounds(
        model, sp.Block(4, 4), 0.25, 2, fine_tune, storage=storage, optimizer=optimizer, data=iter(BATCHES), loss=loss
    )
    assert [table.density for table in tables] == [0.5, 0.25]
    assert len(losses) == 2
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(one) for one in held} == {id(one) for one in model.parameters()}
    assert {int(optimizer.state[one]["step"]) for one in held} == {40}
    assert all(optimizer.state[one]["exp_avg"].shape == one.shape for one in held)
    if storage == "masked":
        assert not optimizer.state[model[0].weight]["exp_avg"][~model[0].weight.bool()].any()


def test_layers_are_pruned_one_after_the_other():
    model = model_of()
    sp.prune(model, sp.Block(4, 4), 0.5, include=["0"])
    sp.prune(model, sp.Block(4, 4), 0.25, include=["2"])
    assert [module.density for module in (model[0], model[2])] == [0.5, 0.25]
    table = sp.prune(model, sp.Block(4, 4), 0.25, exclude=["2"])
    assert [row.density for row in table.rows] == [0.25, 0.25]


def test_convolutions_and_what_is_frozen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    model[0].weight.requires_grad_(False)
    images = torch.randn(2, 3, 8, 8)
    for density in (0.5, 0.25):
        sp.prune(
            model,
            sp.Neuron(),
            density,
            score=sp.SecondOrder(),
            data=[images],
            loss=lambda model, batch: model(batch).square().mean(),
        )
    assert int(model[0].weight_topology.sum()) == 2
    assert not model[0].weight.requires_grad


def sparse_of(pattern=None):
    model = model_of()
    sp.sparsify(model, pattern or sp.Block(4, 4), 0.5)
    return model


def attached():
    model = sparse_of()
    model.session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), [sp.SparseTraining(sp.static())])
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (model_of, {"score": sp.movement}, "0: expected calibration batches for the score, which gathers movement"),
        (model_of, {"data": BATCHES}, "loss: expected a function"),
        (model_of, {"loss": loss}, "at least one calibration batch"),
        (model_of, {"sparse_fan_in": True}, "prune: expected a trained model"),
        (model_of, {"score": "taylor"}, "score: expected a function"),
        (model_of, {"density": 0.0}, "density: expected"),
        (sparse_of, {"density": 0.9}, "expected a density of at most 0.5"),
        (sparse_of, {"storage": "compact"}, "prune: expected no storage"),
        (lambda: sparse_of(sp.Block(2, 2)), {}, r"0 is sparse in Block\(rows=2, cols=2\) already"),
        (attached, {}, "prune: 0 is trained by a session"),
    ],
    ids=["gathers", "loss", "data", "fan_in", "score", "density", "denser", "storage", "pattern", "attached"],
)
def test_what_cannot_be_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        sp.prune(make(), sp.Block(4, 4), **{"density": 0.25, **options})


def test_rounds_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="rounds: expected at least 1"):
        sp.prune_in_rounds(model_of(), sp.Block(4, 4), 0.25, 0, print)
    with pytest.raises(ValueError, match="fine_tune: expected a function"):
        sp.prune_in_rounds(model_of(), sp.Block(4, 4), 0.25, 1, None)
