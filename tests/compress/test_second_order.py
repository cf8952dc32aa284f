"""Second-order costs and updates against an explicit Fisher matrix and its inverse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsam as sp
from sparsam.compress.second_order import compensated, removal_costs

DAMPING = 0.05


def problem(rows=6, cols=10, m=8):
    generator = torch.Generator().manual_seed(3)
    mix = torch.randn(rows * cols, rows * cols, generator=generator) / 3
    gradients = torch.randn(m, rows * cols, generator=generator) @ mix
    return torch.randn(rows, cols, generator=generator), gradients.view(m, rows, cols)


def fisher_of(gradients, places):
    """The damped Fisher matrix of some weights of the flat layer, as it is written in the paper."""
    flat = gradients.flatten(1).double()
    lam = DAMPING * float(flat.square().mean())
    chosen = flat[:, places]
    return lam * torch.eye(len(places), dtype=torch.float64) + chosen.T @ chosen / len(flat)


def blocks_of(pattern, shape, together):
    """Lists of units, each a list of flat places, that share a Fisher block: so many side by side in a grid row."""
    down, across = pattern.grid(shape)
    unit = pattern.expand(torch.arange(down * across).view(down, across), shape).reshape(-1)
    for row in range(down):
        for start in range(0, across, together):
            columns = range(start, min(across, start + together))
            yield [(row, col, (unit == row * across + col).nonzero().flatten()) for col in columns]


PATTERNS = {
    "single": (sp.Unstructured(), 4, 4),
    "all": (sp.Unstructured(), 1000, 10),
    "n:m": (sp.NM(2, 4), 5, 5),
    "blocks": (sp.Block(2, 2), 8, 2),
    "edges": (sp.Block(4, 3), 24, 2),
    "large": (sp.Block(3, 4), 36, 3),
    "lonely": (sp.Block(4, 4), 1, 1),
    "rows": (sp.Neuron(), 1024, 1),
}


@pytest.mark.parametrize("case", PATTERNS)
def test_costs_are_those_of_an_explicit_inverse(case):
    pattern, size, together = PATTERNS[case]
    weight, gradients = problem()
    expected = torch.zeros(pattern.grid((6, 10)))
    for block in blocks_of(pattern, (6, 10), together):
        places = torch.cat([unit for _, _, unit in block])
        inverse = fisher_of(gradients, places).inverse()
        for row, col, unit in block:
            inside = torch.isin(places, unit).nonzero().flatten()
            w = weight.flatten()[places[inside]].double()
            expected[row, col] = w @ inverse[inside][:, inside].inverse() @ w / 2 / len(unit)
    assert torch.allclose(removal_costs(weight, gradients, pattern, size, DAMPING), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", PATTERNS)
def test_the_update_is_that_of_an_explicit_inverse(case):
    pattern, size, together = PATTERNS[case]
    weight, gradients = problem()
    topology = torch.rand(pattern.grid((6, 10)), generator=torch.Generator().manual_seed(5)) < 0.5
    expected = weight.clone().flatten()
    for block in blocks_of(pattern, (6, 10), together):
        places = torch.cat([unit for _, _, unit in block])
        gone = torch.cat([torch.full((len(unit),), not topology[row, col]) for row, col, unit in block])
        inverse, w = fisher_of(gradients, places).inverse(), weight.flatten()[places].double()
        # optimal brain surgeon: w - F^-1[:, Q] ([F^-1]_QQ)^-1 w_Q
        moved = w - inverse[:, gone] @ torch.linalg.solve(inverse[gone][:, gone], w[gone])
        expected[places] = torch.where(gone, 0.0, moved).float()
    found = compensated(weight, gradients, topology, pattern, size, DAMPING)
    assert torch.allclose(found.flatten(), expected, rtol=1e-4, atol=1e-6)
    assert not found[~pattern.expand(topology, (6, 10))].any()


def test_one_weight_a_block_is_the_diagonal_score():
    weight, gradients = problem()
    costs = removal_costs(weight, gradients, sp.Unstructured(), 1, 1e-9)
    assert torch.allclose(costs, weight.square() * gradients.square().mean(0) / 2, rtol=1e-4)


def test_a_layer_without_gradients_is_ordered_by_magnitude_and_not_moved():
    weight, gradients = problem()
    costs = removal_costs(weight, torch.zeros_like(gradients), sp.Unstructured())
    assert torch.equal(costs.flatten().argsort(), weight.abs().flatten().argsort())
    topology = weight > 0
    assert torch.equal(compensated(weight, 0 * gradients, topology, sp.Unstructured()), weight * topology)


def regression():
    """A linear layer that was fitted to correlated inputs: its loss is a quadratic form."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 12, generator=generator) @ torch.randn(12, 12, generator=generator)
    y = x @ torch.randn(12, 8, generator=generator) + 0.3 * torch.randn(512, 8, generator=generator)
    model = nn.Sequential(nn.Linear(12, 8, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    return model, x, y


@pytest.mark.parametrize(
    ("pattern", "storage"),
    [(sp.Unstructured(), "masked"), (sp.Block(2, 2), "compact"), (sp.Block(2, 2), "masked"), (sp.NM(2, 4), "masked")],
    ids=["single", "compact", "masked", "n:m"],
)
def test_on_a_quadratic_problem_less_is_lost_than_by_magnitude(pattern, storage):
    lost = {}
    for name, score in {
        "magnitude": sp.magnitude,
        "removed": sp.SecondOrder(size=48, update=False),
        "updated": sp.SecondOrder(size=48),
    }.items():
        model, x, y = regression()
        data = [(x[i : i + 1], y[i : i + 1]) for i in range(256)]
        table = sp.prune(
            model,
            pattern,
            0.5,
            score=score,
            data=data,
            loss=lambda model, batch: (model(batch[0]) - batch[1]).square().sum(),
            storage=storage,
        )
        assert table.density == 0.5
        lost[name] = float((model(x).detach() - y).square().sum(1).mean())
    assert lost["updated"] < lost["removed"]
    assert lost["updated"] < 0.8 * lost["magnitude"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size: expected at least 1"),
        ({"damping": 0.0}, "damping: expected"),
        ({"damping": torch.inf}, "got inf"),
    ],
    ids=["size", "damping", "infinite"],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        sp.SecondOrder(**settings)


def loss(model, batch):
    return model(batch).square().mean()


def test_gradients_that_would_not_fit_are_refused_with_the_number_that_would():
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(ValueError, match=r"got 8 batches of 256 weights, .* GiB. Give 4 batches"):
        sp.prune(
            model,
            sp.Unstructured(),
            0.5,
            score=sp.SecondOrder(memory_bytes=4096),
            data=[torch.ones(1, 16)] * 8,
            loss=loss,
        )


def test_it_says_what_it_needs():
    with pytest.raises(ValueError, match="SecondOrder: expected calibration batches"):
        sp.prune(nn.Sequential(nn.Linear(16, 16)), sp.Unstructured(), 0.5, score=sp.SecondOrder())
    with pytest.raises(ValueError, match="0: expected costs of removal"):
        sp.sparsify(nn.Sequential(nn.Linear(16, 16)), sp.Unstructured(), 0.5, score=sp.SecondOrder())
