"""Both storages behind one interface: the same grid and scores, and names that no wrapper changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsam import Block, Unstructured, sparsify
from sparsam.sparse.weights import sparse_weights


def both(shape=(3, 8), density=0.6, pattern=Block(2, 3)):  # noqa: B008 (a value)
    """The same layer in compact and in masked storage."""
    dense = nn.Linear(shape[1], shape[0])
    weights = []
    for storage in ("compact", "masked"):
        model = nn.Sequential(nn.Linear(shape[1], shape[0]))
        model.load_state_dict({f"0.{name}": tensor for name, tensor in dense.state_dict().items()})
        sparsify(model, pattern, density, storage=storage)
        (weight,) = sparse_weights(model).values()
        weights.append((model, weight))
    return weights


def test_both_storages_agree():
    (_, compact), (_, masked) = both()
    assert compact.dense_shape == masked.dense_shape == (3, 8)
    assert torch.equal(compact.topology, masked.topology)
    assert torch.equal(compact.layer.weight, masked.parameter)
    torch.testing.assert_close(
        compact.reduce(compact.parameter.detach().abs()), masked.reduce(masked.parameter.detach().abs())
    )


def test_padding_and_dead_slots_are_no_entries():
    """3 x 8 in blocks of 2 x 3: the corner block holds one row of two, and two columns of three."""
    model = nn.Sequential(nn.Linear(8, 3))
    sparsify(model, Block(2, 3), 0.99, headroom=1.0)
    model[0].rewire(torch.tensor([[True, False, False], [False, False, True]]))
    (weight,) = sparse_weights(model).values()
    active = weight.active.expand_as(weight.parameter)
    whole, corner = (
        int(((weight.layer.block_row == row) & (weight.layer.block_col == col)).nonzero())
        for row, col in ((0, 0), (1, 2))
    )
    assert active[whole].all()
    assert active[corner].tolist() == [[True, True, False], [False] * 3]
    assert active.sum() == 8


def test_a_rewire_is_an_event_that_says_what_moved():
    for _, weight in both():
        before = weight.topology.clone()
        after = before.roll(1, 1)
        event = weight.apply(after)
        assert (event.layer, event.module, event.parameter) == ("0", weight.module, weight.parameter)
        assert torch.equal(event.topology, after)
        assert torch.equal(event.grown, after & ~before)
        assert torch.equal(event.dropped, before & ~after)
        assert not weight.parameter[event.new_entries.expand_as(weight.parameter)].any()
        assert weight.apply(after.clone()) is None


@pytest.mark.parametrize("dense", [False, True], ids=["scores", "dense"])
def test_both_collect_the_gradient_of_units_that_do_not_exist(dense):
    found = []
    x, target = torch.randn(7, 8), torch.randn(7, 3)
    for model, weight in both():
        weight.open_probe(dense)
        (model(x) - target).square().mean().backward()
        collected = weight.close_probe()
        if tuple(collected.shape) == weight.dense_shape:
            collected = weight.pattern.reduce(collected.abs())
        found.append(collected)
    torch.testing.assert_close(*found)
    assert found[0].all()


def test_no_backward_is_a_gradient_of_zero_and_no_probe_is_none():
    for _, weight in both():
        weight.open_probe(dense=True)
        assert weight.close_probe().tolist() == torch.zeros(3, 8).tolist()
    (_, compact), _ = both()
    assert compact.close_probe() is None


def test_a_probe_is_replaced_only_while_it_is_empty():
    (model, weight), _ = both()
    weight.open_probe(dense=True)
    weight.open_probe(dense=False)
    assert weight.layer.probe.shape == weight.layer.grid
    model(torch.ones(1, 8)).sum().backward()
    weight.open_probe(dense=True)
    assert weight.layer.probe.shape == weight.layer.grid


def test_a_probe_is_float32_whatever_the_programs_default():
    torch.set_default_dtype(torch.float64)
    (_, weight), _ = both()
    weight.open_probe(dense=False)
    assert weight.layer.probe.dtype == torch.float32


def test_names_are_those_of_the_plain_model():
    """Random numbers depend on names: a wrapper must not change which units grow, nor whether a state can be loaded."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))
    sparsify(model, Unstructured(), 0.5, include=["0.*"])
    sparsify(model, Block(2, 2), 0.5, include=["1"])
    assert list(sparse_weights(model)) == ["0.0", "1"]
    inside = nn.Sequential(torch.compile(model[0], backend="eager"), model[1])
    assert list(sparse_weights(torch.compile(model, backend="eager"))) == list(sparse_weights(inside)) == ["0.0", "1"]


def test_one_layer_under_two_names_is_one_weight():
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    sparsify(model, Block(2, 2), 0.5)
    (weight,) = sparse_weights(model).values()
    assert weight.shared


@pytest.mark.parametrize("topology", [torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 3)])
def test_a_topology_that_does_not_fit_is_refused(topology):
    for _, weight in both():
        with pytest.raises(ValueError, match=r"0: expected a bool topology of \(2, 3\) from the method, got torch"):
            weight.apply(topology)
