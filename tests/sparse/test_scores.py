"""Scores by hand, the same in compact and in masked storage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsam import Block, LayerView, fisher, gradient, magnitude, mest, momentum, movement, random, sparsify, taylor
from sparsam.sparse.scores import accumulators_of
from sparsam.sparse.weights import sparse_weights

WEIGHT = torch.tensor([[1.0, -3.0, 5.0, 0.0], [-5.0, 7.0, 7.0, 0.0], [0.0, 0.0, -8.0, 0.0]])


def view(storage, growth=None, step=100, **also):
    """3 x 4 in blocks of 2 x 2: the last block row is cut; the block of zeros at its left is inactive."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(WEIGHT)
    sparsify(model, Block(2, 2), 0.75, storage=storage)
    (weight,) = sparse_weights(model).values()
    tensors = {
        "weight": weight.parameter.detach(),
        "gradient": None,
        "moments": {},
        "accumulators": {},
    } | {name: entries(weight, tensor) for name, tensor in also.items()}
    return LayerView(
        name="0",
        shape=weight.shape,
        pattern=weight.pattern,
        topology=weight.topology,
        reduce=weight.reduce,
        seed=0,
        step=step,
        growth=growth,
        **tensors,
    )


def entries(weight, dense):
    """A dense tensor as the storage keeps it; a dict of them likewise."""
    if isinstance(dense, dict):
        return {name: entries(weight, tensor) for name, tensor in dense.items()}
    return dense if weight.all_weights else weight.module.gather(dense)


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


GRADIENT = torch.tensor([[2.0, 1.0, 0.0, 4.0], [1.0, -1.0, 2.0, 1.0], [9.0, 9.0, 0.5, 1.0]])


@pytest.mark.parametrize("storage", ["compact", "masked"])
def test_first_and_second_order_by_hand(storage):
    """|w g| and w^2 g^2 / 2, averaged over what lies inside a unit."""
    seen = view(storage, gradient=GRADIENT)
    assert taylor(seen).tolist() == [[(2 + 3 + 5 + 7) / 4, (0 + 0 + 14 + 0) / 4], [0.0, (4 + 0) / 2]]
    weights, gradients = [[4.0, 3.0], [0.0, 4.0]], [[5 / 4, 7 / 4], [0.0, 1.5 / 2]]
    expected = torch.tensor(weights) + 0.01 * torch.tensor(gradients)
    torch.testing.assert_close(mest(seen)[seen.topology], expected[seen.topology])
    squares = GRADIENT.square()
    expected = [[(4 + 9 + 25 + 49) / 8, 14**2 / 8], [0.0, 16 / 4]]
    assert fisher(view(storage, moments={"exp_avg_sq": squares})).tolist() == expected
    assert fisher(view(storage, accumulators={"squared_gradient": squares})).tolist() == expected


@pytest.mark.parametrize("storage", ["compact", "masked"])
def test_what_is_gathered_over_steps_by_hand(storage):
    seen = view(storage)
    gradient = view(storage, gradient=GRADIENT).gradient
    for score, first, second in (
        (momentum, 0.1, 0.19),  # 0.1 g, then 0.9 * 0.1 g + 0.1 g
        (movement, -1.0, -2.0),
    ):
        (accumulator,) = accumulators_of(score)
        total = torch.zeros_like(seen.weight)
        for factor in (first, second):
            accumulator.update(total, seen.weight, gradient)
            expected = factor * gradient * (seen.weight if score is movement else 1.0)
            torch.testing.assert_close(total, expected)
    (accumulator,) = accumulators_of(fisher)
    total = torch.zeros_like(seen.weight)
    accumulator.update(total, seen.weight, gradient)
    torch.testing.assert_close(total, 0.01 * gradient.square())
    assert accumulator.instead_of == "exp_avg_sq"


def test_movement_rewards_weights_that_grow():
    """A weight that the gradient pushes away from zero gets a high score, one pulled to it a low one."""
    weight = torch.ones(3, 4)
    (accumulator,) = accumulators_of(movement)
    total = torch.zeros(3, 4)
    accumulator.update(total, weight, torch.tensor([-1.0, 1.0, 0.0, 0.0]).expand(3, 4))
    seen = view("masked", weight=weight, accumulators={"movement": total})
    assert movement(seen)[0].tolist() == [0.0, 0.0]  # one of each in a block of two columns
    assert total[0].tolist() == [1.0, -1.0, 0.0, 0.0]


def test_scores_without_what_they_need_say_so():
    with pytest.raises(ValueError, match=r"0: expected a gradient for the MEST score, got none.*or use magnitude"):
        mest(view("masked"))
    with pytest.raises(ValueError, match=r"0: expected a gradient for the Taylor score, got none. Run a backward"):
        taylor(view("masked"))
    with pytest.raises(ValueError, match=r"0: expected squared gradients for the Fisher score, got none.*in a method"):
        fisher(view("masked"))
