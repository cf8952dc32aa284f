"""Models without some neurons against the same models with those neurons' outputs multiplied by zero."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsam as sp
from sparsam.tasks.gpt import GPT

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def loss(model, batch):
    return model(batch).square().mean()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10), nn.Dropout(0.1), nn.Linear(10, 3)
    )


def images():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 6, 3),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.out = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.out(x + self.down(torch.relu(self.up(x))))


@pytest.mark.parametrize(
    "score",
    [sp.magnitude, sp.taylor, sp.fisher, sp.gradient, sp.SecondOrder(update=False)],
    ids=["magnitude", "taylor", "fisher", "gradient", "second_order"],
)
def test_what_is_left_computes_what_it_did(score):
    model, whole = mlp().eval(), mlp().eval()
    rows = sp.remove_neurons(model, 0.5, score=score, data=[X[:3], X[3:]], loss=loss)
    assert [(row.name, row.before, row.after, row.reader) for row in rows] == [
        ("0", 12, 6, "3"),
        ("3", 10, 5, "5"),
        ("5", 3, 3, ""),
    ]
    assert rows[2].reason == "has outputs that are the model's"
    assert (model[0].out_features, model[1].num_features, model[3].in_features) == (6, 6, 6)
    assert sum(one.numel() for one in model.parameters()) < 0.5 * sum(one.numel() for one in whole.parameters())
    with torch.no_grad():
        for layer, reader in ((0, 3), (3, 5)):
            stays = (whole[layer].bias[:, None] == model[layer].bias).any(1)
            whole[reader].weight[:, ~stays] = 0
        assert torch.allclose(model(X), whole(X), atol=1e-6)


def test_channels_go_with_their_batch_norms():
    model, whole, x = images().eval(), images().eval(), torch.randn(2, 2, 8, 8)
    rows = sp.remove_neurons(model, 0.25)
    assert [(row.name, row.after) for row in rows] == [("0", 2), ("4", 6), ("6", 3)]
    assert rows[1].reason == "has outputs that go into 5, a Flatten"
    assert model[1].running_mean.shape == (2,)
    with torch.no_grad():
        stays = (whole[0].bias[:, None] == model[0].bias).any(1)
        whole[4].weight[:, ~stays] = 0
        assert torch.allclose(model(x), whole(x), atol=1e-6)


def test_the_optimiser_goes_on_with_what_stays():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for turn in range(2):
        loss(model, X).backward()
        optimizer.step()
        if turn:
            break
        before = optimizer.state[model[3].weight]["exp_avg"].clone()
        biases = [model[layer].bias.detach().clone() for layer in (0, 3)]
        sp.remove_neurons(model, 0.5, optimizer=optimizer)
        kept = [(old[:, None] == model[layer].bias).any(1) for old, layer in zip(biases, (0, 3), strict=True)]
        assert torch.equal(optimizer.state[model[3].weight]["exp_avg"], before[kept[1]][:, kept[0]])
        assert model[3].weight.grad.shape == model[3].weight.shape
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters()}
    assert set(optimizer.state) == set(model.parameters())


def test_what_a_residual_adds_stays():
    model = Residual()
    rows = sp.remove_neurons(model, 0.5)
    assert [row.after for row in rows] == [6, 8, 2]
    assert rows[1].reason == "has outputs that go into add"


@pytest.mark.parametrize(
    ("reader", "reason"),
    [
        (nn.Conv2d(8, 8, 3, groups=2), "is read by 1, which is a convolution in groups"),
        (nn.Softmax(1), "has outputs that go into 1, a Softmax"),
        (nn.Linear(6, 2), "has outputs that go into 1, a Linear"),
    ],
    ids=["groups", "softmax", "linear"],
)
def test_a_reader_that_mixes_neurons_keeps_them(reader, reason):
    model = nn.Sequential(nn.Conv2d(2, 8, 3), reader, mlp())
    assert sp.remove_neurons(model, 0.5)[0].reason == reason
    assert model[0].out_channels == 8


def test_pairs_of_a_model_that_cannot_be_traced():
    model = GPT(layers=2, width=16, heads=2, context=8, vocabulary=11)
    pairs = {f"blocks.{layer}.up": f"blocks.{layer}.down" for layer in range(2)}
    rows = sp.remove_neurons(model, 0.25, pairs=pairs, exclude=["blocks.1.up"])
    assert {row.name: row.after for row in rows if row.reader} == {"blocks.0.up": 16}
    assert model(torch.zeros(1, 8, dtype=torch.long)).shape == (1, 8, 11)


def sparse():
    model = mlp()
    sp.sparsify(model, sp.Unstructured(), 0.5)
    return model


def untraceable():
    return GPT(layers=1, width=16, heads=2, context=8, vocabulary=11)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (mlp, {"score": sp.SecondOrder()}, "expected a score that moves no weights"),
        (mlp, {"include": ["5"]}, "5: expected a layer whose neurons can go, but it has outputs that are the model's"),
        (mlp, {"exclude": ["0", "3"]}, "no layer has neurons that can go"),
        (mlp, {"density": 0}, "density: expected"),
        (mlp, {"pairs": {"0": "9"}}, "pairs: expected names of linear layers or convolutions, got '9'"),
        (mlp, {"pairs": {"0": "5"}}, "pairs: expected a 5 that reads 0's 12 outputs, got one of 10 inputs"),
        (mlp, {"pairs": {"0": "3", "3": "3"}}, "pairs: expected a 3 that reads"),
        (sparse, {"pairs": {"0": "3"}}, "pairs: 0 is sparse already"),
        (sparse, {}, "no layer has neurons that can go .0 is sparse already"),
        (untraceable, {}, "expected a model that torch.fx can trace"),
    ],
    ids=["update", "named", "none", "density", "pairs", "sizes", "twice", "sparse_pair", "sparse", "trace"],
)
def test_what_cannot_be_is_refused_and_nothing_changes(make, options, message):
    model = make()
    before = [parameter.shape for parameter in model.parameters()]
    with pytest.raises(ValueError, match=message):
        sp.remove_neurons(model, **{"density": 0.5, **options})
    assert [parameter.shape for parameter in model.parameters()] == before
