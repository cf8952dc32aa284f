"""Faults of activation checkpointing that users of public tools reported, by number, each with its whole kind."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

import sparsam as sp
from ranks import on_two_ranks
from sparsam.formats import BF16
from sparsam.kernels.formats import FP8
from sparsam.precision.sampling import Sampler

MODES = [(1, False), (2, False), (5, False), (1, True), (2, True), (5, True)]


class Stack(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def session_of(model, *parts, **options):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sp.Session(model, torch.optim.SGD(trained, lr=0.1), list(parts), **options)


def run(model, *parts, inputs, steps=2, loss_of=lambda output: output.square().mean(), **options):
    """Losses, gradients and state of a few steps, from one seed."""
    session = session_of(model, *parts, **options)
    found = []
    torch.manual_seed(1)
    for _ in range(steps):
        for x in inputs:
            with session.forward():
                loss = loss_of(model(x))
            session.backward(loss)
            found.append(loss.detach())
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            session.step()
    return [*found, torch.rand(3), *(tensor.clone() for tensor in model.state_dict().values())]


def assert_same(left, right):
    assert len(left) == len(right)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class Rounded(nn.Module):
    """Rounds at random, with torch's generator or one that the layer holds."""

    def __init__(self, own):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)
        self.generator = torch.Generator().manual_seed(5) if own else None

    def forward(self, x):
        y = self.dropout(self.linear(x).tanh())
        noise = torch.randint(1 << 16, y.shape, generator=self.generator, dtype=torch.int32)
        rounded = ((y.detach().view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
        seeded = BF16.round(y.detach(), rounding="stochastic", seed=3)
        return x + y * rounded + seeded


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("every", "selective"), MODES)
def test_m1_dropout_and_stochastic_rounding_are_those_of_the_forward(every, selective, own):
    torch.manual_seed(0)
    model = Stack(*[Rounded(own) for _ in range(5)])
    twin, x = copy.deepcopy(model), torch.randn(4, 8)
    for one, other in zip(model.layers, twin.layers, strict=True):
        if own:
            other.generator = torch.Generator().manual_seed(5)
            one.generator = torch.Generator().manual_seed(5)
    plain = run(twin, inputs=[x, x])
    assert_same(plain, run(model, sp.Recompute(every, selective), inputs=[x, x]))


class Normed(nn.Module):
    """A batch norm, an observer whose scale the layer uses, a history of amax, and a spectral norm."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.observed = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.register_buffer("amax", torch.zeros(4))
        self.seen = 0
        self.part = None

    def forward(self, x):
        y = self.observed(self.norm(self.conv(x)).relu())
        self.amax = torch.cat([y.detach().abs().max()[None], self.amax[:-1]])
        if self.part is None or not self.part.recomputing:
            self.seen += 1
        return x + self.linear(y) / (1 + self.amax.max())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("every", "selective"), MODES)
def test_m2_statistics_observers_and_histories_move_once_a_batch(every, selective, accumulate):
    torch.manual_seed(0)
    model = Stack(*[Normed() for _ in range(3)])
    twin = copy.deepcopy(model)
    inputs = [torch.randn(3, 4, 6) for _ in range(2)]
    plain = run(twin, inputs=inputs, accumulate=accumulate)
    part = sp.Recompute(every, selective)
    for layer in model.layers:
        layer.part = part
    assert_same(plain, run(model, part, inputs=inputs, accumulate=accumulate))
    assert model.layers[0].norm.num_batches_tracked == 4
    assert [layer.seen for layer in model.layers] == [4, 4, 4]


def test_m2_operands_are_sampled_once_and_are_those_of_the_forward():
    def sampled(*parts):
        torch.manual_seed(0)
        model = Stack(*[nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4)])
        session = session_of(model, *parts)
        asked = []
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        sampler = Sampler(linear, lambda unit: asked.append(unit) or [FP8])
        sampler.watch()
        session.backward(model(torch.randn(8, 16)).square().mean())
        assert sorted(asked) == sorted(set(asked))
        return sampler.take()

    plain = sampled()
    assert len(plain) == 3 * 8
    assert plain == sampled(sp.Recompute(2)) == sampled(sp.Recompute(3, selective=True))


@pytest.mark.parametrize("product", ["kernel", "dense"])
@pytest.mark.parametrize("frozen", ["embedding", "all but the last layer"])
@pytest.mark.parametrize(("every", "selective"), MODES)
def test_m3_a_frozen_embedding_before_sparse_layers(every, selective, frozen, product):
    class Block(nn.Module):
        def __init__(self, first):
            super().__init__()
            self.embedding = nn.Embedding(10, 32) if first else None
            topology = torch.eye(2, dtype=torch.bool)
            self.linear = sp.SparseLinear(32, 32, topology, sp.Block(16, 16), activation="relu", product=product)
            nn.init.normal_(self.linear.values, std=0.3)

        def forward(self, x):
            x = x if self.embedding is None else self.embedding(x)
            return x + self.linear(x)

    torch.manual_seed(0)
    model = Stack(*[Block(first) for first in (True, False, False)])
    model.layers[0].embedding.requires_grad_(False)
    if frozen != "embedding":
        model.layers[:2].requires_grad_(False)
    twin, tokens = copy.deepcopy(model), torch.arange(8).view(2, 4)
    plain, found = run(twin, inputs=[tokens]), run(model, sp.Recompute(every, selective), inputs=[tokens])
    assert_same(plain, found)
    assert len(plain) == 2 * (1 + 2 * (3 if frozen == "embedding" else 1)) + 1 + len(model.state_dict())


Pair = namedtuple("Pair", ["stream", "aside"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    stream: torch.Tensor
    aside: torch.Tensor


@dataclasses.dataclass
class Filled:
    stream: torch.Tensor
    aside: dict
    note: str = "none"


class Named(OrderedDict):
    """A dict of a class of its own, as model libraries give."""


class Opaque:
    """Of a kind that nobody knows."""

    def __init__(self, stream, aside):
        self.stream, self.aside = stream, aside


KINDS = {
    "namedtuple": (Pair, lambda state: (state.stream, state.aside)),
    "frozen dataclass": (Frozen, lambda state: (state.stream, state.aside)),
    "dataclass": (lambda a, b: Filled(a, {"aside": [b]}), lambda state: (state.stream, state.aside["aside"][0])),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda state: (state["a"], state["b"])),
    "dict class": (lambda a, b: Named(a=a, b=b), lambda state: (state["a"], state["b"])),
    "tuple": (lambda a, b: (a, [b]), lambda state: (state[0], state[1][0])),
    "object": (Opaque, lambda state: (state.stream, state.aside)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("every", "selective"), MODES)
def test_m4_what_a_block_returns_keeps_its_type_and_gradients(every, selective, kind):
    make, read = KINDS[kind]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, state):
            stream, aside = read(state)
            return make(stream + self.one(stream).tanh() * aside, F.gelu(self.other(aside)) + stream)

    class Chain(Stack):
        def forward(self, x):
            state = super().forward(make(x, x.cos()))
            assert type(state) is type(make(x, x))
            return torch.cat(read(state))

    torch.manual_seed(0)
    model = Chain(*[Block() for _ in range(4)])
    twin, x = copy.deepcopy(model), torch.randn(3, 6)
    assert_same(run(twin, inputs=[x]), run(model, sp.Recompute(every, selective), inputs=[x]))


def test_m4_a_chain_of_dataclasses_is_one_segment():
    """So that what a block takes is found in what the one before gave."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, state, *, scale):
            return Filled(self.linear(state.stream) * scale, state.aside)

    class Chain(Stack):
        def forward(self, x):
            state, scale = Filled(x, {"mask": x.detach()}), x.new_ones(1)
            for layer in self.layers:
                state = layer(state, scale=scale)
            return state.stream

    part = sp.Recompute(3)
    model = Chain(*[Block() for _ in range(3)])
    session = session_of(model, part)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        loss = model(torch.ones(4, 6)).sum()
    # x, the mask and the scale for the first; the others take the scale alone, and the mask that their dict carries on
    assert kept == [(4, 6), (4, 6), (1,), (1,), (1,)]
    session.backward(loss)


def test_m1_to_m3_under_ddp_with_windows_and_growth(tmp_path):
    on_two_ranks(
        """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.dropout = nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Dropout(0.1)
    def forward(self, x):
        return x + self.dropout(self.linear(self.norm(x)).relu())
def trained(*parts):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(Layer(), Layer()) for _ in range(4)])
    sp.sparsify(model, sp.Block(16, 16), 0.5, if_slow="compact")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    training = sp.SparseTraining(sp.rigl(every=2, until=8))
    session = sp.Session(DDP(model), optimizer, [training, *parts], accumulate=2)
    torch.manual_seed(10 + rank)
    for _ in range(4):
        for _ in range(2):
            step(session, torch.randn(6, 32))
    assert training.updates == 2 and len(set(map(str, gathered(hashes(model))))) == 1
    return [weights(model), hashes(model), {k: v.tolist() for k, v in model.named_buffers()}]
plain = trained()
for part in (sp.Recompute(1), sp.Recompute(5), sp.Recompute(2, selective=True)):
    assert trained(part) == plain

# fully sharded: the weights of a layer are gathered for its recomputation
from torch.distributed.fsdp import fully_shard
def sharded(*parts):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    session = sp.Session(model, torch.optim.AdamW(model.parameters(), lr=0.01), list(parts))
    torch.manual_seed(10 + rank)
    for _ in range(3):
        step(session, torch.randn(6, 32))
    return [one.full_tensor().tolist() for one in model.parameters()]
plain = sharded()
assert sharded(sp.Recompute(1)) == plain
assert sharded(sp.Recompute(1, selective=True)) == plain
try:
    sharded(sp.Recompute(5))
except ValueError as error:
    assert str(error).startswith("0: expected every=1 with layers under fully_shard, got every=5"), error
else:
    raise AssertionError("accepted")
""",
        tmp_path,
    )
