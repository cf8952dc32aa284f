"""Faults that users of public tools reported, by the number that the project gives them: layers that are not linear,
weights that other code computes anew, very high sparsity, adapters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import sparsam as sp
from sparsam.sparse.weights import sparse_weights

STORAGES = [(sp.Block(4, 4), "compact"), (sp.Block(4, 4), "masked"), (sp.Unstructured(), "masked")]
every_storage = pytest.mark.parametrize(("pattern", "storage"), STORAGES, ids=str)


def session_of(model, method=None, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return sp.Session(model, optimizer, [sp.SparseTraining(method or sp.static())])


def step(session, x):
    with session.forward():
        loss = (session.model(x) - 1).square().mean()
    session.backward(loss)
    session.step()
    return loss.detach()


def zeros_hold(model):
    return all(not weight.parameter[~weight.active].any() for weight in sparse_weights(model).values())


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.rnn = kind(5, 6, num_layers=2, batch_first=True, **options)
        self.fc = nn.Linear(12 if options.get("bidirectional") else 6, 8)

    def forward(self, x):
        return self.fc(self.rnn(x)[0])


class Attending(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.keys, self.values = options.get("kdim", 8), options.get("vdim", 8)

    def forward(self, x):
        own = self.keys == self.values == 8
        key, value = (x, x) if own else (x[..., : self.keys], x[..., : self.values])
        return self.attention(x, key, value, need_weights=False)[0]


S3 = {
    "LSTM": (Recurrent, (4, 7, 5)),
    "LSTM in both directions": (lambda: Recurrent(bidirectional=True), (4, 7, 5)),
    "GRU": (lambda: Recurrent(nn.GRU), (4, 7, 5)),
    "attention": (Attending, (4, 7, 8)),
    "attention with key and value of other sizes": (lambda: Attending(kdim=6, vdim=4), (4, 7, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (4, 7, 8)),
}


@pytest.mark.parametrize("kind", S3)
@pytest.mark.parametrize("pattern", [sp.Unstructured(), sp.Block(2, 2)], ids=str)
class TestS3WeightsThatNoForwardOfTheirOwnReads:
    def made(self, kind, pattern):
        make, shape = S3[kind]
        model = make()
        sp.sparsify(model, pattern, 0.5, storage="masked")
        return model, torch.randn(shape)

    def test_three_backwards_densify_three_more(self, kind, pattern):
        """Tools that compute weight * mask before the forward leave a weight with last step's graph behind."""
        model, x = self.made(kind, pattern)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session = session_of(model, sp.rigl(every=2), optimizer)
        for _ in range(3):
            step(session, x)
            assert zeros_hold(model)
        session.detach()
        sp.densify(model, optimizer)
        make, _ = S3[kind]
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in make().named_parameters()]
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
        assert all((parameter != before[name]).any() for name, parameter in model.named_parameters())

    def test_backwards_without_a_step_between(self, kind, pattern):
        model, x = self.made(kind, pattern)
        for _ in range(3):
            model(x).sum().backward()
        sp.densify(model)
        for _ in range(3):
            model(x).sum().backward()

    def test_eval_and_training_compute_the_same_with_the_zeros_in_force(self, kind, pattern):
        """A rewire in between: kernels that keep weights of their own would still hold the old ones."""
        model, x = self.made(kind, pattern)
        session = session_of(model, sp.set_(every=1, fraction=0.5))
        dense = S3[kind][0]()
        for _ in range(2):
            step(session, x)
            plain = copy.deepcopy(model)
            sp.densify(plain)
            dense.load_state_dict(plain.state_dict())
            slow = model.train()(x).detach()
            with torch.no_grad():
                torch.testing.assert_close(model.eval()(x), slow, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(dense(x).detach(), slow, rtol=1e-5, atol=1e-6)
            model.train()


@pytest.mark.parametrize("kind", ["attention", "encoder"])
def test_s3_the_fast_path_is_really_taken(kind, monkeypatch):
    """So that the equality above says something about it."""
    make, shape = S3[kind]
    model = make()
    sp.sparsify(model, sp.Unstructured(), 0.5)
    name = "_native_multi_head_attention" if kind == "attention" else "_transformer_encoder_layer_fwd"
    taken, original = [], getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda *arguments, **options: taken.append(1) or original(*arguments, **options))
    with torch.no_grad():
        model.eval()(torch.randn(shape))
    assert taken


# torch's ways to compute a weight anew at every forward
old = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's about its older weight_norm
WRAPS = {
    "hooked weight_norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm, "torch.nn.utils.weight_norm"),
    "hooked spectral_norm": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm, "torch.nn.utils.spectral_norm"),
    "prune": (lambda layer, name: prune.l1_unstructured(layer, name, 0.25), prune.remove, "torch.nn.utils.prune"),
    "weight_norm": (parametrizations.weight_norm, parametrize.remove_parametrizations, "WeightNorm"),
    "spectral_norm": (parametrizations.spectral_norm, parametrize.remove_parametrizations, "SpectralNorm"),
    "orthogonal": (parametrizations.orthogonal, parametrize.remove_parametrizations, "Orthogonal"),
    "the user's own": (
        lambda layer, name: parametrize.register_parametrization(layer, name, nn.Tanh()),
        parametrize.remove_parametrizations,
        "Tanh",
    ),
}
LAYERS = {
    "Linear": (lambda: nn.Linear(8, 8), "weight", (3, 8)),
    "Conv1d": (lambda: nn.Conv1d(8, 8, 3, padding=1), "weight", (2, 8, 8)),
    "LSTM": (lambda: nn.LSTM(8, 8), "weight_hh_l0", (3, 8)),
}


class Both(nn.Module):
    """A layer that will be reparametrised, and one that will not."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.fc = layer, nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return self.fc(y[0] if isinstance(y, tuple) else y)


@old
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", LAYERS)
class TestS4WeightsComputedAnewAtEveryForward:
    """Zeros in the parts of such a weight are not zeros in it. Both orders are refused, and by name."""

    def test_before_sparsify(self, kind, wrap):
        make, name, shape = LAYERS[kind]
        apply, remove, who = WRAPS[wrap]
        model, x = Both(make()), torch.randn(shape)
        apply(model.layer, name)
        for _ in range(2):  # pruned again: the same answer
            rows = {row.name: row for row in sp.inspect(model, sp.Unstructured(), 0.5).rows}
            parts = [row for path, row in rows.items() if path.startswith("layer") and "ih" not in path]
            assert parts
            assert {(row.storage, row.reason) for row in parts} == {
                ("dense", f"reparametrised by {who}: remove that first")
            }
            if rows["fc"].storage == "masked" and rows["fc"].reason != "sparse already":
                sp.sparsify(model, sp.Unstructured(), 0.5)
            session = session_of(model)
            step(session, x)
            assert zeros_hold(model)
            session.detach()
        model(x)
        remove(model.layer, name)
        sp.densify(model)
        rows = sp.sparsify(model, sp.Unstructured(), 0.5).rows
        assert all(row.storage == "masked" for row in rows)

    def test_nothing_else_to_prune_is_an_error(self, kind, wrap):
        make, name, _ = LAYERS[kind]
        apply, _, who = WRAPS[wrap]
        model = nn.Sequential(make())
        apply(model[0], name)
        include = ["*"] if kind != "LSTM" else ["*hh*"]
        with pytest.raises(
            ValueError, match=rf"sparsify: no layer was made sparse \(.*reparametrised by {who}: remove"
        ):
            sp.sparsify(model, sp.Unstructured(), 0.5, include=include)

    def test_after_sparsify(self, kind, wrap):
        make, name, shape = LAYERS[kind]
        apply, remove, who = WRAPS[wrap]
        model, x = Both(make()), torch.randn(shape)
        sp.sparsify(model, sp.Unstructured(), 0.5)
        apply(model.layer, name)
        message = rf"expected the sparse {name} to be a parameter, but {who} replaced it after sparsify\. Undo that"
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for act in (
            lambda: session_of(model, None, optimizer),
            lambda: sp.apply_topology(model),
            lambda: sp.densify(model, optimizer),
            lambda: sp.compact(model, optimizer),
        ):
            with pytest.raises(ValueError, match=message):
                act()
        reasons = {row.reason for row in sp.inspect(model, sp.Unstructured(), 0.25).rows if row.name != "fc"}
        assert f"reparametrised by {who}: remove that first" in reasons
        model(x)
        remove(model.layer, name)
        session = session_of(model)
        for _ in range(2):
            step(session, x)
            assert zeros_hold(model)

    def test_while_a_session_trains_it(self, kind, wrap):
        make, name, shape = LAYERS[kind]
        apply, _, who = WRAPS[wrap]
        model, x = Both(make()), torch.randn(shape)
        sp.sparsify(model, sp.Unstructured(), 0.5)
        session = session_of(model, sp.rigl(every=1))
        step(session, x)
        apply(model.layer, name)
        with pytest.raises(ValueError, match=rf"but {who} replaced it|its parameter or topology was replaced while"):
            step(session, x)


@old
@pytest.mark.parametrize("wrap", WRAPS)
def test_s4_a_compact_layer_has_no_weight_to_reparametrise(wrap):
    """Its weight is a view for reading, so torch itself refuses; its values are refused by name."""
    apply, _, who = WRAPS[wrap]
    model = nn.Sequential(nn.Linear(8, 8))
    sp.sparsify(model, sp.Block(4, 4), 0.5)
    with pytest.raises((ValueError, KeyError, TypeError), match="weight"):
        apply(copy.deepcopy(model)[0], "weight")
    if who[0].isupper():
        with pytest.raises(KeyError, match="values"):  # a name that torch's ModuleDict has taken
            apply(model[0], "values")
        return
    apply(model[0], "values")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.raises(ValueError, match=rf"expected the sparse values to be a parameter, but {who} replaced it"):
        session_of(model, None, optimizer)


class Separable(nn.Module):
    """What small image models are made of."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3)
        self.depthwise = nn.Conv2d(32, 32, 3, groups=32)
        self.pointwise = nn.Conv2d(32, 64, 1)
        self.norm = nn.BatchNorm2d(64)
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        x = torch.relu(self.depthwise(torch.relu(self.stem(x))))
        return self.fc(torch.relu(self.norm(self.pointwise(x))).mean((2, 3)))


@pytest.mark.parametrize("pattern", [sp.Unstructured(), sp.Block(4, 4)], ids=str)
@pytest.mark.parametrize("method", [sp.static, lambda: sp.set_(every=1), lambda: sp.rigl(every=1)])
@pytest.mark.parametrize("allocation", [sp.uniform, sp.erdos_renyi, sp.by_sensitivity(sp.magnitude)])
def test_s10_at_99_percent_no_layer_dies(pattern, method, allocation):
    model = Separable()
    with torch.no_grad():
        model.pointwise.weight.mul_(1e-6)
    sp.sparsify(model, pattern, 0.01, storage="masked", allocation=allocation)
    x = torch.randn(4, 3, 8, 8)
    session = session_of(model, method())
    for _ in range(4):
        assert step(session, x).isfinite()
        assert zeros_hold(model)
        assert all(weight.topology.any() for weight in sparse_weights(model).values())


@pytest.mark.parametrize("method", [sp.static, lambda: sp.set_(every=1), lambda: sp.rigl(every=1)])
def test_s10_layers_that_compete_leave_each_other_a_unit_or_say_that_there_are_too_few(method):
    model = Separable()
    with torch.no_grad():
        model.pointwise.weight.mul_(1e-6)
    table = sp.sparsify(model, sp.Unstructured(), 0.01, storage="masked", allocation=sp.global_())
    assert table.density == pytest.approx(0.01, abs=1e-3)
    # a tenth of the total density is a layer's floor
    assert [row.active_units for row in table.rows if row.name == "pointwise"] == [
        round(0.001 * model.pointwise.weight.numel())
    ]
    session = session_of(model, method())
    for _ in range(4):
        assert step(session, torch.randn(4, 3, 8, 8)).isfinite()
        assert all(weight.topology.any() for weight in sparse_weights(model).values())
    with pytest.raises(ValueError, match=r"global_: expected a density that leaves every one of \d layers one unit"):
        sp.sparsify(Separable(), sp.Block(4, 4), 0.005, storage="masked", allocation=sp.global_(floor=0.0))


class Everything(nn.Module):
    """One of every family, one after the other."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.fc = nn.Linear(8, 8)

    def forward(self, tokens):
        x = self.conv(self.embed(tokens).mT).mT
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.fc(self.rnn(x)[0])


@pytest.mark.parametrize(
    ("start", "method"),
    [
        (1.0, sp.gmp(0.2, every=2, until=6)),
        (1.0, sp.gmp(0.2, every=2, until=6, allocation=sp.global_())),
        (1.0, sp.granet(0.2, every=2, until=6)),
        (1.0, sp.taylor_pruning(0.2, every=1, worst=0.5)),
        (1.0, sp.ac_dc(0.2, dense_steps=2, sparse_steps=2, until=6)),
        (0.2, sp.sr_ste()),
    ],
    ids=["gmp", "gmp global", "granet", "taylor", "ac_dc", "sr_ste"],
)
def test_every_method_trains_every_kind_of_layer_down_to_its_density(start, method):
    model = Everything()
    table = sp.sparsify(model, sp.Unstructured(), start, storage="masked", embeddings=True)
    assert {row.storage for row in table.rows} == {"masked"}
    session = session_of(model, method)
    tokens = torch.arange(40).view(4, 10) % 20
    for _ in range(8):
        assert step(session, tokens).isfinite()
        assert zeros_hold(model)
    assert session.metrics()["sparsity"] == pytest.approx(0.8, abs=0.01)


class LowRank(nn.Module):
    """An adapter beside a frozen layer, as LoRA has it."""

    def __init__(self, layer, rank=4, scale=0.5):
        super().__init__()
        self.layer, self.scale = layer.requires_grad_(False), scale
        self.down, self.up = nn.Parameter(torch.randn(rank, 16) / 4), nn.Parameter(torch.zeros(24, rank))

    def forward(self, x):
        return self.layer(x) + self.scale * (x @ self.down.T @ self.up.T)

    def merge(self):
        return sp.merge_adapter(self.layer, self.down, self.up, self.scale)


@every_storage
class TestS14AdapterOnASparseBase:
    def trained(self, pattern, storage):
        model = nn.Sequential(nn.Linear(16, 24))
        sp.sparsify(model, pattern, 0.5, storage=storage)
        adapted = LowRank(model[0])
        optimizer = torch.optim.AdamW([adapted.down, adapted.up], lr=0.01)
        x = torch.randn(32, 16)
        for _ in range(10):
            optimizer.zero_grad()
            (adapted(x) - 1).square().mean().backward()
            optimizer.step()
        return model, adapted, x

    def test_merged_twice(self, pattern, storage):
        model, adapted, x = self.trained(pattern, storage)
        (weight,) = sparse_weights(model).values()
        before = weight.topology.clone()
        lost = adapted.merge()
        assert 0.0 < lost < 1.0
        outputs, state = adapted(x), copy.deepcopy(model.state_dict())
        assert zeros_hold(model)
        assert torch.equal(weight.topology, before)
        assert adapted.merge() == 0.0
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert torch.equal(adapted(x), outputs)
        assert torch.equal(model[0](x), outputs)

    def test_trained_on_and_merged_again(self, pattern, storage):
        """What the adapter learns after a merge comes on top of it, once."""
        model, adapted, _ = self.trained(pattern, storage)
        adapted.merge()
        merged = model[0].weight.detach().clone()
        with torch.no_grad():
            adapted.up.add_(1.0)
        update = (adapted.scale * adapted.up @ adapted.down).detach()
        adapted.merge()
        (weight,) = sparse_weights(model).values()
        active = weight.pattern.expand(weight.topology, weight.dense_shape)
        torch.testing.assert_close(model[0].weight.detach(), merged + update * active)


@pytest.mark.parametrize("pattern", [sp.Block(4, 4), sp.Unstructured()], ids=str)
def test_s14_a_merge_by_other_code_fills_the_zeros_and_is_undone_there(pattern):
    model = nn.Sequential(nn.Linear(16, 24))
    sp.sparsify(model, pattern, 0.5, storage="masked")
    with torch.no_grad():
        for _ in range(2):
            model[0].weight.add_(torch.randn(24, 4) @ torch.randn(4, 16))
            assert not zeros_hold(model)
            assert sp.apply_topology(model) == 192
            assert zeros_hold(model)
        model[0].weight.add_(1.0)
    session = session_of(model)  # whoever trains on gets zeros too
    assert zeros_hold(model)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    step(session, torch.randn(4, 16))
    assert zeros_hold(model)
