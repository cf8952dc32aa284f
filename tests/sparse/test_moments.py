"""Optimiser state through a rewire and through a change of storage, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsam.sparse.moments import RetainedMoments, check_optimizer, moments, reset_moments, swap_parameter


def stepped(kind, size=4, **options):
    parameter = nn.Parameter(torch.ones(size))
    optimizer = kind([parameter], **options)
    parameter.grad = torch.arange(1.0, size + 1)
    optimizer.step()
    return parameter, optimizer


NEW, ACTIVE = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, True])


def test_adam_by_hand():
    """A new entry takes the others' mean second moment and no first one; what is inactive has neither."""
    parameter, optimizer = stepped(torch.optim.Adam, betas=(0.5, 0.75))
    reset_moments(optimizer, parameter, NEW, ACTIVE)
    state = optimizer.state[parameter]
    assert state["exp_avg"].tolist() == [0.0, 0.0, 1.5, 2.0]
    assert state["exp_avg_sq"].tolist() == [(9 + 16) / 8, 0.0, 9 / 4, 4.0]
    assert state["step"] == 1


def test_without_older_entries_everything_is_zero():
    parameter, optimizer = stepped(torch.optim.Adam)
    reset_moments(optimizer, parameter, torch.ones(4, dtype=torch.bool))
    assert not any(value.any() for value in moments(optimizer, parameter).values())


def test_sgd_momentum_begins_at_zero():
    parameter, optimizer = stepped(torch.optim.SGD, momentum=0.9)
    reset_moments(optimizer, parameter, NEW, ACTIVE)
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [0.0, 0.0, 3.0, 4.0]


def test_an_optimiser_without_state_is_fine():
    parameter, optimizer = stepped(torch.optim.SGD)
    assert moments(optimizer, parameter) == {}
    reset_moments(optimizer, parameter, NEW)


def test_first_step_of_a_fresh_adam_entry_is_no_longer_than_others():
    """With zero moments at step 1000 it would be about 3 lr."""
    parameter, optimizer = stepped(torch.optim.Adam, lr=1.0)
    for _ in range(1000):
        parameter.grad = torch.ones(4)
        optimizer.step()
    reset_moments(optimizer, parameter, torch.tensor([True, False, False, False]))
    before = parameter.detach().clone()
    optimizer.step()
    lengths = (before - parameter.detach()).tolist()
    assert 0 < lengths[0] < 1.01 * lengths[1]


def test_a_parameter_takes_the_place_of_another():
    parameter, optimizer = stepped(torch.optim.Adam, size=4)
    other = nn.Parameter(torch.zeros(2))
    first = optimizer.state[parameter]["exp_avg"][::2].clone()
    swap_parameter(optimizer, parameter, other, lambda entries: entries[::2])
    assert optimizer.param_groups[0]["params"] == [other]
    assert list(optimizer.state) == [other]
    assert torch.equal(optimizer.state[other]["exp_avg"], first)
    assert optimizer.state[other]["step"] == 1
    other.grad = torch.ones(2)
    optimizer.step()
    assert other.all()


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon])
def test_optimisers_that_read_the_matrix_are_refused_by_name(kind):
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(ValueError, match=f"{kind.__name__}: expected an element-wise optimiser"):
        check_optimizer(optimizer)


def test_state_of_another_shape_is_refused():
    """One number per row, say: which weight it belongs to after a rewire is unknown."""
    parameter, optimizer = stepped(torch.optim.SGD, momentum=0.9)
    optimizer.state[parameter]["rows"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"SGD: expected state 'rows' of shape \(4,\), got \(2,\)"):
        moments(optimizer, parameter)


def test_what_was_loaded_follows_the_moments_to_their_device():
    """A checkpoint is read to the CPU; meta stands in for a GPU."""
    kept, units = RetainedMoments(), torch.ones(3, dtype=torch.bool, device="meta")
    kept.load_state_dict({"a": {"exp_avg": torch.zeros(3)}, "b": {"exp_avg": torch.zeros(3)}})
    kept.give_back("a", {"exp_avg": torch.zeros(3, device="meta")}, units)
    kept.put_aside("b", {"exp_avg": torch.zeros(3, device="meta")}, units)
    assert kept.state_dict()["b"]["exp_avg"].is_meta


def test_what_was_put_aside_is_given_back_and_nothing_else():
    retained = RetainedMoments()
    moments = {"exp_avg": torch.tensor([1.0, 2.0, 3.0])}
    retained.put_aside("a", moments, torch.tensor([True, True, False]))
    moments["exp_avg"].zero_()
    other = RetainedMoments()
    other.load_state_dict(retained.state_dict())
    other.give_back("a", moments, torch.tensor([False, True, True]))
    assert moments["exp_avg"].tolist() == [0.0, 2.0, 0.0]  # the third was never dropped
    other.give_back("unknown", moments, torch.ones(3, dtype=torch.bool))
    assert moments["exp_avg"].tolist() == [0.0, 2.0, 0.0]
