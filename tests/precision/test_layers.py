"""Layers that have formats of their own: they stay the objects that they were, and go back to what they were."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import sparsam as sp
from sparsam.kernels.format_linear import format_linear
from sparsam.kernels.formats import FP8, PRODUCT_FORMATS, Products
from sparsam.precision.layers import FormatLinear, format_layers, multiplies_blocks, restore_layers
from sparsam.sparse.masked import add_topology, masked_weights

LOW = Products(FP8, FP8, FP8)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_in_its_formats_or_as_before(bias):
    model, x = nn.Sequential(nn.Linear(40, 24, bias=bias)), torch.randn(3, 5, 40)
    before = model(x)
    layer = format_layers(model)["0"]
    assert torch.equal(model(x), before)
    for format in PRODUCT_FORMATS:
        layer.formats = Products(format, format, format)
        assert torch.equal(model(x), format_linear(x, layer.weight, layer.bias, layer.formats))
    restore_layers([layer])
    assert torch.equal(model(x), before)


def test_it_is_the_same_object_with_the_same_names_and_hooks():
    model, calls = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), sp.ActivatedLinear(6, 4)), []
    modules, parameters, names = list(model.modules()), list(model.parameters()), list(model.state_dict())
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    layers = format_layers(model)
    assert layers == {"0": model[0], "2": model[2]}
    assert [type(one) for one in layers.values()] == [FormatLinear, sp.ActivatedLinear]
    for layer in layers.values():
        layer.formats = LOW
    model(torch.ones(1, 8))
    assert calls == ["hook"]
    for old, new in ((modules, model.modules()), (parameters, model.parameters())):
        assert all(one is other for one, other in zip(old, new, strict=True))
    assert list(model.state_dict()) == names
    restore_layers(layers.values())
    assert type(model[0]) is nn.Linear
    assert "formats" not in {*vars(model[0]), *vars(model[2])}
    assert model[2].formats is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_copies_keep_their_formats(copied):
    model, x = nn.Sequential(nn.Linear(8, 6)), torch.randn(2, 8)
    format_layers(model)["0"].formats = LOW
    other = copied(model)
    assert other[0].formats == LOW
    assert torch.equal(other(x), model(x))


def test_a_masked_layer_stays_masked():
    model = nn.Sequential(nn.Linear(8, 6))
    buffer = add_topology(model[0], "weight", torch.rand(6, 8) < 0.5, sp.Unstructured())
    format_layers(model)["0"].formats = LOW
    model(torch.ones(2, 8)).sum().backward()
    buffer.apply(model[0].weight.grad)
    assert [one.topology is buffer.topology for one in masked_weights(model[0])] == [True]
    assert not model[0].weight.grad[~buffer.active].any()


def test_layers_that_compute_in_a_way_of_their_own_are_left_alone():
    class Other(nn.Linear):
        def forward(self, x):
            return -super().forward(x)

    replaced, compiled = nn.Linear(4, 4), nn.Linear(4, 4)
    replaced.forward = torch.neg
    compiled._compiled_call_impl = compiled.forward  # what nn.Module.compile sets
    model = nn.Sequential(Other(4, 4), replaced, compiled, nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)))
    types = [type(module) for module in model]
    assert format_layers(model) == {}
    assert [type(module) for module in model] == types


def test_who_multiplies_blocks():
    topology = torch.ones(2, 2, dtype=torch.bool)
    for product in ("kernel", "dense"):
        sparse = sp.SparseLinear.from_dense(nn.Linear(8, 8), topology, sp.Block(4, 4), product=product)
        assert multiplies_blocks(sparse) == (product == "kernel")
        assert list(format_layers(nn.Sequential(sparse))) == ["0"]
    assert not multiplies_blocks(nn.Linear(8, 8))
