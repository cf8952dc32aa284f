"""Faults that users of public tools reported, by the number that the project gives them, each with its whole kind."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import sparsam as sp
from sparsam.sparse.weights import sparse_weights

STORAGES = [(sp.Block(4, 4), "compact"), (sp.Block(4, 4), "masked"), (sp.Unstructured(), "masked")]
every_storage = pytest.mark.parametrize(("pattern", "storage"), STORAGES, ids=str)


def mlp(bias=True):
    return nn.Sequential(nn.Linear(13, 22, bias), nn.Tanh(), nn.Linear(22, 9, bias))


def session_of(model, method=None, optimizer=None, **options):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return sp.Session(model, optimizer, [sp.SparseTraining(method or sp.static())], **options)


def step(session, seed=0, rows=8):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 13, generator=generator)
    with session.forward():
        loss = (session.model(x) - 1).square().mean()
    session.backward(loss)
    return session.step()


def dense_weights(model):
    """Every weight matrix as the ordinary model would have it, by layer."""
    return {
        name: module.weight.detach().clone() for name, module in model.named_children() if hasattr(module, "weight")
    }


def inactive(model):
    """bool by layer, True = entry of a unit that does not exist."""
    return {
        name: ~weight.pattern.expand(weight.topology, weight.dense_shape)
        for name, weight in sparse_weights(model).items()
    }


@every_storage
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    ],
    ids=["SGD", "AdamW"],
)
class TestS1DensePastAndSparseFuture:
    """5 dense steps, prune half, 20 steps: pruned entries are exactly 0 after every step, and no stale moment acts."""

    def pruned(self, make, pattern, storage, method):
        model = mlp()
        optimizer = make(model.parameters())
        dense = sp.Session(model, optimizer)
        for seed in range(5):
            step(dense, seed)
        sp.sparsify(model, pattern, 0.5, storage=storage, optimizer=optimizer)
        return model, optimizer, session_of(model, method, optimizer)

    def test_pruned_stays_zero(self, make, pattern, storage):
        model, _, session = self.pruned(make, pattern, storage, sp.static())
        zeros = inactive(model)
        for seed in range(20):
            step(session, seed)
            weights = dense_weights(model)
            assert all(not weights[name][zeros[name]].any() for name in zeros)
            assert all(weights[name][~zeros[name]].all() for name in zeros)

    def test_no_stale_moment_acts_when_a_unit_grows_back(self, make, pattern, storage):
        """A step without gradients moves a grown weight nowhere: it has no momentum from its dense days."""
        model, optimizer, session = self.pruned(make, pattern, storage, sp.set_(every=2, fraction=0.5))
        for seed in range(2):
            before = inactive(model)
            step(session, seed)
        grown = {name: before[name] & ~after for name, after in inactive(model).items()}
        assert all(fresh.any() for fresh in grown.values())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        weights = dense_weights(model)
        assert all(not weights[name][fresh].any() for name, fresh in grown.items())


@every_storage
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_s2_a_copy_after_a_backward_lives_its_own_life(pattern, storage, copied):
    """Copies right after a backward, on an update step too; training the copy leaves the original alone."""
    model = mlp()
    sp.sparsify(model, pattern, 0.5, storage=storage)
    session = session_of(model, sp.rigl(every=1, fraction=0.5))
    with session.forward():
        loss = model(torch.randn(8, 13)).square().mean()
    session.backward(loss)
    before, topologies = dense_weights(model), inactive(model)
    twin = copied(model)
    other = session_of(twin, sp.set_(every=1, fraction=0.5))
    other.optimizer.zero_grad()
    for seed in range(4):
        step(other, seed)
    assert not all(torch.equal(a, b) for a, b in zip(inactive(twin).values(), topologies.values(), strict=True))
    assert all(torch.equal(weight, before[name]) for name, weight in dense_weights(model).items())
    assert all(torch.equal(where, topologies[name]) for name, where in inactive(model).items())
    assert session.step()


@every_storage
def test_s5_names_order_and_strict_loading_both_ways(pattern, storage):
    """sparsify and then densify, as often as one likes: the checkpoint is the dense model's."""
    model, dense = mlp(), mlp()
    for _ in range(2):
        sp.sparsify(model, pattern, 0.5, storage=storage)
        step(session := session_of(model, sp.set_(every=1)))
        session.detach()
        sp.densify(model)
    assert list(model.state_dict()) == list(dense.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in dense.named_parameters()]
    dense.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(mlp().state_dict(), strict=True)


RESUMED = """
import sys, torch, sparsam as sp
from torch import nn

KINDS = {
    "rigl": (sp.Block(4, 4), "compact", 0.4, lambda: sp.rigl(every=2, fraction=0.5, until=16)),
    "granet": (sp.Unstructured(), "masked", 1.0, lambda: sp.granet(0.2, every=2, until=12, fraction=0.5)),
    "gmp": (sp.Block(4, 4), "compact", 1.0, lambda: sp.gmp(0.3, every=3, until=12)),
    "movement": (sp.NM(2, 4), "masked", 0.5, lambda: sp.Resize(sp.movement, sp.linear(0.5, 0.2, steps=12), 3, 12)),
    "sr-ste": (sp.NM(2, 4), "masked", 0.5, sp.sr_ste),
}

def job(kind):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(13, 22), nn.Tanh(), nn.Linear(22, 9))
    pattern, storage, density, method = KINDS[kind]
    sp.sparsify(model, pattern, density, storage=storage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    method = method()
    rate = sp.LearningRate(sp.cosine(1.0, 0.1, steps=20))
    return model, sp.Session(model, optimizer, [sp.SparseTraining(method), rate, sp.Precision("bf16")], clip=1.0)

def run(model, session, first, last):
    for seed in range(first, last):
        x = torch.randn(8, 13, generator=torch.Generator().manual_seed(seed))
        with session.forward():
            loss = (model(x) - 1).square().mean()
        session.backward(loss)
        session.step()

def save(model, session, path):
    torch.save([model.state_dict(), session.optimizer.state_dict(), session.state_dict()], path)

if __name__ == "__main__":
    model, session = job(sys.argv[3])
    states = torch.load(sys.argv[1], weights_only=True)
    for owner, state in zip((model, session.optimizer, session), states):
        owner.load_state_dict(state)
    run(model, session, 5, 15)
    save(model, session, sys.argv[2])
"""


@pytest.mark.parametrize("kind", ["rigl", "granet", "gmp", "movement", "sr-ste"])
def test_s6_resume_in_a_new_process_is_bit_for_bit(kind, tmp_path):
    """Stopped in the middle of a schedule; another process goes on. Nothing may hang on a hash seed or a generator."""
    script = tmp_path / "resumed.py"
    script.write_text(RESUMED)
    scope = {"__name__": "job"}
    exec(compile(RESUMED, str(script), "exec"), scope)
    model, session = scope["job"](kind)
    scope["run"](model, session, 0, 5)
    scope["save"](model, session, tmp_path / "stopped.pt")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(tmp_path / "stopped.pt"), str(tmp_path / "resumed.pt"), kind],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    scope["run"](model, session, 5, 15)
    scope["save"](model, session, tmp_path / "whole.pt")
    whole, resumed = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "resumed"))
    assert str(whole[2]) == str(resumed[2])
    assert all(torch.equal(tensor, resumed[0][name]) for name, tensor in whole[0].items())
    for index, state in whole[1]["state"].items():
        assert all(torch.equal(value, resumed[1]["state"][index][key]) for key, value in state.items())


@every_storage
@pytest.mark.parametrize("change", ["sparsify", "densify", "compact"])
def test_s7_after_a_change_of_structure_every_parameter_is_held_once_and_moves(pattern, storage, change):
    model = mlp()
    if change != "sparsify":
        sp.sparsify(model, pattern, 0.5, storage=storage, headroom=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(sp.Session(model, optimizer))
    if change == "sparsify":
        sp.sparsify(model, pattern, 0.5, storage=storage, optimizer=optimizer)
    else:
        getattr(sp, change)(model, optimizer)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step(sp.Session(model, optimizer), seed=1)
    assert all((parameter != before[name]).any() for name, parameter in model.named_parameters())


@every_storage
class TestS8TopologyFollowsAndKeepsItsType:
    @pytest.mark.parametrize(
        "move", [lambda m: m.double(), lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to("meta")]
    )
    @pytest.mark.parametrize("loaded", ["before", "after", "never"])
    def test_move(self, pattern, storage, move, loaded):
        model, source = mlp(), mlp()
        for one in (model, source):
            sp.sparsify(one, pattern, 0.5, storage=storage)
        kinds = {name: buffer.dtype for name, buffer in model.named_buffers()}
        if loaded == "before":
            model.load_state_dict(source.state_dict())
        move(model)
        device = next(model.parameters()).device
        if loaded == "after" and device.type != "meta":
            model.load_state_dict(source.state_dict())
        assert {name: buffer.dtype for name, buffer in model.named_buffers()} == kinds
        assert {buffer.device for buffer in model.buffers()} == {device}
        if loaded != "never" and device.type != "meta":
            assert all(
                torch.equal(a, b) for a, b in zip(inactive(model).values(), inactive(source).values(), strict=True)
            )

    def test_training_goes_on_in_another_type(self, pattern, storage):
        model = mlp()
        sp.sparsify(model, pattern, 0.5, storage=storage)
        model.bfloat16()
        session = session_of(model, sp.rigl(every=1, fraction=0.5))
        for seed in range(3):
            x = torch.randn(8, 13, generator=torch.Generator().manual_seed(seed)).bfloat16()
            with session.forward():
                loss = (model(x) - 1).square().mean()
            session.backward(loss)
            session.step()
        zeros, weights = inactive(model), dense_weights(model)
        assert all(not weights[name][zeros[name]].any() for name in zeros)


class Tied(nn.Module):
    """Embedding and head of one tensor, and one Linear under two names."""

    def __init__(self, head_first=False):
        super().__init__()
        if head_first:
            self.head = nn.Linear(16, 40, bias=False)
        self.embed = nn.Embedding(40, 16)
        self.up = nn.Linear(16, 16)
        self.again = self.up
        if not head_first:
            self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.again(torch.tanh(self.up(self.embed(tokens))))))


@every_storage
@pytest.mark.parametrize("head_first", [False, True])
class TestS9TiedWeightsAreOneTensor:
    """30 % and not 51 %, one topology, counted once; the tie survives a save and load_state_dict(assign=True)."""

    def made(self, pattern, storage, head_first):
        model = Tied(head_first)
        kind = "auto" if storage == "compact" else storage
        return model, sp.sparsify(model, pattern, 0.7, storage=kind, embeddings=True)

    def test_pruned_and_counted_once(self, pattern, storage, head_first):
        model, table = self.made(pattern, storage, head_first)
        assert len(table.rows) == 2
        assert table.density == pytest.approx(0.7, abs=0.01)
        assert sum(row.weights for row in table.rows) + table.other_parameters == sum(
            parameter.numel() for parameter in Tied().parameters()
        )
        assert model.head.weight is model.embed.weight
        assert model.again is model.up
        assert (model.embed.weight != 0).float().mean() == pytest.approx(0.7, abs=0.01)
        assert len(sparse_weights(model)) == 2

    @pytest.mark.parametrize("assign", [False, True])
    def test_the_tie_survives(self, pattern, storage, head_first, assign, tmp_path):
        model, _ = self.made(pattern, storage, head_first)
        session = session_of(model, sp.set_(every=1, fraction=0.5))
        for _ in range(3):
            session.backward(model(torch.arange(8)).square().mean())
            session.step()
        torch.save(model.state_dict(), tmp_path / "model.pt")
        other, _ = self.made(pattern, storage, head_first)
        other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), assign=assign)
        for one in (other, copy.deepcopy(other)):
            assert one.head.weight is one.embed.weight
            assert one.again is one.up
            assert torch.equal(one(torch.arange(8)), model(torch.arange(8)))
            step_of = session_of(one, sp.set_(every=1, fraction=0.5))
            step_of.backward(one(torch.arange(8)).square().mean())
            step_of.step()
            assert (one.embed.weight != 0).float().mean() <= 0.71
        session.detach()
        sp.densify(model)
        assert model.head.weight is model.embed.weight
        assert list(model.state_dict()) == list(Tied(head_first).state_dict())

    def test_left_alone_unless_asked(self, pattern, storage, head_first):
        model = Tied(head_first)
        rows = sp.sparsify(model, pattern, 0.7, storage=storage, heads=True).rows
        assert {row.name: row.reason for row in rows if row.storage == "dense"} == {
            "head" if head_first else "embed": "embedding"
        }
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        assert model.head.weight is model.embed.weight


def test_s9_compact_storage_never_parts_a_tie():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    rows = sp.sparsify(model, sp.Block(4, 4), 0.5, storage="compact").rows
    assert [(row.name, row.storage) for row in rows] == [("0", "dense"), ("2", "compact")]
    assert rows[0].reason == "tied with 1: masked storage only"
    assert model[0].weight is model[1].weight


def four_epochs_of_103(session, last):
    """Trains on 103 samples in batches of 8. After each micro-batch: the inactive entries as they were at step `last`
    (until then, as they are), and as they are."""
    data, frozen = torch.randn(103, 13), None
    for _epoch in range(4):
        batches = list(data.split(8))
        for number, x in enumerate(batches, 1):
            with session.forward():
                loss = (session.model(x) - 1).square().mean()
            session.backward(loss, samples=len(x))
            session.step(last=number == len(batches))
            now = inactive(session.model)
            if session.applied_steps >= last:
                frozen = frozen or now
            yield frozen or now, now


@every_storage
@pytest.mark.parametrize("method", [sp.set_, sp.rigl])
def test_s11_103_samples_in_batches_of_8_and_windows_of_3(pattern, storage, method):
    """13 batches do not fill 5 windows: the last is stepped all the same, density is exact, and updates end on time."""
    model = mlp()
    table = sp.sparsify(model, pattern, 0.37, storage=storage)
    session = session_of(model, method(every=2, fraction=0.5, until=10), accumulate=3)
    counts = {row.name: row.active_units for row in table.rows}
    for frozen, now in four_epochs_of_103(session, last=10):
        assert {name: int(weight.topology.sum()) for name, weight in sparse_weights(model).items()} == counts
        assert all(torch.equal(where, frozen[name]) for name, where in now.items())
    assert session.applied_steps == 20
    assert session.metrics()["topology_updates"] == 5


@pytest.mark.parametrize("storage", ["compact", "masked"])
@pytest.mark.parametrize("make", [sp.gmp, sp.granet], ids=["gmp", "granet"])
def test_s11_a_density_schedule_ends_exactly_and_on_time(storage, make):
    """The last update falls on no multiple of the period, and on a window that the end of the data cuts short."""
    model = mlp()
    sp.sparsify(model, sp.Block(4, 4), 1.0, storage=storage)
    session = session_of(model, make(0.37, every=4, until=10, allocation=sp.uniform), accumulate=3)
    for frozen, now in four_epochs_of_103(session, last=10):
        assert all(torch.equal(where, frozen[name]) for name, where in now.items())
    for weight in sparse_weights(model).values():
        assert int(weight.topology.sum()) == round(0.37 * weight.topology.numel())


class TestS12ShapesThatDoNotFit:
    @pytest.mark.parametrize("size", [16, 32])
    def test_linear_768_to_1000(self, size):
        """1000 is no multiple of 16: padded inside, exact outside, padding neither counted nor trained."""
        dense = nn.Linear(768, 1000)
        model = nn.Sequential(copy.deepcopy(dense))
        (row,) = sp.sparsify(model, sp.Block(size, size), 0.25).rows
        assert row.units == -(-1000 // size) * (768 // size)
        weight = model[0].weight
        mask = weight != 0
        assert torch.equal(weight, dense.weight.detach() * mask)
        x = torch.randn(3, 768)
        torch.testing.assert_close(model(x), nn.functional.linear(x, weight, dense.bias), rtol=1e-4, atol=1e-4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        session = session_of(model, sp.rigl(every=1, fraction=0.5), optimizer)
        for _ in range(2):
            with session.forward():
                loss = model(x).square().mean()
            session.backward(loss)
            session.step()
        layer = model[0]
        assert torch.equal(layer.gather(layer.weight), layer.values)
        session.detach()
        sp.densify(model)
        assert model[0].weight.shape == (1000, 768)

    @every_storage
    def test_convolutions_are_masked_or_listed_and_biases_and_vectors_counted(self, pattern, storage):
        """27 columns are no multiple of 4: padded inside. Compact storage has no convolution, and says so."""
        model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(64, 16))
        table = sp.sparsify(model, pattern, 0.25, storage=storage)
        conv = table.rows[0]
        total, dropped = 64 * 27 + 64 + 128 + 64 * 16 + 16, 0.75 * 64 * 16
        if storage == "compact":
            assert (conv.storage, conv.reason.split(":")[-1]) == ("dense", " masked storage only, which saves no time")
        else:
            assert (conv.storage, conv.density) == ("masked", 0.25)
            dropped += 0.75 * 64 * 27
        assert table.density_all == pytest.approx((total - dropped) / total)
        assert model(torch.randn(2, 3, 3, 3)).shape == (2, 16)


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("density", [0.001, 0.5, 1.0], ids=["one block", "half", "full"])
@pytest.mark.parametrize("size", [(1, 4), (4, 1), (8, 16), (16, 16), (32, 64), (64, 64)], ids=str)
def test_s13_layers_of_every_block_size_equal_masked_dense(size, density, rows):
    """Forward and both gradients of a whole layer; the kernels alone are put through more in tests/kernels."""
    out_features, in_features = 2 * size[0] + 1, 2 * size[1] + 3
    dense = nn.Linear(in_features, out_features)
    models = {}
    for storage in ("compact", "masked"):
        models[storage] = nn.Sequential(copy.deepcopy(dense))
        sp.sparsify(models[storage], sp.Block(*size), density, storage=storage)
    x = torch.randn(rows, in_features)
    gradients = []
    for model in models.values():
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.square().sum().backward()
        layer = model[0]
        weight = layer.scatter(layer.values.grad) if hasattr(layer, "values") else layer.weight.grad
        gradients.append((y.detach(), leaf.grad, weight, layer.bias.grad))
    zeros = inactive(models["masked"])["0"]
    gradients[1][2][zeros] = 0
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@every_storage
@pytest.mark.parametrize("sizes", [(4, 4, 2), (10,), (9, 1), (2, 2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_t4_ten_samples_in_any_parts_equal_one_batch(pattern, storage, sizes, clip):
    """The same weights after the step, whatever the micro-batches; growth included."""
    x, y = torch.randn(10, 13), torch.randn(10, 9)
    after = []
    for parts in ((10,), sizes):
        torch.manual_seed(1)
        model = mlp()
        sp.sparsify(model, pattern, 0.5, storage=storage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session = session_of(model, sp.rigl(every=1, fraction=0.3), optimizer, accumulate=len(parts) + 1, clip=clip)
        for a, b in zip(x.split(list(parts)), y.split(list(parts)), strict=True):
            with session.forward():
                loss = (model(a) - b).square().mean()
            session.backward(loss, samples=len(a))
            assert not session.step()
        assert session.step(last=True)
        after.append((dense_weights(model), inactive(model)))
    for name in after[0][0]:
        torch.testing.assert_close(after[0][0][name], after[1][0][name], rtol=1e-5, atol=1e-6)
        assert torch.equal(after[0][1][name], after[1][1][name])


@every_storage
def test_t7_all_saved_state_loads_with_weights_only(pattern, storage, tmp_path):
    model = mlp()
    sp.sparsify(model, pattern, 0.5, storage=storage)
    parts = [sp.SparseTraining(sp.rigl(every=1)), sp.LearningRate(), sp.Precision("bf16")]
    session = sp.Session(model, torch.optim.AdamW(model.parameters()), parts)
    for seed in range(3):
        step(session, seed)
    torch.save([model.state_dict(), session.optimizer.state_dict(), session.state_dict()], tmp_path / "all.pt")
    states = torch.load(tmp_path / "all.pt", weights_only=True)
    for owner, state in zip((model, session.optimizer, session), states, strict=True):
        owner.load_state_dict(state)


def test_s3_attention_fast_path_equals_slow_path():
    """TransformerEncoderLayer reads its linears' weights itself in eval: zeros must be in force there too, and compact
    layers must either be read rightly or step aside."""
    for pattern, kind in STORAGES:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        model = nn.ModuleDict({"layer": layer})
        sp.sparsify(model, pattern, 0.5, storage=kind)
        x = torch.randn(2, 5, 32)
        slow = model["layer"].train()(x)
        with torch.no_grad():
            fast = model["layer"].eval()(x)
        torch.testing.assert_close(fast, slow.detach(), rtol=1e-4, atol=1e-5)


def test_every_pair_of_methods_can_follow_each_other():
    """Detach one, attach the next: training goes on from the topology that is there."""
    model = mlp()
    table = sp.sparsify(model, sp.Block(4, 4), 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    makers = (sp.static, lambda: sp.set_(every=1), lambda: sp.rigl(every=1))
    for make in itertools.chain.from_iterable(itertools.permutations(makers, 2)):
        session = session_of(model, make(), optimizer)
        step(session)
        session.detach()
    counts = {row.name: row.active_units for row in table.rows}
    assert {name: int(weight.topology.sum()) for name, weight in sparse_weights(model).items()} == counts
