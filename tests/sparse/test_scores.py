"""Scores by hand, the same in compact and in masked storage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsam import Block, LayerView, gradient, magnitude, random, sparsify
from sparsam.sparse.weights import sparse_weights

WEIGHT = torch.tensor([[1.0, -3.0, 5.0, 0.0], [-5.0, 7.0, 7.0, 0.0], [0.0, 0.0, -8.0, 0.0]])


def view(storage, growth=None, step=100):
    """3 x 4 in blocks of 2 x 2: the last block row is cut; the block of zeros at its left is inactive."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(WEIGHT)
    sparsify(model, Block(2, 2), 0.75, storage=storage)
    (weight,) = sparse_weights(model).values()
    return LayerView(
        "0", weight.pattern, weight.topology, weight.parameter.detach(), None, {}, weight.reduce, 0, step, growth
    )


@pytest.mark.parametrize("storage", ["compact", "masked"])
def test_magnitude_is_the_mean_over_what_lies_inside(storage):
    seen = view(storage)
    assert seen.topology.tolist() == [[True, True], [False, True]]
    assert magnitude(seen).tolist() == [[4.0, 3.0], [0.0, 4.0]]


def test_random_depends_on_the_step_and_not_on_the_storage():
    assert torch.equal(random(view("compact")), random(view("masked")))
    assert not torch.equal(random(view("compact")), random(view("compact", step=200)))
    assert not torch.equal(random(view("compact")), view("compact").random("drop"))


def test_gradient_is_what_was_collected():
    growth = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert gradient(view("compact", growth)) is growth


def test_without_a_gradient_it_says_what_to_do():
    with pytest.raises(ValueError, match=r"0: expected a dense gradient at step 100, got none.*needs_gradient"):
        gradient(view("compact"))
