"""Compression under DistributedDataParallel: everything arrives, on all ranks alike, and nothing hangs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsam as sp
from ranks import on_ranks, on_two_ranks
from sparsam.comm.codecs import Codec, Int8Rows
from sparsam.comm.part import Compression

IMPORTS = """
from sparsam.comm.codecs import BF16, Identity, Int8Rows, TopK
from sparsam.comm.part import Compression
AGREED = TopK(0.3, block=4, values=Int8Rows(16), agreed=True)
def kept(compression):
    return compression.residuals.state_dict()["residuals"]
"""

# A model whose gradients are what is given, so that what arrived is read off the weights: lr 1, and first weights 0.
SUMS = (
    IMPORTS
    + """
SHAPES = {"a": (20, 30), "bias": (30,), "b": (7, 3, 5), "one": (1, 1), "empty": (4, 0), "c": (40, 4)}
class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
    def forward(self, given):
        return sum((self.get_parameter(name) * value).sum() for name, value in given.items())
class Arrived:
    def __init__(self, codec, parts=(), accumulate=1, **options):
        self.model, self.compression = Sums(), Compression(codec, "always")
        ddp = DDP(self.model, bucket_cap_mb=0.002, **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        self.session = sp.Session(ddp, optimizer, [*parts, self.compression], accumulate=accumulate)
        self.true = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.draw = torch.Generator().manual_seed(rank)
    def window(self, unused=(), broken=False, micro=None):
        micro = micro or self.session.accumulate
        total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for number in range(micro):
            used = {name: shape for name, shape in SHAPES.items() if name not in unused}
            given = {name: torch.randn(shape, generator=self.draw) for name, shape in used.items()}
            for name, value in given.items():
                total[name] += value / micro
            if broken and rank == 1:
                given["a"][3, 4] = float("inf")
            with self.session.forward():
                loss = self.session.model(given)
            self.session.backward(loss)
            applied = self.session.step(last=number + 1 == micro)
        a, b = gathered(total)
        if applied:
            for name in SHAPES:
                self.true[name] += (a[name] + b[name]) / 2
        return applied
    def check(self, tolerance):
        a, b = gathered((kept(self.compression), weights(self.model)))
        assert a[1] == b[1]
        for name, shape in SHAPES.items():
            late = (a[0].get(name, torch.zeros(shape)) + b[0].get(name, torch.zeros(shape))) / 2
            weight = self.model.get_parameter(name).detach()
            torch.testing.assert_close(late - weight, self.true[name], rtol=tolerance, atol=tolerance, msg=name)
        assert "bias" not in a[0]
"""
)


@pytest.mark.slow
def test_all_gradients_arrive_or_wait(tmp_path):
    """Weights and residuals add up to the gradients of all ranks: through rebuilt buckets, windows full and cut short,
    a loss scale that grows and falls, and a step that is skipped."""
    on_two_ranks(
        SUMS
        + """
from sparsam.precision.scaler import LossScaler
for codec, tolerance in ((Identity(), 1e-6), (BF16(), 0.02), (Int8Rows(16), 1e-4), (TopK(0.3), 1e-4), (AGREED, 1e-4)):
    for accumulate in (1, 2):
        scaler = LossScaler(initial=2.0**10, interval=2)
        run = Arrived(codec, [scaler], accumulate)
        for number in range(7):
            before = kept(run.compression)
            broken = number == 4
            assert run.window(broken=broken, micro=1 if number == 2 else None) != broken
            if broken:
                assert all(torch.equal(before[name], value) for name, value in kept(run.compression).items())
            run.check(tolerance)
        assert scaler.scale == 2.0**12, scaler.scale
        assert (not kept(run.compression)) == (codec == Identity())
        assert run.compression.metrics()["comm.on"] == 1
        ratio = run.compression.metrics()["comm.ratio"]
        assert ratio == 1 if codec == Identity() else ratio < 0.7, ratio
""",
        tmp_path,
    )


@pytest.mark.slow
def test_unused_parameters_and_static_graphs(tmp_path):
    on_two_ranks(
        SUMS
        + """
for codec in (Int8Rows(16), TopK(0.3), AGREED):
    run = Arrived(codec, find_unused_parameters=True)
    for unused in ((), ("a",), ("a", "bias", "b"), ("c",) if rank else ("b",), (), ("empty", "one")):
        before, waiting = run.model.a.detach().clone(), kept(run.compression).get("a")
        assert run.window(unused)
        run.check(1e-4)
        if "a" in unused:  # on no rank: nothing moves, and what waits goes on waiting
            assert torch.equal(run.model.a, before)
            assert torch.equal(kept(run.compression)["a"], waiting)
    # (torch itself: no no_sync in the first window of a static graph)
    for options in ({"static_graph": True}, {"gradient_as_bucket_view": True, "accumulate": 2}):
        run = Arrived(codec, **options)
        for _ in range(3):
            assert run.window()
            run.check(1e-4)
""",
        tmp_path,
    )


def test_a_life_with_compression(tmp_path):
    on_two_ranks(
        IMPORTS
        + """
def made(parts, seed=0, cap=0.001, **options):
    torch.manual_seed(seed)
    model = DDP(mlp(), bucket_cap_mb=cap)
    return sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), parts, **options)
def batch():
    return torch.randn(6, 13, generator=torch.Generator().manual_seed(rank))
def same_on_ranks(session):
    a, b = gathered(weights(session.model))
    assert a == b
    return a
def error_of(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    raise AssertionError("no error")

# nothing lost is nothing changed: to the bit, clipped or not
for clip in (None, 0.05):
    plain, lossless = made([], clip=clip), made([Compression(Identity(), "always")], clip=clip)
    for _ in range(3):
        assert step(plain, batch()) and step(lossless, batch())
        assert same_on_ranks(plain) == same_on_ranks(lossless)
    assert clip is None or plain.metrics()["gradient_norm"] == lossless.metrics()["gradient_norm"]

# detached: plain means again, to the bit; attached again it compresses, with residuals that begin anew
compression = Compression(Int8Rows(16), "always")
session, groups = made([compression]), len(dist.distributed_c10d._world.pg_map)
step(session, batch())
assert "Keep one" in error_of(lambda: sp.Session(session.model, session.optimizer, [Compression(BF16())]))
session.detach()
assert len(dist.distributed_c10d._world.pg_map) == groups - 1 and not compression.on
plain = made([])
plain.model.load_state_dict(session.model.state_dict())
after = sp.Session(session.model, torch.optim.SGD(session.model.parameters(), lr=0.1))
for _ in range(2):
    step(plain, batch()), step(after, batch())
    assert same_on_ranks(plain) == same_on_ranks(after)
again = sp.Session(session.model, after.optimizer, [compression])
assert compression.on and not kept(compression)
step(again, batch())
assert set(kept(compression)) == {"0.weight", "2.weight"}
same_on_ranks(again)

# a run that is resumed goes on as the one that was not; a decision of the past is kept
state, weights_then = again.state_dict(), {name: value.clone() for name, value in again.model.state_dict().items()}
step(again, batch())
resumed = made([Compression(Int8Rows(16), "always")], seed=3)
resumed.model.load_state_dict(weights_then)
resumed.load_state_dict(state)
step(resumed, batch())
assert same_on_ranks(resumed) == same_on_ranks(again)
assert "expected the state of rank" in error_of(lambda: again.load_state_dict(gathered(state)[1 - rank]))
state["parts"][0]["on"] = False
resumed.load_state_dict(state)
plain.model.load_state_dict(resumed.model.state_dict())
step(resumed, batch()), step(plain, batch())
assert same_on_ranks(resumed) == same_on_ranks(plain)
assert resumed.metrics()["comm.on"] == 0 and resumed.metrics()["comm.ratio"] == 1

# what a link decides, all ranks decide, and say in the same words
measured = made([Compression(Int8Rows())])
a, b = gathered((measured.parts[0].on, measured.parts[0].decision))
assert a == b and a[1].startswith("compression is o"), (a, b)
step(measured, batch())

# gradients that were averaged must not come again; thrown away they may
session = made([Compression(Int8Rows(16), "always")], accumulate=2)
backward = lambda: session.backward(session.model(batch()).square().mean())
backward()
assert "no gradients from an earlier exchange" in error_of(backward)
foreign = made([Compression(Int8Rows(16), "always")])
foreign.model(batch()).square().mean().backward()
assert "one backward that talks to other ranks" in error_of(foreign.model(batch()).square().mean().backward)
session = made([Compression(Int8Rows(16), "always")])
session.model(batch()).square().mean().backward()
session.optimizer.zero_grad()
assert step(session, batch())
same_on_ranks(session)

# a rewire forgets what waited at units that moved, whichever part comes first; Taylor's weights are read
class Moved(sp.Part):
    events = ()
    def after_rewire(self, event):
        self.events = (*self.events, event)
for codec in (Int8Rows(16), TopK(0.2, "taylor"), AGREED):
    for storage in ("compact", "masked"):
        for first in (True, False):
            torch.manual_seed(rank)
            model = mlp()
            sp.sparsify(model, sp.Block(4, 4), 0.4, storage=storage, seed=rank)
            model, moved, compression = DDP(model, bucket_cap_mb=0.001), Moved(), Compression(codec, "always")
            parts = [compression, sp.SparseTraining(sp.rigl(every=2, fraction=0.5)), moved]
            session = sp.Session(model, torch.optim.AdamW(model.parameters()), parts if first else parts[::-1])
            names = {parameter: name for name, parameter in model.module.named_parameters()}
            for _ in range(4):
                moved.events = ()
                step(session, batch())
                for event in moved.events:
                    left = kept(compression)[names[event.parameter]]
                    assert not left.masked_select(event.new_entries).any() and left.any()
            assert moved.events
            a, b = gathered((hashes(model), weights(model)))
            assert a == b

# a group of the user's is used and left
group, groups = dist.new_group(), len(dist.distributed_c10d._world.pg_map)
session = made([Compression(Int8Rows(16), "always", group)])
assert step(session, batch()) and len(dist.distributed_c10d._world.pg_map) == groups
session.detach()
assert len(dist.distributed_c10d._world.pg_map) == groups and dist.get_world_size(group) == 2

# a model that lives on a part of the ranks
alone = dist.new_group([rank], use_local_synchronization=True)
torch.manual_seed(rank)
model = DDP(mlp(), process_group=alone)
session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), [Compression(Int8Rows(), "always")])
assert step(session, batch())
assert session.metrics()["comm.bytes"] == 0

# on a smaller group: attached again, and again
part = dist.new_group([0, 1], use_local_synchronization=True)
torch.manual_seed(0)
model = DDP(mlp(), process_group=part, bucket_cap_mb=0.001)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for ranks_per_node in (None, 1, 2, None):
    session = sp.Session(model, optimizer, [Compression(Int8Rows(16), "always", ranks_per_node=ranks_per_node)])
    assert step(session, batch())
    same_on_ranks(session)
    session.detach()
""",
        tmp_path,
    )


def test_a_rank_that_fails_tells_the_others(tmp_path):
    """D7's other half: what one rank raises in its thread ends the backward of both, long before any timeout."""
    on_two_ranks(
        IMPORTS
        + """
import dataclasses
@dataclasses.dataclass(frozen=True)
class Fails(Int8Rows):
    def encode(self, x, *, weights=None):
        if fail:
            raise ArithmeticError("cannot write this")
        return super().encode(x, weights=weights)
fail = False
compression = Compression(Fails(), "always")
model = DDP(mlp(), bucket_cap_mb=0.0005)
session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), [compression])
x = torch.ones(2, 13)
assert step(session, x) and step(session, x)
before = weights(model)
fail = rank == 1
try:
    step(session, x)
    raise AssertionError("went on")
except RuntimeError as error:
    assert rank == 0 or "cannot write this" in str(error), error
assert weights(model) == before
session.detach()
""",
        tmp_path,
    )


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _session(model: nn.Module, compression: Compression) -> sp.Session:
    return sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), [compression])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2, dtype=torch.float64), "weight: expected float32, bfloat16 or float16 on the CPU under Compr"),
        (nn.Sequential(nn.Embedding(4, 2, sparse=True)), "0: expected dense gradients under Compression, got an embed"),
    ],
    ids=["float64", "sparse embedding"],
)
def test_models_that_are_refused(model, message, one_rank):
    with pytest.raises(ValueError, match=message):
        _session(DistributedDataParallel(model), Compression(Int8Rows()))


def test_parameters_that_ddp_ignores_are_ignored(one_rank):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))
    model._ddp_params_and_buffers_to_ignore = ["1.weight", "1.bias"]
    _session(DistributedDataParallel(model), Compression(Int8Rows(), "always")).detach()


def test_a_model_without_ddp_is_refused():
    with pytest.raises(ValueError, match="Compression: expected a model in DistributedDataParallel, got a Linear"):
        _session(nn.Linear(2, 2), Compression(Int8Rows()))


def test_a_hook_of_somebody_else_is_refused(one_rank):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="without a hook, got one with a communication hook of its own"):
        _session(model, Compression(Int8Rows()))


class _Broken(Codec):
    def encode(self, x, *, weights=None):
        raise ArithmeticError("cannot write this")

    def decode(self, payload, n):
        raise AssertionError

    def bytes_of(self, n):
        raise AssertionError


def test_a_codec_that_cannot_be_measured_leaves_nothing_behind(one_rank):
    model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ArithmeticError, match="cannot write this"):
        _session(model, Compression(_Broken()))
    _session(model, Compression(Int8Rows(), "always")).detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gradients_of_16_bits_are_averaged_in_32(dtype, one_rank):
    model = DistributedDataParallel(nn.Linear(8, 8, dtype=dtype))
    compression = Compression(Int8Rows(), "always")
    session = _session(model, compression)
    session.backward(model(torch.ones(2, 8, dtype=dtype)).float().square().mean())
    assert session.step()
    assert compression.state_dict()["residuals"]["residuals"]["weight"].dtype == torch.float32
    session.detach()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((Int8Rows,), "codec: expected a codec such as Int8Rows"), ((Int8Rows(), "auto"), "when: expected 'measured' or")],
    ids=["class", "when"],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Compression(*arguments)


def test_nobody_waits_for_ranks_outside_of_a_models_group(tmp_path):
    on_ranks(
        3,
        """
group = dist.new_group([0, 1])
if rank < 2:
    torch.manual_seed(0)
    model = DDP(mlp(), process_group=group)
    before = model.module[2].bias.detach().clone()
    session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=1.0), accumulate=2, seed=rank)
    assert session.seed == 0
    # outputs count for their samples: 3 and 1 on one rank, 5 and 7 on the other
    for samples, target in (((3, 1.0), (1, 5.0)), ((5, 2.0), (7, 4.0)))[rank]:
        with session.forward():
            loss = (session.model(torch.ones(samples, 13)) * target).sum(1).mean()
        session.backward(loss, samples)
        session.step()
    mean = (3 * 1 + 1 * 5 + 5 * 2 + 7 * 4) / 16
    torch.testing.assert_close(before - model.module[2].bias, torch.full((9,), mean))
""",
        tmp_path,
    )
