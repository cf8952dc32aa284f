"""Sparse models beside what a training script already has: torch.compile, forked data workers, averages of weights."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim.swa_utils import AveragedModel

import sparsam as sp
from sparsam.sparse.weights import sparse_weights


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 6)

    def forward(self, x):
        return self.fc(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc = nn.Linear(8, 6)

    def forward(self, x):
        return self.fc(self.attention(x, x, x, need_weights=False)[0])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, 8, batch_first=True)
        self.fc = nn.Linear(8, 6)

    def forward(self, x):
        return self.fc(self.rnn(x)[0])


MODELS = {"conv": (Convolutional, (4, 3, 6, 6)), "attention": (Attending, (4, 7, 8)), "LSTM": (Recurrent, (4, 7, 5))}
every_model = pytest.mark.parametrize("kind", MODELS)


def made(kind, pattern=sp.Unstructured(), storage="masked", method=None, parts=()):  # noqa: B008 (a value)
    make, shape = MODELS[kind]
    model = make()
    sp.sparsify(model, pattern, 0.5, storage=storage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    session = sp.Session(model, optimizer, [sp.SparseTraining(method or sp.set_(every=2, fraction=0.5)), *parts])
    return model, session, torch.randn(shape)


def step(session, x, model=None):
    with session.forward():
        loss = ((session.model if model is None else model)(x) - 1).square().mean()
    session.backward(loss)
    session.step()


class TestCompile:
    @every_model
    def test_after_sparsify_it_computes_the_same_and_rewires_need_no_new_graph(self, kind):
        torch._dynamo.reset()
        graphs = CompileCounterWithBackend("aot_eager")
        model, session, x = made(kind)
        compiled = torch.compile(model, backend=graphs)
        frames = []
        for _ in range(8):
            step(session, x, compiled)
            frames.append(graphs.frame_count)
        assert session.metrics()["topology_updates"] == 4
        assert frames[-1] == frames[1]
        assert all(not weight.parameter[~weight.active].any() for weight in sparse_weights(compiled).values())
        with torch.no_grad():
            torch.testing.assert_close(compiled.eval()(x), model.eval()(x))

    @every_model
    @pytest.mark.parametrize("verb", ["sparsify", "inspect", "densify", "compact"])
    def test_before_sparsify_it_is_refused_by_name(self, kind, verb):
        arguments = (sp.Unstructured(), 0.5) if verb in ("sparsify", "inspect") else ()
        model = torch.compile(MODELS[kind][0](), backend="eager")
        with pytest.raises(ValueError, match=f"{verb}: expected the plain model, got it wrapped in OptimizedModule"):
            getattr(sp, verb)(model, *arguments)

    @pytest.mark.parametrize("verb", ["sparsify", "inspect", "densify", "compact"])
    def test_so_is_a_compiled_layer_inside(self, verb):
        """It would go on with the dense layer that it has seen, and the sparse one would train beside it."""
        arguments = (sp.Block(4, 4), 0.5) if verb in ("sparsify", "inspect") else ()
        model = nn.Sequential(nn.Linear(8, 8), torch.compile(nn.Linear(8, 8), backend="eager"))
        with pytest.raises(ValueError, match=f"{verb}: expected the plain model, got 1 wrapped in OptimizedModule"):
            getattr(sp, verb)(model, *arguments)

    @pytest.mark.parametrize("storage", ["compact", "masked"])
    def test_a_module_that_compiled_itself_in_place_follows(self, storage):
        torch._dynamo.reset()
        model = Attending()
        model.compile(backend="eager")
        x = torch.randn(4, 7, 8)
        before = model(x)
        sp.sparsify(model, sp.Block(4, 4), 0.5, storage=storage, include=["fc"])
        attended = model.attention(x, x, x, need_weights=False)[0]
        torch.testing.assert_close(model(x), model.fc(attended))
        assert (model(x) != before).any()


FORKED = """
import torch, sparsam as sp
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    '''Its rows are computed with torch and with a sparse layer.'''

    def __init__(self, layer):
        self.layer = layer

    def __len__(self):
        return 24

    def __getitem__(self, index):
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(index))
        x = x @ x.T @ x / 128
        with torch.no_grad():
            y = self.layer(x)
            with torch.autocast("cpu", torch.bfloat16):
                y = y + self.layer(x).float()
        return x.mean(0), y.mean(0)

torch.manual_seed(0)
torch.set_num_threads(2)
frozen = nn.Sequential(nn.Linear(128, 128))
model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
for one in (frozen, model):
    sp.sparsify(one, sp.Block(32, 32), 0.5)
optimizer = torch.optim.AdamW(model.parameters())
session = sp.Session(model, optimizer, [sp.SparseTraining(sp.rigl(every=2)), sp.Precision("bf16")])

def step(x, y):
    with session.forward():
        loss = (model(x) - y).float().square().mean()
    session.backward(loss)
    session.step()

# the kernels and their threads are in use before any worker is forked
frozen(torch.randn(512, 128))
step(torch.randn(512, 128), torch.randn(512, 128))
for epoch in range(2):
    for x, y in DataLoader(Rows(frozen), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        assert y.isfinite().all()
        step(x, y)
        step(torch.randn(512, 128), torch.randn(512, 128))
wanted = Rows(frozen)[3]
found = next(iter(DataLoader(Rows(frozen), batch_size=4, num_workers=1, multiprocessing_context="fork")))
for a, b in zip(wanted, found):
    torch.testing.assert_close(a, b[3], rtol=1e-2, atol=1e-2)
print("done", session.applied_steps)
"""


def test_forked_data_workers_do_not_hang_and_compute_the_same(tmp_path):
    """The parent's OpenMP threads are not there in a fork, and AMX has to be allowed in it too."""
    script = tmp_path / "forked.py"
    script.write_text(FORKED)
    # a group of its own, so that workers that hang go with it
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"workers hang: {process.communicate()[1]}")
    assert process.returncode == 0, errors
    assert output == "done 25\n"


def dense(model):
    """Every weight matrix as the ordinary model has it."""
    plain = copy.deepcopy(model)
    sp.densify(plain)
    return {name: parameter.detach() for name, parameter in plain.named_parameters() if parameter.dim() > 1}


def inactive(model):
    found = {}
    for name, weight in sparse_weights(model).items():
        mask = ~weight.pattern.expand(weight.topology, weight.dense_shape)
        path = name if name in dict(model.named_parameters()) else f"{name}.weight"
        found[path] = mask.view(weight.shape)
    return found


STORAGES = [(sp.Block(2, 2), "compact"), (sp.Block(2, 2), "masked"), (sp.Unstructured(), "masked")]


class TestAverages:
    """torch's AveragedModel averages tensors, whatever they hold: right while the topology stays, and only then."""

    @pytest.mark.parametrize(("pattern", "storage"), STORAGES, ids=str)
    @every_model
    def test_torchs_is_right_for_a_static_topology(self, kind, pattern, storage):
        model, session, x = made(kind, pattern, storage, sp.static())
        average, seen = AveragedModel(model), []
        for _ in range(4):
            step(session, x)
            average.update_parameters(model)
            seen.append(dense(model))
        for name, found in dense(average.module).items():
            torch.testing.assert_close(found, torch.stack([weights[name] for weights in seen]).mean(0))
        assert sp.apply_topology(average) == 0

    @every_model
    def test_what_was_dropped_fades_in_torchs_and_apply_topology_ends_that(self, kind):
        model, session, x = made(kind)
        average = AveragedModel(model)
        for _ in range(4):
            step(session, x)
            average.update_parameters(model)
        assert any(dense(average.module)[name][mask].any() for name, mask in inactive(model).items())
        assert sp.apply_topology(average) > 0
        assert not any(dense(average.module)[name][mask].any() for name, mask in inactive(model).items())

    def test_torchs_mixes_blocks_in_compact_storage(self):
        """A slot that moved is averaged with what it held before: the topology looks right, the weights are not."""
        model = nn.Sequential(nn.Linear(16, 16, bias=False))
        sp.sparsify(model, sp.Block(4, 4), 0.5)
        average, before = AveragedModel(model), model[0].weight.clone()
        average.update_parameters(model)
        topology = model[0].topology
        model[0].rewire(topology.roll(1, 1))
        average.update_parameters(model)
        grown = sparse_weights(model)["0"].pattern.expand(model[0].topology & ~topology, (16, 16))
        assert not before[grown].any()
        assert not model[0].weight[grown].any()
        assert average.module[0].weight[grown].any()

    @pytest.mark.parametrize("average_first", [False, True])
    @every_model
    def test_ours_follows_rewires_of_every_kind_of_layer(self, kind, average_first):
        average = sp.MovingAverage(0.5)
        model, _, x = made(kind)
        parts = [sp.SparseTraining(sp.set_(every=2, fraction=0.5)), average]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        session = sp.Session(model, optimizer, parts[::-1] if average_first else parts)
        wanted = dense(model)
        for _ in range(4):
            before = inactive(model)
            step(session, x)
            now, found, zeros = dense(model), dense(average.model), inactive(model)
            for name, mask in zeros.items():
                assert not found[name][mask].any()
                stayed = ~mask & ~before[name]
                torch.testing.assert_close(found[name][stayed], ((wanted[name] + now[name]) / 2)[stayed])
            wanted = found
        with torch.no_grad():
            assert average.model(x).isfinite().all()
        assert all(
            torch.equal(mine.topology, theirs.topology)
            for mine, theirs in zip(sparse_weights(average.model).values(), sparse_weights(model).values(), strict=True)
        )
