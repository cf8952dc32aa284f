"""Adapters on a sparse base: merged into active units only, once; and zeros put back after other code's merge."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sparsam as sp
from sparsam.sparse.weights import sparse_weights

STORAGES = [(sp.Block(4, 4), "compact"), (sp.Block(4, 4), "masked"), (sp.Unstructured(), "masked")]
every_storage = pytest.mark.parametrize(("pattern", "storage"), STORAGES, ids=str)


def base(pattern, storage, density=0.5, headroom=0.0):
    """13 x 22 is no multiple of the block, so there is padding."""
    model = nn.Sequential(nn.Linear(13, 22))
    sp.sparsify(model, pattern, density, storage=storage, headroom=headroom)
    return model


def adapter(rank=3):
    return nn.Parameter(torch.randn(rank, 13)), nn.Parameter(torch.randn(22, rank))


def active(model):
    (weight,) = sparse_weights(model).values()
    return weight.pattern.expand(weight.topology, weight.dense_shape)


@every_storage
class TestMerge:
    def test_the_active_part_of_the_update_is_added_and_the_rest_is_told(self, pattern, storage):
        model = base(pattern, storage, headroom=0.5)
        down, up = adapter()
        update, mask, before = (0.5 * up @ down).detach(), active(model), model[0].weight.detach().clone()
        lost = sp.merge_adapter(model[0], down, up, scale=0.5)
        torch.testing.assert_close(model[0].weight.detach(), before + update * mask)
        assert not model[0].weight[~mask].any()
        assert lost == pytest.approx(float((update * ~mask).square().sum() / update.square().sum()))
        assert not up.any()
        assert down.any()

    def test_a_second_merge_changes_nothing(self, pattern, storage):
        model = base(pattern, storage)
        down, up = adapter()
        x = torch.randn(5, 13)
        sp.merge_adapter(model[0], down, up)
        state, outputs = copy.deepcopy(model.state_dict()), model(x)
        assert torch.equal(model(x) + x @ down.T @ up.T, outputs)  # layer and adapter together are the layer
        assert sp.merge_adapter(model[0], down, up) == 0.0
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())

    def test_nothing_is_lost_where_every_unit_is_active(self, pattern, storage):
        model = base(pattern, storage, density=1.0)
        down, up = adapter()
        x = torch.randn(5, 13)
        beside = model(x) + x @ down.T @ up.T
        assert sp.merge_adapter(model[0], down, up) == pytest.approx(0.0, abs=1e-12)
        torch.testing.assert_close(model(x), beside, rtol=1e-4, atol=1e-4)

    def test_a_small_update_is_rounded_once(self, pattern, storage):
        """In bf16 a product of its own would round twice: here the result is the nearest to the exact sum."""
        model = base(pattern, storage).bfloat16()
        down, up = adapter()
        exact = model[0].weight.detach().double() + 0.01 * (up.double() @ down.double()) * active(model)
        sp.merge_adapter(model[0], down, up, scale=0.01)
        assert model[0].weight.dtype == torch.bfloat16
        # rounding the float32 sum may differ from rounding the exact one where that lies halfway: never by more
        torch.testing.assert_close(model[0].weight.detach().double(), exact, rtol=2**-8, atol=0)

    def test_a_frozen_layer_computes_with_what_was_merged(self, pattern, storage):
        model = base(pattern, storage)
        x = torch.randn(5, 13)
        sp.freeze(model)
        with torch.no_grad():
            model(x)
            sp.merge_adapter(model[0], *adapter())
            frozen = model(x)
            sp.unfreeze(model)
            torch.testing.assert_close(frozen, model(x))

    @pytest.mark.parametrize(
        ("down", "up", "message"),
        [
            ((3, 14), (22, 3), r"expected down \(r, 13\) and up \(22, r\), got \(3, 14\) and \(22, 3\)\."),
            ((3, 13), (21, 3), r"expected down \(r, 13\) and up \(22, r\), got \(3, 13\) and \(21, 3\)\."),
            ((3, 13), (22, 4), r"expected down \(r, 13\) and up \(22, r\), got \(3, 13\) and \(22, 4\)\."),
            ((13,), (22, 3), r"expected down \(r, 13\) and up \(22, r\), got \(13,\) and \(22, 3\)\."),
        ],
    )
    def test_shapes_that_do_not_fit(self, pattern, storage, down, up, message):
        model = base(pattern, storage)
        up = torch.ones(up)
        with pytest.raises(ValueError, match=message):
            sp.merge_adapter(model[0], torch.ones(down), up)
        assert up.all()

    @pytest.mark.parametrize("scale", [float("inf"), float("nan"), 1e39])
    def test_what_is_not_finite_changes_nothing(self, pattern, storage, scale):
        model = base(pattern, storage)
        down, up = adapter()
        before = model[0].weight.detach().clone()
        with pytest.raises(ValueError, match="merge_adapter: expected finite weights, got inf or NaN"):
            sp.merge_adapter(model[0], down, up, scale)
        assert torch.equal(model[0].weight, before)
        assert up.all()

    def test_nor_does_what_overflows_in_the_weights_own_type(self, pattern, storage):
        model = base(pattern, storage).half()
        with pytest.raises(ValueError, match="merge_adapter: expected finite weights"):
            sp.merge_adapter(model[0], *adapter(), scale=1e6)
        assert model[0].weight.isfinite().all()


def test_layers_that_cannot_take_an_adapter_are_named():
    down, up = adapter()
    with pytest.raises(ValueError, match=r"expected a SparseLinear or an nn\.Linear with a masked weight, got Linear"):
        sp.merge_adapter(nn.Linear(13, 22), down, up)
    conv = nn.Sequential(nn.Conv1d(13, 22, 1))
    sp.sparsify(conv, sp.Unstructured(), 0.5)
    with pytest.raises(ValueError, match=r"expected a SparseLinear or an nn\.Linear with a masked weight, got Conv1d"):
        sp.merge_adapter(conv[0], down, up)


@pytest.mark.parametrize("storage", ["compact", "masked"])
def test_an_activation_stands_between_a_layer_and_its_adapter(storage):
    model = nn.Sequential(sp.ActivatedLinear(13, 22, activation="gelu"))
    sp.sparsify(model, sp.Block(4, 4), 0.5, storage=storage)
    with pytest.raises(ValueError, match="merge_adapter: expected a layer without an activation, got one with gelu"):
        sp.merge_adapter(model[0], *adapter())


class TestApplyTopology:
    def test_what_other_code_wrote_outside_the_topologies_is_zero_again(self):
        model = nn.ModuleDict({"fc": nn.Linear(13, 22), "conv": nn.Conv2d(3, 8, 3), "rnn": nn.LSTM(5, 4)})
        sp.sparsify(model, sp.Unstructured(), 0.25)
        before = copy.deepcopy(model.state_dict())
        masks = {name: weight.active for name, weight in sparse_weights(model).items()}
        with torch.no_grad():
            for weight in sparse_weights(model).values():
                weight.parameter.add_(1.0)
        assert sp.apply_topology(model) == sum(int((~mask).sum()) for mask in masks.values())
        for name, weight in sparse_weights(model).items():
            path = f"{name}.weight" if name in ("fc", "conv") else name
            torch.testing.assert_close(weight.parameter.detach(), (before[path] + 1) * masks[name])
        assert sp.apply_topology(model) == 0

    def test_padding_and_dead_slots_of_compact_storage_too(self):
        model = base(sp.Block(4, 4), "compact", headroom=1.0)
        inside = int(active(model).sum())
        with torch.no_grad():
            model[0].values.fill_(1.0)
        assert sp.apply_topology(model) == model[0].values.numel() - inside
        assert int(model[0].values.sum()) == inside

    def test_nan_is_no_survivor(self):
        model = base(sp.Unstructured(), "masked")
        with torch.no_grad():
            model[0].weight.fill_(float("nan"))
        assert sp.apply_topology(model) == 143
        assert int(model[0].weight.isnan().sum()) == 143

    def test_inside_a_wrapper(self):
        model = base(sp.Unstructured(), "masked")
        with torch.no_grad():
            model[0].weight.fill_(1.0)
        assert sp.apply_topology(torch.compile(model, backend="eager")) == 143

    def test_a_dense_model_has_nothing_to_apply(self):
        with pytest.raises(ValueError, match="apply_topology: expected a model with sparse layers, got none"):
            sp.apply_topology(nn.Linear(4, 4))
