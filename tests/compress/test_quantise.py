"""Quantised layers: codes one can check by hand, zeros that stay zeros, and what stays as it is."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import sparsam as sp
from sparsam.compress.layers import GroupQuantisedLinear, QuantisedLinear, QuantisedSparseLinear, pack_int4, unpack_int4
from sparsam.compress.quantise import quantise
from sparsam.sparse.layers import ActivatedLinear, SparseLinear


def mlp(inputs=48, hidden=64, outputs=10):
    return nn.Sequential(ActivatedLinear(inputs, hidden, activation="gelu"), nn.Linear(hidden, outputs))


BLOCK = sp.Block(16, 16)


def sparse_mlp(pattern=BLOCK, storage="auto", **shape):
    model = mlp(**shape)
    sp.sparsify(model, pattern, 0.4, storage=storage, include=["0"])
    return model


def one(weight, bias=False):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias).to(weight.dtype)
    layer.weight.data = weight
    return nn.Sequential(layer)


def test_codes_by_hand():
    model = one(torch.tensor([[1.0, -2.0, 0.0, 127 / 128], [0.5, 0.25, 0.125, 0.0]]))
    assert quantise(model) == {"0": "int8"}
    layer = model[0]
    assert layer.values.tolist() == [[64, -127, 0, 63], [127, 64, 32, 0]]  # 63.5 and 63.0, ties to even
    assert layer.scale.tolist() == pytest.approx([2 / 127, 0.5 / 127])
    assert list(model.parameters()) == []


def test_the_output_is_near_and_the_weight_within_half_a_quantum():
    model = mlp()
    dense, x = copy.deepcopy(model), torch.randn(5, 48)
    quantise(model)
    for quantised, layer in zip(model, dense, strict=True):
        error = (quantised.weight - layer.weight).abs()
        assert bool((error <= quantised.scale[:, None] * 0.5001).all())
    torch.testing.assert_close(model(x), dense(x).detach(), rtol=0.05, atol=0.03)


@pytest.mark.parametrize("storage", ["compact", "masked"])
def test_blocks_are_those_of_the_dense_weight(storage):
    model = sparse_mlp(storage=storage, inputs=50)  # padded at the edge
    dense = copy.deepcopy(model)
    sp.densify(dense)
    assert quantise(model) == {"0": "int8 blocks", "1": "int8"}
    quantise(dense)
    layer = model[0]
    assert isinstance(layer, QuantisedSparseLinear)
    assert torch.equal(layer.scale, dense[0].scale)
    assert torch.equal(layer.weight, dense[0].weight)
    assert int((layer.weight != 0).sum()) <= int(layer.topology.sum()) * 256
    x = torch.randn(3, 50)
    assert torch.equal(model(x), dense(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_frozen_blocks_run_on_the_kernels_and_give_the_same(dtype):
    model = sparse_mlp(inputs=50)
    quantise(model)
    layer, x = model[0], torch.randn(3, 50).to(dtype)
    with torch.no_grad():
        plain, whole = layer(x), model(x)
        sp.freeze(model)
        assert layer._pack is not None
        near = {"rtol": 2**-7, "atol": 1e-5} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(layer(x), plain, **near)
        torch.testing.assert_close(
            model(x), whole, rtol=0.02, atol=0.01
        )  # a code of the next layer may round elsewhere
        assert layer(x.double()).dtype == torch.float64  # plain PyTorch
        assert copy.deepcopy(layer)._pack is None
        # other codes are laid out anew, and training mode goes back to plain PyTorch
        layer.load_state_dict({**layer.state_dict(), "values": torch.zeros_like(layer.values)})
        assert not (layer(x) - layer(torch.zeros_like(x))).any()
        assert model.train()[0]._pack is None
        sp.freeze(model)
        sp.unfreeze(model)
        assert layer._pack is None


@pytest.mark.parametrize("pattern", [sp.Unstructured(), sp.NM(2, 4), sp.Neuron()], ids=str)
def test_masked_zeros_are_exactly_zero(pattern):
    model = mlp()
    sp.sparsify(model, pattern, 0.5, include=["0"])
    active = sp.Session(model, torch.optim.SGD(model.parameters(), 0.1)).model[0].weight_topology
    with torch.no_grad():
        model[0].weight.add_(1.0)  # a load or another's code wrote where there is no unit
    zeros = ~pattern.expand(active, (64, 48))
    quantise(model)
    assert bool((model[0].values[zeros] == 0).all())
    assert bool((model[0].scale > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_channel_of_zeros_and_a_tiny_one(dtype):
    """Q3: no scale is zero, nothing is NaN, and what is tiny is kept."""
    weight = torch.randn(4, 16).to(dtype)
    weight[1], weight[2] = 0.0, 1e-6
    model = one(weight.clone())
    quantise(model)
    scale = model[0].scale
    assert scale.dtype == torch.float32
    assert bool((scale > 0).all() & scale.isfinite().all())
    assert bool((model[0].values[1] == 0).all())
    assert model[0].weight[2].tolist() == pytest.approx(weight[2].tolist(), rel=1e-4)
    y = model(torch.randn(3, 16).to(dtype))
    assert y.dtype == dtype
    assert bool(y.isfinite().all() & (y[:, 1] == 0).all())


def test_a_row_alone_and_in_a_batch_is_the_same():
    """Q6."""
    model = sparse_mlp()
    quantise(model)
    x = torch.randn(8, 48) * torch.logspace(-3, 3, 8)[:, None]
    assert torch.equal(torch.cat([model(row[None]) for row in x]), model(x))
    assert model(x.view(2, 4, 48)).shape == (2, 4, 10)
    assert model(x[:0]).shape == (0, 10)


def test_scales_keep_their_type():
    model = sparse_mlp()
    quantise(model, input_scales={"1": 0.05})
    quantised = copy.deepcopy(model)
    model.bfloat16()
    assert model[0].scale.dtype == torch.float32
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, quantised.state_dict()[name])
    assert model(torch.randn(2, 48).bfloat16()).dtype == torch.bfloat16
    assert "input_scale=0.05" in repr(model)


def test_int4_packing():
    codes = torch.tensor([[-8, 7, 0, -1]], dtype=torch.int8)
    assert pack_int4(codes).tolist() == [[0xF0, 0x78]]
    assert torch.equal(unpack_int4(pack_int4(codes)), codes)


@pytest.mark.parametrize("pattern", [None, sp.Block(16, 16)], ids=str)
def test_int4_in_groups(pattern):
    model = mlp(outputs=16) if pattern is None else sparse_mlp(pattern, outputs=16)
    dense, x = copy.deepcopy(model), torch.randn(5, 48)
    done = quantise(model, "int4", group=16)
    assert done == {"0": "int4" if pattern is None else "int4 blocks", "1": "int4"}
    for layer, before in zip(model, dense, strict=True):
        assert isinstance(layer, GroupQuantisedLinear)
        assert layer.packed.numel() == layer.scale.numel() * 8
        weight = before.weight.detach()
        assert torch.equal((layer.weight == 0) | (weight != 0), torch.ones_like(weight, dtype=torch.bool))
        # half a quantum of the group's own scale, and what bfloat16 takes off the largest
        amax = weight.view(len(weight), -1, 16).abs().amax(-1, keepdim=True).expand(-1, -1, 16).reshape(weight.shape)
        assert bool(((layer.weight - weight).abs() <= amax / 7 * 0.53 + 1e-9).all())
        assert bool((layer.scale > 0).all())
    torch.testing.assert_close(model(x), dense(x).detach(), rtol=0.1, atol=0.2)
    assert model(x.bfloat16()).dtype == torch.bfloat16


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head, self.fc = nn.Embedding(9, 16), nn.Linear(16, 9, bias=False), nn.Linear(16, 16)
        self.attention, self.odd = nn.MultiheadAttention(16, 2), type("Odd", (nn.Linear,), {})(16, 16)
        self.head.weight = self.tokens.weight


def test_what_stays_and_why():
    model = Tied()
    done = quantise(model)
    assert done["fc"] == "int8"
    assert done["head"] == "tied with another layer"
    assert done["odd"] == "a subclass of nn.Linear (Odd)"
    assert done["attention.out_proj"].startswith("a subclass of nn.Linear")
    assert isinstance(model.fc, QuantisedLinear)
    assert model.head.weight is model.tokens.weight


def test_globs_leave_layers_out():
    model = mlp()
    assert quantise(model, exclude=["1"]) == {"0": "int8", "1": "left out"}
    assert type(model[1]) is nn.Linear


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, {"weights": "int2"}, "expected weights of 'int8' or 'int4', got 'int2'"),
        (None, {"weights": "int4", "group": 32}, "0: int4: expected an even group size that divides 48"),
        (None, {"weights": "int4", "group": 3}, "got 3. Set group=2 or exclude the layer."),
        (None, {"weights": "int4", "group": 16, "input_scales": {"0": 1.0}}, "expected no input_scales for int4"),
        (None, {"input_scales": {"2": 1.0}}, "input_scales: expected those of linear layers, got '2'"),
        (None, {"input_scales": {"0": 0.0}}, "0: expected an input scale above zero, got 0.0"),
        (None, {"include": []}, "no linear layer to quantise"),
        (float("nan"), {}, "0: expected finite weights, got 1 that are not"),
        (float("inf"), {}, "0: expected finite weights, got 1 that are not"),
    ],
    ids=str,
)
def test_what_is_refused_changes_nothing(change, options, message):
    model = mlp()
    if change is not None:
        model[0].weight.data[0, 0] = change
    with pytest.raises(ValueError, match=message):
        quantise(model, **options)
    assert type(model[0]) is ActivatedLinear
    assert type(model[1]) is nn.Linear


def test_a_layer_itself_or_one_in_training_is_refused():
    with pytest.raises(ValueError, match="Put it into nn"):
        quantise(nn.Linear(4, 4))
    model = sparse_mlp(storage="compact")
    session = sp.Session(model, torch.optim.SGD(model.parameters(), 0.1), [sp.SparseTraining(sp.static())])
    with pytest.raises(ValueError, match="that no session trains"):
        quantise(model)
    session.detach()
    assert isinstance(model[0], SparseLinear)
    quantise(model)
    with pytest.raises(ValueError, match=r"expected x of \(..., 48\), got \(2, 3\)"):
        model(torch.zeros(2, 3))


def test_the_examples_of_the_page_run(capsys):
    page = (Path(__file__).parents[2] / "docs" / "quantise.md").read_text()
    names = {"__name__": "page"}
    for example in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(compile(example, "docs/quantise.md", "exec"), names)
    assert capsys.readouterr().out == "{'0': 'int8 blocks', '1': 'left out'}\n"


@pytest.mark.parametrize("options", [{}, {"input_scales": {"0": 0.02}}, {"weights": "int4", "group": 16}], ids=str)
def test_exported_at_one_batch_it_runs_at_others(options):
    model = sparse_mlp(outputs=16)
    quantise(model, **options)
    program = torch.export.export(model, (torch.randn(2, 48),), dynamic_shapes=[{0: torch.export.Dim.DYNAMIC}])
    for batch in (0, 1, 3, 7):
        x = torch.randn(batch, 48)
        torch.testing.assert_close(program.module()(x), model(x))
