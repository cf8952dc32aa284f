"""Masked storage: a topology beside the weight, that any copy of the module carries along."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from sparsam import Block, Unstructured
from sparsam.sparse.masked import add_topology, masked_weights, remove_topology

TOPOLOGY = torch.tensor([[True, False], [False, True]])


def made(pattern=Unstructured()):  # noqa: B008 (a value)
    module = nn.Linear(2, 2) if pattern == Unstructured() else nn.Linear(4, 4)
    return module, add_topology(module, "weight", TOPOLOGY.clone(), pattern)


@pytest.mark.parametrize("pattern", [Unstructured(), Block(2, 2)], ids=str)
def test_inactive_weights_are_zero_and_others_stay(pattern):
    module, buffer = made(pattern)
    active = pattern.expand(TOPOLOGY, module.weight.shape)
    assert torch.equal(buffer.active, active)
    assert torch.equal(module.weight != 0, active)
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    assert list(module.state_dict()) == ["weight", "bias", "weight_topology"]


def test_zeros_also_replace_what_is_not_a_number():
    _, buffer = made()
    gradient = torch.full((2, 2), float("nan"))
    buffer.apply(gradient)
    assert gradient.isnan().tolist() == TOPOLOGY.tolist()
    buffer.apply(None)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_knows_its_own_topology(copied):
    module, _ = made()
    module(torch.ones(1, 2)).sum().backward()
    (other,) = masked_weights(copied(module))
    assert other.module is not module
    assert other.pattern == Unstructured()
    other.topology.fill_(True)
    assert torch.equal(module.weight_topology, TOPOLOGY)


def test_it_is_taken_away_without_a_trace():
    plain = nn.Linear(2, 2)
    module, _ = made()
    remove_topology(module, "weight")
    assert masked_weights(module) == []
    assert module.__dict__.keys() == plain.__dict__.keys()
    assert list(module.state_dict()) == list(plain.state_dict())


def test_types_and_devices_change_the_weight_and_leave_the_topology_bool():
    module, buffer = made()
    module.half()
    assert (buffer.parameter.dtype, buffer.topology.dtype) == (torch.float16, torch.bool)
    module.to("meta")
    assert buffer.topology.device.type == buffer.active.device.type == "meta"
