"""Masked storage: a topology beside the weight, that any copy of the module carries along."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import sparsam as sp
from sparsam import Block, Unstructured
from sparsam.sparse.masked import add_topology, masked_weights, remove_topology
from sparsam.sparse.weights import sparse_weights

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3.0])
def test_zeros_also_replace_what_is_not_a_number(dtype, value):
    _, buffer = made()
    gradient = torch.full((2, 2), value, dtype=dtype)
    buffer.apply(gradient)
    wanted = torch.where(TOPOLOGY, torch.full((2, 2), value, dtype=dtype), 0.0)
    assert torch.equal(gradient.nan_to_num(7.0), wanted.nan_to_num(7.0))
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


# every kind of layer with weights that masked storage takes: how to build it, an input, the names of its weights
KINDS = {
    "Linear": (lambda: nn.Linear(6, 8), (3, 6), ["0"]),
    "Conv1d": (lambda: nn.Conv1d(4, 8, 3), (2, 4, 9), ["0"]),
    "Conv2d": (lambda: nn.Conv2d(4, 8, 3, groups=2), (2, 4, 5, 5), ["0"]),
    "Conv2d depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), (2, 8, 5, 5), ["0"]),
    "Conv3d": (lambda: nn.Conv3d(2, 4, 2), (2, 2, 3, 3, 3), ["0"]),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 8, 3), (2, 4, 5, 5), ["0"]),
    "RNN": (lambda: nn.RNN(5, 4), (3, 2, 5), ["0.weight_ih_l0", "0.weight_hh_l0"]),
    "GRU": (
        lambda: nn.GRU(5, 4, bidirectional=True),
        (3, 2, 5),
        ["0.weight_ih_l0", "0.weight_hh_l0", "0.weight_ih_l0_reverse", "0.weight_hh_l0_reverse"],
    ),
    "LSTM": (
        lambda: nn.LSTM(5, 6, num_layers=2, proj_size=4),
        (3, 2, 5),
        [f"0.weight_{part}_l{layer}" for layer in range(2) for part in ("ih", "hh", "hr")],
    ),
    "LSTMCell": (lambda: nn.LSTMCell(5, 4), (2, 5), ["0.weight_ih", "0.weight_hh"]),
}


class First(nn.Sequential):
    """The output of what also returns states."""

    def forward(self, x):
        y = self[0](x)
        return y[0] if isinstance(y, tuple) else y


def model_of(kind):
    make, shape, names = KINDS[kind]
    return First(make()), torch.randn(shape), names


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("kind", KINDS)
class TestKinds:
    @pytest.mark.parametrize("pattern", [Unstructured(), Block(2, 3), sp.NM(2, 4), sp.Neuron()], ids=str)
    def test_every_weight_is_a_topology_of_its_own(self, kind, pattern):
        model, x, names = model_of(kind)
        transposed = kind.startswith("ConvTranspose")
        if transposed and pattern != Unstructured():
            with pytest.raises(
                ValueError, match=rf"ConvTranspose2d keeps \(in, out\) channels, where {type(pattern).__name__}"
            ):
                sp.sparsify(model, pattern, 0.5, storage="masked")
            return
        table = sp.sparsify(model, pattern, 0.5, storage="masked")
        assert [row.name for row in table.rows if row.storage == "masked"] == names
        assert {row.reason for row in table.rows} == {"asked for"}
        for row, (name, weight) in zip(table.rows, sparse_weights(model).items(), strict=True):
            assert name == row.name
            assert tuple(weight.topology.shape) == pattern.grid((row.shape[0], row.weights // row.shape[0]))
            assert int(weight.topology.sum()) == row.active_units == round(0.5 * row.units)
            assert torch.equal(weight.parameter != 0, weight.active)
        assert model(x).isfinite().all()

    @pytest.mark.parametrize("method", [sp.static, lambda: sp.set_(every=2), lambda: sp.rigl(every=2)])
    def test_zeros_hold_in_training_and_units_keep_their_number(self, kind, method):
        model, x, _ = model_of(kind)
        table = sp.sparsify(model, Unstructured(), 0.4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        session = sp.Session(model, optimizer, [sp.SparseTraining(method())])
        before = {name: weight.topology.clone() for name, weight in sparse_weights(model).items()}
        for _ in range(4):
            with session.forward():
                loss = (model(x) - 1).square().mean()
            session.backward(loss)
            session.step()
            for row, weight in zip(table.rows, sparse_weights(model).values(), strict=True):
                assert not weight.parameter[~weight.active].any()
                assert int(weight.topology.sum()) == row.active_units
        moved = [not torch.equal(before[name], weight.topology) for name, weight in sparse_weights(model).items()]
        assert any(moved) == (method is not sp.static)

    def test_another_type_keeps_weights_and_topologies(self, kind):
        model, x, _ = model_of(kind)
        sp.sparsify(model, Unstructured(), 0.5)
        before = {name: weight.topology.clone() for name, weight in sparse_weights(model).items()}
        outputs = model(x)
        model.double()
        torch.testing.assert_close(model(x.double()).float(), outputs)
        for name, weight in sparse_weights(model).items():
            assert torch.equal(weight.topology, before[name])
            assert torch.equal(weight.parameter != 0, weight.active)

    def test_it_comes_back_as_it_was(self, kind):
        model, x, _ = model_of(kind)
        plain = copy.deepcopy(model)
        sp.sparsify(model, Unstructured(), 0.5)
        outputs = model(x)
        sp.densify(model)
        assert list(model.state_dict()) == list(plain.state_dict())
        assert model[0].__dict__.keys() == plain[0].__dict__.keys()
        assert torch.equal(model(x), outputs)

    @pytest.mark.parametrize("assign", [False, True])
    def test_state_goes_into_another_model(self, kind, assign):
        """Recurrent layers keep a second list of their weights, which must not be left behind."""
        model, x, _ = model_of(kind)
        other, _, _ = model_of(kind)
        for one in (model, other):
            sp.sparsify(one, Unstructured(), 0.5)
        other.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)
        assert torch.equal(other(x), model(x))
        twin = copy.deepcopy(other)
        for one in (other, twin):
            for mine, theirs in zip(sparse_weights(one).values(), sparse_weights(model).values(), strict=True):
                assert torch.equal(mine.topology, theirs.topology)
        assert torch.equal(twin(x), model(x))


ATTENTION = {
    "one": ({}, ["0.in_proj_weight", "0.out_proj"]),
    "three": ({"kdim": 6, "vdim": 4}, ["0.q_proj_weight", "0.k_proj_weight", "0.v_proj_weight", "0.out_proj"]),
    "bias_kv": ({"add_bias_kv": True}, ["0.in_proj_weight", "0.out_proj"]),
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_in_one_projection_or_three(kind):
    options, names = ATTENTION[kind]
    model = nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True, **options)])
    table = sp.sparsify(model, Unstructured(), 0.5)
    assert [row.name for row in table.rows if row.storage == "masked"] == list(sparse_weights(model)) == names
    assert [row.reason for row in table.rows if row.storage == "dense"] == (
        ["bias_k of MultiheadAttention stays dense", "bias_v of MultiheadAttention stays dense"]
        if kind == "bias_kv"
        else []
    )
    query, key, value = torch.randn(2, 3, 8), torch.randn(2, 5, options.get("kdim", 8)), torch.randn(2, 5, 4)
    value = value if kind == "three" else torch.randn(2, 5, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = sp.Session(model, optimizer, [sp.SparseTraining(sp.rigl(every=2))])
    for _ in range(4):
        with session.forward():
            loss = (model[0](query, key, value)[0] - 1).square().mean()
        session.backward(loss)
        session.step()
        assert all(not weight.parameter[~weight.active].any() for weight in sparse_weights(model).values())


def test_embedding_bags_are_embeddings():
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(10, 4), "sparse": nn.EmbeddingBag(10, 4, sparse=True)})
    rows = sp.sparsify(model, Unstructured(), 0.5, embeddings=True).rows
    assert [(row.storage, row.reason.split(":")[0]) for row in rows] == [
        ("masked", "Unstructured() is stored dense"),
        ("dense", "embedding with sparse gradients"),
    ]
    assert [row.reason for row in sp.inspect(nn.ModuleList([nn.EmbeddingBag(9, 4)]), Unstructured(), 0.5).rows] == [
        "embedding"
    ]


class Scaled(nn.Linear):
    """A user's own layer."""

    def forward(self, x):
        return 2 * super().forward(x)


class TestSubclassesOfLinear:
    def test_masked_they_train_with_the_forward_of_their_own(self):
        model = nn.Sequential(Scaled(6, 8))
        (row,) = sp.sparsify(model, Unstructured(), 0.5).rows
        assert (row.kind, row.storage) == ("Scaled", "masked")
        assert type(model[0]) is Scaled
        x = torch.randn(3, 6)
        torch.testing.assert_close(model(x), 2 * nn.functional.linear(x, model[0].weight, model[0].bias))
        sp.densify(model)
        (row,) = sp.sparsify(model, Block(2, 2), 0.5, storage="masked").rows
        assert row.storage == "masked"
        sp.compact(model)
        assert type(model[0]) is Scaled

    @pytest.mark.parametrize("storage", ["auto", "compact"])
    def test_compact_is_refused_by_name(self, storage):
        with pytest.raises(ValueError, match="0: Scaled has a forward of its own: masked storage only"):
            sp.sparsify(nn.Sequential(Scaled(6, 8)), Block(2, 2), 0.5, storage=storage)

    def test_what_is_parametrized_stays_what_it_is(self):
        """A parametrized bias makes another class of the layer; its weight is an ordinary one still."""
        model = nn.Sequential(nn.Linear(6, 8))
        nn.utils.parametrize.register_parametrization(model[0], "bias", nn.Softplus())
        assert [row.storage for row in sp.sparsify(model, Unstructured(), 0.5).rows] == ["masked"]
        assert model(torch.randn(2, 6)).isfinite().all()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Conv2d(4, 8, 3), "0: Conv2d has no compact storage: masked storage only, which saves no time"),
        (lambda: nn.LSTM(4, 8), "0.weight_ih_l0: LSTM has no compact storage: masked storage only, which saves"),
        (lambda: nn.Bilinear(4, 4, 4), "0: weight of Bilinear stays dense"),
    ],
)
@pytest.mark.parametrize("storage", ["auto", "compact"])
def test_blocks_of_what_is_not_linear_are_masked_only_when_asked_for(make, reason, storage):
    """No time is saved by a mask, so that a default meant to save time does not put one on."""
    with pytest.raises(ValueError, match=reason):
        sp.sparsify(nn.Sequential(make()), Block(2, 2), 0.5, storage=storage)


def test_a_plain_linear_inside_attention_is_never_compact():
    """Attention reads out_proj.weight; of a compact layer that is a copy through which no gradient comes."""
    model = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.Linear(8, 8)])
    model[0].out_proj = nn.Linear(8, 8)
    rows = {row.name: row for row in sp.sparsify(model, Block(2, 2), 0.5).rows}
    assert rows["0.out_proj"].reason == "MultiheadAttention reads its weight and never calls it: masked storage only"
    assert rows["1"].storage == "compact"
    sp.densify(model)
    sp.sparsify(model, Block(2, 2), 0.5, storage="masked")
    sp.compact(model)
    assert type(model[0].out_proj) is nn.Linear
    assert type(model[1]) is sp.SparseLinear


def test_one_weight_of_a_module_after_another():
    model = nn.ModuleDict({"rnn": nn.LSTM(4, 8)})
    sp.sparsify(model, Unstructured(), 0.5, include=["*weight_hh*"])
    rows = {row.name: row.reason for row in sp.sparsify(model, Block(2, 2), 0.25, storage="masked").rows}
    assert rows == {"rnn.weight_ih_l0": "asked for", "rnn.weight_hh_l0": "sparse already"}
    patterns = {name: weight.pattern for name, weight in sparse_weights(model).items()}
    assert patterns == {"rnn.weight_hh_l0": Unstructured(), "rnn.weight_ih_l0": Block(2, 2)}


def test_weights_of_integers_are_no_weights_to_mask():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.ones(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"0: weight of torch.uint8: expected floating point"):
        sp.sparsify(model, Unstructured(), 0.5)


def test_a_lazy_layer_has_no_shape_yet():
    with pytest.raises(
        ValueError, match=r"0.weight: expected a weight with a shape, got a lazy one. Run the model once"
    ):
        sp.sparsify(nn.Sequential(nn.LazyConv2d(4, 3)), Unstructured(), 0.5)


def test_channels_last_stays_channels_last():
    model = nn.Sequential(nn.Conv2d(4, 8, 3)).to(memory_format=torch.channels_last)
    sp.sparsify(model, Unstructured(), 0.5)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = sp.Session(model, optimizer, [sp.SparseTraining(sp.rigl(every=1))])
    x = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)
    for _ in range(3):
        with session.forward():
            loss = (model(x) - 1).square().mean()
        session.backward(loss)
        session.step()
    (weight,) = sparse_weights(model).values()
    assert not weight.parameter[~weight.active].any()
    assert int((weight.parameter != 0).sum()) <= round(0.5 * weight.parameter.numel())
