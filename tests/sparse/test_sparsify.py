"""What becomes sparse and what does not, the way back, compact storage after masked, and what is refused."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import sparsam as sp
from sparsam import ActivatedLinear, Block, SparseLinear, Unstructured, compact, densify, inspect, sparsify

STORAGES = [(Block(4, 4), "compact"), (Block(4, 4), "masked"), (Unstructured(), "masked")]


class Net(nn.Module):
    """One of everything."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.norm = nn.LayerNorm(16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.fc1 = ActivatedLinear(16, 32, activation="gelu")
        self.fc2 = nn.Linear(32, 16)
        self.tiny = nn.Linear(16, 2)
        self.lm_head = nn.Linear(2, 10)

    def forward(self, tokens):
        x = self.conv(self.norm(self.embed(tokens)).mT).mT
        return self.lm_head(self.tiny(self.fc2(self.fc1(x))))


TOKENS = torch.arange(20).view(2, 10) % 10


def trained(model, optimizer, steps=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        target = torch.randn(2, 10, 10, generator=generator)
        (model(TOKENS) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class TestWhatBecomesSparse:
    def test_every_weight_matrix_has_its_line_and_its_reason(self):
        model = Net()
        table = sparsify(model, Block(4, 4), 0.25, exclude=["fc2"])
        assert [(row.name, row.storage, row.reason) for row in table.rows] == [
            ("embed", "dense", "embedding"),
            ("conv", "dense", "Conv1d has no compact storage: masked storage only, which saves no time"),
            ("fc1", "compact", "asked for"),
            ("fc2", "dense", "excluded"),
            ("tiny", "compact", "asked for"),
            ("lm_head", "dense", "output head"),
        ]
        fc1 = table.rows[2]
        assert (fc1.kind, fc1.shape, fc1.units, fc1.active_units, fc1.density) == (
            "ActivatedLinear",
            (32, 16),
            32,
            8,
            0.25,
        )
        assert table.other_parameters == sum(p.numel() for p in Net().parameters() if p.dim() < 2)
        assert isinstance(model.fc1, SparseLinear)
        assert model.fc1.activation == "gelu"
        assert type(model.fc2) is nn.Linear

    def test_the_largest_magnitudes_stay(self):
        model = nn.Sequential(nn.Linear(4, 4))
        with torch.no_grad():
            model[0].weight.copy_(torch.tensor([[1.0, 1, 5, 5], [1, 1, 5, 5], [9, 9, 0, 0], [9, 9, 0, 0]]))
        weight = model[0].weight.detach().clone()
        sparsify(model, Block(2, 2), 0.5)
        assert model[0].topology.tolist() == [[False, True], [True, False]]
        assert torch.equal(model[0].weight, weight * (weight > 1))

    @pytest.mark.parametrize(("pattern", "storage"), STORAGES, ids=str)
    @pytest.mark.parametrize("density", [0.01, 0.3, 0.5, 1.0])
    def test_the_count_is_exact_also_for_weights_that_are_all_the_same(self, pattern, storage, density):
        model = nn.Sequential(nn.Linear(32, 32))
        nn.init.ones_(model[0].weight)
        (row,) = sparsify(model, pattern, density, storage=storage).rows
        assert row.active_units == max(1, round(density * row.units))
        active = row.active_units * (16 if pattern == Block(4, 4) else 1)
        assert model[0].weight.count_nonzero() == active

    @pytest.mark.parametrize(("pattern", "storage"), STORAGES, ids=str)
    def test_inspect_says_the_same_and_changes_nothing(self, pattern, storage):
        model = Net()
        before, modules = copy.deepcopy(model.state_dict()), list(model.modules())
        seen = inspect(model, pattern, 0.3, storage=storage, allocation=sp.erdos_renyi, exclude=["*1"])
        assert list(model.modules()) == modules
        assert model.state_dict().keys() == before.keys()
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert sparsify(model, pattern, 0.3, storage=storage, allocation=sp.erdos_renyi, exclude=["*1"]) == seen
        sparse = {row.name for row in seen.rows if row.units}
        before, after = (
            [
                (row.name, row.storage, row.shape, row.active_units, row.units)
                for row in table.rows
                if row.name in sparse
            ]
            for table in (seen, inspect(model, pattern, 0.3, exclude=["*1"]))
        )
        assert before == after  # what is sparse already is shown as it is

    def test_globs_know_every_name_of_a_layer_and_of_its_weight(self):
        shared = nn.Linear(16, 16)
        model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(16, 16), "d": nn.Linear(16, 16)})
        model["d"].weight = model["c"].weight
        for name in "abcd":
            rows = {row.name: row.reason for row in inspect(model, Block(4, 4), 0.5, exclude=[name]).rows}
            assert list(rows) == ["a", "c"]
            assert [key for key, reason in rows.items() if reason == "excluded"] == ["a" if name in "ab" else "c"]

    def test_heads_and_embeddings_on_demand(self):
        model = Net()
        table = sparsify(model, Unstructured(), 0.5, heads=True, embeddings=True)
        assert [row.name for row in table.rows if row.storage == "masked"] == [
            "embed",
            "conv",
            "fc1",
            "fc2",
            "tiny",
            "lm_head",
        ]

    @pytest.mark.parametrize("density", [0.25, 0.02])
    @pytest.mark.parametrize(
        ("pattern", "storage"), [(Block(4, 4), "compact"), (Block(4, 4), "masked"), (Unstructured(), "masked")]
    )
    def test_sparse_fan_in_keeps_the_variance_of_the_outputs(self, pattern, storage, density):
        """The largest of normal weights are kept: at 98 % sparse, density^-0.5 alone would give a variance of 6."""
        model = nn.Sequential(nn.Linear(512, 512, bias=False))
        nn.init.normal_(model[0].weight, std=512**-0.5)
        sparsify(model, pattern, density, storage=storage, sparse_fan_in=True)
        assert model(torch.randn(256, 512)).var().item() == pytest.approx(1.0, abs=0.1)

    def test_sparse_fan_in_of_zeros_is_zero(self):
        model = nn.Sequential(nn.Linear(8, 8))
        nn.init.zeros_(model[0].weight)
        sparsify(model, Block(2, 2), 0.5, sparse_fan_in=True)
        assert not model[0].values.any()

    def test_headroom_gives_dead_slots(self):
        model = nn.Sequential(nn.Linear(16, 16))
        sparsify(model, Block(4, 4), 0.5, headroom=0.25)
        assert len(model[0].values) == 10
        assert model[0].density == 0.5
        assert (model[0].block_row < 0).sum() == 2

    def test_a_model_on_meta_keeps_its_shapes(self):
        with torch.device("meta"):
            model = Net()
        table = sparsify(model, Block(4, 4), 0.25)
        assert table.density == 0.25
        real = Net()
        sparsify(real, Block(4, 4), 0.25)
        model.load_state_dict(real.state_dict(), assign=True)
        torch.testing.assert_close(model(TOKENS), real(TOKENS))


class TestDeviceProfile:
    """Measurement decides; here the measurements are given."""

    SLOW, FAST = SimpleNamespace(compact_ms=2.0, dense_ms=1.0), SimpleNamespace(compact_ms=1.0, dense_ms=2.0)

    def decided(self, if_slow):
        asked = []

        def linear(*arguments):
            asked.append(arguments)
            return self.FAST if arguments[1] == 16 else self.SLOW

        model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
        table = sparsify(
            model, Block(4, 8), 0.25, profile=SimpleNamespace(linear=linear), tokens=64, format="fp32", if_slow=if_slow
        )
        assert asked == [(64, 16, 32, 4, 8, 0.25, "fp32"), (64, 32, 16, 4, 8, 0.25, "fp32")]
        assert [(row.compact_ms, row.dense_ms) for row in table.rows] == [(1.0, 2.0), (2.0, 1.0)]
        assert table.rows[0].reason == "2.0x faster than dense"
        return model[1], table.rows[1]

    def test_slow_layers_are_left_dense(self):
        layer, row = self.decided("dense")
        assert type(layer) is nn.Linear
        assert (row.storage, row.density, row.reason) == ("dense", 1.0, "compact measured slower: left dense")

    @pytest.mark.parametrize(("if_slow", "product"), [("scatter", "dense"), ("compact", "kernel")])
    def test_or_sparse_all_the_same(self, if_slow, product):
        layer, row = self.decided(if_slow)
        assert (layer.product, row.storage, row.density) == (product, "compact", 0.25)
        assert row.reason.startswith("compact measured slower: ")


class TestWayBack:
    @pytest.mark.parametrize(("pattern", "storage"), STORAGES, ids=str)
    def test_names_order_types_and_strict_loading_both_ways(self, pattern, storage):
        """A model that went through sparse and back is the dense model: not one name, hook or attribute is left."""
        dense, model = Net(), Net()
        sparsify(model, pattern, 0.5, storage=storage)
        outputs = model(TOKENS)
        densify(model)
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in dense.named_parameters()]
        assert repr(model) == repr(dense)
        assert model.__dict__.keys() == dense.__dict__.keys()
        assert all(
            a.__dict__.keys() == b.__dict__.keys() for a, b in zip(model.modules(), dense.modules(), strict=True)
        )
        torch.testing.assert_close(model(TOKENS), outputs)
        dense.load_state_dict(model.state_dict())
        model.load_state_dict(Net().state_dict())

    @pytest.mark.parametrize(("pattern", "storage"), STORAGES, ids=str)
    def test_an_optimiser_follows_both_ways(self, pattern, storage):
        """Every live parameter is held once, its moments are those of the same weights, and all of them move."""
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
        trained(model, optimizer)
        moment = optimizer.state[model.fc2.weight]["exp_avg"].clone()
        sparsify(model, pattern, 0.5, storage=storage, optimizer=optimizer)
        held(model, optimizer)
        fc2, mask = model.fc2, model.fc2.weight != 0
        if storage == "compact":
            assert torch.equal(fc2.scatter(optimizer.state[fc2.values]["exp_avg"]), moment * mask)
        session = sp.Session(model, optimizer, [sp.SparseTraining(sp.static())])
        session.backward(model(TOKENS).square().mean())
        session.step()
        session.detach()
        squares = optimizer.state[fc2.values if storage == "compact" else fc2.weight]["exp_avg_sq"]
        squares = (fc2.scatter(squares) if storage == "compact" else squares).clone()
        densify(model, optimizer)
        held(model, optimizer)
        state = optimizer.state[model.fc2.weight]
        assert not state["exp_avg"][~mask].any()
        assert torch.equal(state["exp_avg_sq"][mask], squares[mask])
        fresh = state["exp_avg_sq"][~mask]
        torch.testing.assert_close(fresh, squares[mask & (squares > 0)].mean().expand_as(fresh))
        trained(model, optimizer, steps=1)

    @pytest.mark.parametrize("storage", ["compact", "masked"])
    def test_gradients_that_wait_go_along(self, storage):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(TOKENS).square().mean().backward()
        dense = model.fc2.weight.grad.clone()
        sparsify(model, Block(4, 4), 0.5, storage=storage, optimizer=optimizer)
        if storage == "compact":
            assert torch.equal(model.fc2.values.grad, model.fc2.gather(dense))
        assert model.fc2.bias.grad.any()
        densify(model, optimizer)
        assert model.fc2.weight.grad.any()


def held(model, optimizer):
    ours = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(ours) == sorted(id(parameter) for parameter in model.parameters())
    assert {id(parameter) for parameter in optimizer.state} <= set(ours)


class TestCompact:
    def test_masked_blocks_become_compact_with_their_moments(self):
        model = Net()
        sparsify(model, Block(4, 4), 0.5, storage="masked")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
        trained(model, optimizer)
        sp.Session(model, optimizer, [sp.SparseTraining(sp.static())]).detach()  # zeros are zero
        twin, weight = copy.deepcopy(model), model.fc2.weight.detach().clone()
        moment = optimizer.state[model.fc2.weight]["exp_avg"].clone()
        compact(model, optimizer)
        assert isinstance(model.fc2, SparseLinear)
        assert torch.equal(model.fc2.weight, weight)
        assert torch.equal(optimizer.state[model.fc2.values]["exp_avg"], model.fc2.gather(moment))
        held(model, optimizer)
        torch.testing.assert_close(model(TOKENS), twin(TOKENS))
        trained(model, optimizer, steps=1)

    def test_dead_slots_go(self):
        model = nn.Sequential(nn.Linear(16, 16))
        sparsify(model, Block(4, 4), 0.5, headroom=1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(3, 16)).sum().backward()
        optimizer.step()
        weight, old = model[0].weight, model[0]
        momentum = old.scatter(optimizer.state[old.values]["momentum_buffer"])
        compact(model, optimizer)
        assert len(model[0].values) == 8
        assert torch.equal(model[0].weight, weight)
        assert torch.equal(model[0].scatter(optimizer.state[model[0].values]["momentum_buffer"]), momentum)
        held(model, optimizer)
        same = model[0]
        compact(model, optimizer)
        assert model[0] is same

    def test_tied_weights_and_other_patterns_stay_masked(self):
        """Compact storage of one of two tied layers would part them in silence."""
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Embedding(8, 16))
        model[1].weight = model[0].weight
        sparsify(model, Block(4, 4), 0.5, include=["0", "3"], embeddings=True)
        sparsify(model, Unstructured(), 0.5, include=["2"])
        compact(model)
        assert [type(module) for module in model] == [nn.Linear, nn.Linear, nn.Linear, nn.Embedding]
        assert model[0].weight is model[1].weight

    def test_only_the_layers_that_are_included(self):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
        sparsify(model, Block(4, 4), 0.5, storage="masked")
        compact(model, include=["0", "[2]"])
        assert [type(module) for module in model] == [SparseLinear, nn.Linear, SparseLinear]
        with pytest.raises(ValueError, match="'fc' matches no layer"):
            compact(model, include=["fc"])

    def test_one_layer_in_two_places_becomes_one(self):
        layer = nn.Linear(16, 16)
        model = nn.Sequential(layer, layer)
        sparsify(model, Block(4, 4), 0.5, storage="masked")
        compact(model)
        assert isinstance(model[0], SparseLinear)
        assert model[0] is model[1]


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"density": 0.0},
                r"density: expected a share of active units in \(0, 1\], got 0.0. Sparsity is 1 - density",
            ),
            ({"density": "0.1"}, r"density: expected a share of active units in \(0, 1\], got '0.1'"),
            ({"pattern": "block"}, r"pattern: expected a pattern such as Block\(32, 32\) or .*, got 'block'"),
            ({"pattern": (32, 32)}, r"pattern: expected a pattern .*, got \(32, 32\)"),
            ({"pattern": Block}, "pattern: expected a pattern .*, got <class .*Block"),
            (
                {"allocation": sp.global_},
                r"allocation: expected one that gives .*, got the function global_. Write .*\(\)",
            ),
            ({"allocation": "global"}, "allocation: expected one that gives every layer a density, got 'global'"),
            (
                {"allocation": lambda views, density: {}},
                "allocation: expected one that gives every layer a density, got",
            ),
            ({"density": 90}, r"density: expected a share of active units in \(0, 1\], got 90"),
            ({"density": float("nan")}, "density: expected a share of active units"),
            ({"storage": "sparse"}, "storage: expected auto, compact, masked, got 'sparse'"),
            ({"if_slow": "wait"}, "if_slow: expected dense, scatter, compact, got 'wait'"),
            ({"headroom": -0.5}, "headroom: expected a share of further slots >= 0, got -0.5"),
            ({"profile": object()}, "tokens: a profile was given without the number of rows it should time"),
            (
                {"pattern": Unstructured(), "storage": "compact"},
                r"storage: expected a Block pattern for compact storage, got Unstructured\(\)",
            ),
            ({"exclude": ["head*"]}, r"exclude: 'head\*' matches no layer. Did you mean 'lm_head'"),
            ({"include": ["embed"]}, r"sparsify: no layer was made sparse \(embed: embedding; conv: not included"),
            ({"pattern": Block(64, 64)}, r"fc1: fewer than 4 units of Block\(rows=64, cols=64\)"),
        ],
    )
    def test_arguments_that_do_not_fit_leave_the_model_alone(self, options, message):
        model = Net()
        modules = list(model.modules())
        with pytest.raises(ValueError, match=message):
            sparsify(model, **{"pattern": Block(4, 4), "density": 0.5} | options)
        assert list(model.modules()) == modules

    def test_an_optimiser_that_reads_matrices(self):
        model = nn.Sequential(nn.Linear(16, 16, bias=False))
        with pytest.raises(ValueError, match="Muon: expected an element-wise optimiser"):
            sparsify(model, Block(4, 4), 0.5, optimizer=torch.optim.Muon(model.parameters()))
        assert type(model[0]) is nn.Linear

    def test_options_of_inspect(self):
        with pytest.raises(ValueError, match=r"inspect: expected options of include, .*, got headrom"):
            inspect(Net(), Block(4, 4), 0.5, headrom=1)

    @pytest.mark.parametrize("verb", ["sparsify", "inspect", "densify", "compact"])
    def test_wrapped_models(self, verb):
        act = getattr(sp, verb)
        wrapped = torch.compile(Net(), backend="eager")
        arguments = (Block(4, 4), 0.5) if verb in ("sparsify", "inspect") else ()
        with pytest.raises(ValueError, match=f"{verb}: expected the plain model, got it wrapped in OptimizedModule"):
            act(wrapped, *arguments)

    def test_a_layer_alone_is_not_passed_over_in_silence(self):
        """It has no parent in which it could be exchanged."""
        with pytest.raises(ValueError, match=r"the model: the model is this layer itself: put it into nn.Sequential"):
            sparsify(nn.Linear(16, 16), Block(4, 4), 0.5)
        alone = nn.Linear(16, 16)
        sparsify(alone, Block(4, 4), 0.5, storage="masked")
        with pytest.raises(ValueError, match="expected a model that contains its layers, got a Linear itself"):
            compact(alone)
        densify(alone)
        with pytest.raises(ValueError, match="expected a model that contains its layers, got a SparseLinear itself"):
            densify(SparseLinear(4, 4, torch.ones(2, 2, dtype=torch.bool), Block(2, 2)))

    @pytest.mark.parametrize("verb", [densify, compact])
    def test_a_model_that_a_session_trains(self, verb):
        model = Net()
        sparsify(model, Block(4, 4), 0.5)
        optimizer = torch.optim.AdamW(model.parameters())
        session = sp.Session(model, optimizer, [sp.SparseTraining(sp.static())])
        with pytest.raises(ValueError, match=r"fc1 is trained by a session. Call session.detach\(\) first"):
            verb(model, optimizer)
        session.detach()
        verb(model, optimizer)

    @pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's about its older weight_norm
    @pytest.mark.parametrize(
        "wrap",
        [
            nn.utils.weight_norm,
            nn.utils.spectral_norm,
            nn.utils.parametrizations.weight_norm,
            nn.utils.parametrizations.spectral_norm,
        ],
    )
    def test_reparametrised_weights_stay_dense_and_say_so(self, wrap):
        """weight_norm recomputes the weight at every forward: zeros in its parts are not zeros in the weight."""
        model = nn.Sequential(wrap(nn.Linear(16, 16)), nn.Linear(16, 16))
        table = sparsify(model, Unstructured(), 0.5)
        (reason,) = {row.reason for row in table.rows if row.storage == "dense"}
        assert re.fullmatch(
            r"reparametrised by .*(weight_norm|spectral_norm|WeightNorm|SpectralNorm): remove that first", reason
        )
        assert model(torch.randn(2, 16)).shape == (2, 16)

    def test_layers_with_a_forward_of_their_own_and_sparse_gradients(self):
        model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2), "embed": nn.Embedding(32, 16, sparse=True)})
        model["fc"] = nn.Linear(16, 16)
        reasons = {row.name: row.reason for row in sparsify(model, Block(4, 4), 0.5, embeddings=True).rows}
        dense = "MultiheadAttention has no compact storage: masked storage only, which saves no time"
        assert reasons == {
            "attention.in_proj_weight": dense,
            "attention.out_proj": "NonDynamicallyQuantizableLinear has a forward of its own: masked storage only",
            "embed": "embedding with sparse gradients: build it with sparse=False",
            "fc": "asked for",
        }
        with pytest.raises(ValueError, match=r"fc: sparse already"):
            sparsify(model, Block(4, 4), 0.5)


def test_freeze_and_unfreeze_the_whole_model():
    model = Net()
    sparsify(model, Block(4, 4), 0.5)
    with torch.no_grad():
        wanted = model(TOKENS)
        sp.freeze(model)
        assert not model.training
        torch.testing.assert_close(model(TOKENS), wanted)
        sp.unfreeze(model)
    assert not model.training
    model(TOKENS).sum().backward()
    assert model.fc1.values.grad is not None
